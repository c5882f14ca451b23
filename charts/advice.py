"""Advice in words and as a picture: the cheapest card for a load, and what several cards do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..planning.advise import together
from ..planning.cards import STARTING, Price
from ..planning.phases import figure, gib
from ..planning.rates import class_of
from ..split_cost import KEYS, LEAST_GAIN, ROWS
from .figures import LINE, between, dollars, duration, folded, many, significant, table, tenths
from .run_chart import LEAST, Bar, Figure, RunPicture, run_chart, wrapped
from .words import (
    changes,
    request_text,
    rests_on,
    safer_text,
    settings_text,
    step_cache_lines,
    verdict,
)

if TYPE_CHECKING:
    from PIL import Image

    from ..planning.advise import Advice, Offer, Together
    from ..planning.estimate import Estimate

CARDS = 6  # that have a bar
NAME, THIRD = 560, 360  # pixels of a name beside a bar, and below a figure
EXCHANGED = {ROWS: "normalized rows", KEYS: "keys and values"}
COLUMNS = ("", "card", "in", "an image", "cards", "busy", "USD per image")


def advise_text(advice: Advice) -> str:
    """Says what `qwen-l40s advise` prints and the node keeps behind its picture: the cheapest card
    first, then all of them.
    """
    if not advice.offers:
        return "\n".join(["None of these cards has a price.", *_without_offer(advice)])
    blocks = [
        summary_lines(advice),
        folded(step_cache_lines(advice.ranked[0].found)),
        _ranking(advice),
        [
            "The number of cards carries the load even at the slowest predicted time.",
            "USD per image includes idle time.",
        ],
        folded(map(_basis, advice.ranked)),
        _without_offer(advice),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def summary_lines(advice: Advice) -> list[str]:
    """Says what the node shows, in at most six lines: the cheapest card, what follows, and the
    settings.
    """
    if not advice.fitting:
        return ["Every GPU with a price needs offloading: choose a smaller size or batch."]
    load = advice.images_per_hour
    best, *others = advice.fitting
    found = best.found
    lines = [
        f"Cheapest for {load:,.10g} images per hour: {_named(best, load)}, "
        f"${dollars(best.usd_for(load))} an image."
    ]
    if found.tight:
        lines += [verdict(found), safer_text(found)]
    following = [f"{_named(each, load)} ${dollars(each.usd_for(load))}" for each in others[:2]]
    if following and not found.tight:
        lines.append(f"Next cheapest: {', '.join(following)}.")
    lines.append(f"Set: {settings_text(found.option.setting)}.")
    if advice.unpriced:
        lines.append(f"{len(advice.unpriced)} cards have no price: enter yours to rank them.")
    return lines


def price_source(price: Price | None) -> str:
    """Says whose price it is, from when; a starting price is called so. None is the user's own."""
    if price is None:
        return "your own"
    words = [price.provider, price.date]
    if price.kind == STARTING:
        words.insert(1, "a starting price")
    return ", ".join(words)


def setting_text(offer: Offer) -> str:
    option = offer.found.option
    setting = option.setting
    words = [setting.precision, f"modulation {setting.modulation}"]
    words.append(f"text_encoder_placement {setting.placement}")
    return ", ".join(words if option.resident else [*words, "offloaded in every step"])


def _named(offer: Offer, load: float) -> str:
    tight = ", tight" * offer.found.tight
    return f"{offer.cards_for(load):,} {offer.name} in {_precision(offer)}{tight}"


def _precision(offer: Offer) -> str:
    return offer.found.option.setting.precision


def _ranking(advice: Advice) -> list[str]:
    """Has costs at other loads as well where the lines have room for them."""
    less, load, more = advice.loads
    rows = [[*COLUMNS, *(f"at {each:,.10g}/h" for each in (less, more))]]
    for number, offer in enumerate(advice.ranked, 1):
        found = offer.found
        rows.append(
            [
                str(number) if found.fits else "-",
                offer.name + ", tight" * found.tight,
                _precision(offer),
                duration(found.image_seconds),
                f"{offer.cards_for(load):,}",
                f"{offer.utilisation(load):.0%}",
                *(f"${dollars(offer.usd_for(each))}" for each in (load, less, more)),
            ]
        )
    right = (0, 3, 4, 5, 6, 7, 8)
    lines = table(rows, right)
    if max(map(len, lines)) > LINE:
        lines = table([row[: len(COLUMNS)] for row in rows], right)
    return lines


def _basis(offer: Offer) -> str:
    found = offer.found
    price = f"${dollars(offer.usd_per_hour)} an hour ({price_source(offer.price)})"
    unsure = found.calibration is None and not class_of(found.card).source
    rests = rests_on(found) + ", no public figure of its class" * unsure
    says = [f"{price}; {rests}; {setting_text(offer)}"]
    if not found.fits:
        says.insert(0, found.verdict)
    if found.safer:
        says.append(f"safer: {changes(found.option.setting, found.safer.setting)}")
    return f"{offer.name}: {'; '.join(says)}"


def _without_offer(advice: Advice) -> list[str]:
    lines = folded(f"{name}: {reason}" for name, reason in advice.refused.items())
    if advice.unpriced:
        first, count = advice.unpriced[0], len(advice.unpriced)
        lines.append(
            f"{count} cards have no price. Enter yours in USD per hour, in the node or as --price "
            f'"{first}=1.00":'
        )
        lines += folded([", ".join(advice.unpriced)])
    return lines


def cost_chart(advice: Advice) -> Image.Image:
    """Draws the cheapest card at three loads, and a bar for each of the cheapest at the load that
    was asked for; needs at least one that fits and costs something.
    """
    load, offers = advice.images_per_hour, advice.paid
    best = offers[0]
    request = best.found.request
    return run_chart(
        RunPicture(
            sign="tight" if best.found.tight else "good",
            answer=f"{_counted(best, load)}: {_usd(best.usd_for(load))} an image",
            basis=best.found.basis.kind,
            lines=(f"Cheapest for {load:,.10g} images per hour",),
            about=f"{request.family}, {request_text(request)}",
            figures=[_cheapest(offers, each) for each in advice.loads],
            bars=[
                Bar(
                    _counted(offer, load),
                    {"USD an image": offer.usd_for(load)},
                    _usd(offer.usd_for(load)),
                    duration(offer.found.image_seconds),
                )
                for offer in offers[:CARDS]
            ],
        )
    )


def _cheapest(offers: list[Offer], load: float) -> Figure:
    best = min(offers, key=lambda offer: offer.usd_for(load))
    cost = _usd(best.usd_for(load))
    return Figure(f"{load:,.10g} images/h", cost, _counted(best, load, THIRD))


def _usd(cost: float) -> str:
    # `$0.013`, `$12,345`, `$1.2e+06`: at most eight characters.
    if not 1e-4 <= cost < 1e6:
        return f"${cost:.1e}"
    return f"${cost:,.0f}" if cost >= 1000 else f"${dollars(cost)}"


def _counted(offer: Offer, load: float, room: int = NAME) -> str:
    # `4 RTX 4090`, `3 L40S, tight`; of a longer name the beginning.
    name = f"{offer.cards_for(load):,} {offer.name}{', tight' * offer.found.tight}"
    return wrapped(name, LEAST, room)[0].rstrip(",")


def cards_answer(
    found: Estimate, count: int, link: float | None = None
) -> tuple[Iterable[str], dict[str, Any]]:
    """Gives (sentences about several cards, what of them belongs into the estimate's JSON object).

    Args:
        count, link: as of `together`.
    """
    several = together(found, count, link)
    if several is None:
        return (), {"cards": None}
    return cards_lines(several), {"cards": cards_json(several)}


def cards_lines(found: Together) -> Iterator[str]:
    """Says what several cards are predicted to do for one image and for many, and why."""
    yield f"One image on {found.cards} cards: {'; '.join(_one_image(found))}."
    servers, one = (between(each, significant) for each in found.per_hour)
    yield (
        f"Many images: start a server for each card, which makes {servers} an hour; one image "
        f"after the other on all cards makes {one}."
    )
    if found.each > 1:
        low, likely, high = (f"{each / 1e9:.3g}" for each in found.links)
        carries = f"{likely} GB/s each way, as given."
        if found.assumed:
            carries = (
                f"assumed to carry {low} to {high} GB/s each way, likely {likely}, as PCIe does "
                "without NVLink. `qwen-l40s doctor` measures yours; give it with --link."
            )
        yield f"Link between cards: {carries}"
    if found.splits or found.prompts > 1:
        yield (
            f"Memory: at most {tenths(found.first_bytes)} GiB on the first card, "
            f"{tenths(found.other_bytes)} on each other one: all hold the whole transformer."
        )


def _one_image(found: Together) -> Iterator[str]:
    gain = between(found.gain, "{:.2f}".format)
    if found.splits or found.prompts > 1:
        faster = between(found.faster, "{:.2f}".format)
        yield f"{duration(found.together)}, {faster} times as fast as on one (predicted)"
    if found.prompts > 1:
        yield "ComfyUI's MultiGPU CFG Split computes both prompts at once"
    if idle := found.cards % found.prompts:
        yield f"{many(idle, 'card')} has nothing to do"
    if found.splits:
        exchanged = EXCHANGED[found.likely.best.name]
        yield f"{found.each} cards split the rows of a pass and exchange {exchanged}"
    elif found.refusal:
        yield f"one card computes a pass, as {found.refusal}"
    elif found.each > 1:
        yield (
            f"one card computes a pass, as {found.each} are predicted to be {gain} times as fast, "
            f"and less than {LEAST_GAIN} does not pay"
        )


def cards_json(found: Together) -> dict[str, Any]:
    """Gives figures in the unit of their name, from the fastest to the slowest; all predicted."""
    servers, one = found.per_hour
    best = found.likely.best if found.splits else None
    return {
        "count": found.cards,
        "link_gbps": [figure(each / 1e9) for each in found.links],
        "link_assumed": found.assumed,
        "prompts_at_once": found.prompts,
        "exchange": best and best.name,
        "image_rows": best and list(best.image_rows),
        "pass_gain": [figure(each) for each in found.gain],
        "image_seconds": [figure(each) for each in found.together],
        "times_as_fast": [figure(each) for each in found.faster],
        "images_per_hour": {
            "one_image_at_a_time": [figure(each) for each in one],
            "servers": [figure(each) for each in servers],
        },
        "many_images": "servers",
        "one_image": "cards" if found.faster.high > 1 else "one card",
        "first_card_gib": gib(found.first_bytes),
        "other_card_gib": gib(found.other_bytes),
        "basis": "predicted",
    }
