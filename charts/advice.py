"""An advice in words: the cheapest card for a load in six lines, then all of them in a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..planning.cards import STARTING, Price
from .figures import LINE, dollars, duration, folded, table
from .words import (
    changes,
    rests_on,
    safer_text,
    settings_text,
    step_cache_lines,
    verdict,
)

if TYPE_CHECKING:
    from ..planning.advise import Advice, Comparison, Offer

COLUMNS = ("", "card", "in", "an image", "cards", "busy", "USD per image")
COUNTED = (
    "The number of cards carries the load even at the slowest predicted time. USD per image "
    "includes idle time."
)


def advise_text(advice: Advice, comparisons: Sequence[Comparison]) -> str:
    """What `qwen-l40s advise` prints and the node keeps behind its picture: the cheapest card
    first, then all of them.

    Args:
        comparisons: of the card that the package is about with others.
    """
    if not advice.offers:
        return "\n".join(["None of these cards has a price.", *_without_offer(advice)])
    blocks = [
        summary_lines(advice),
        _folded(step_cache_lines(advice.ranked[0].found)),
        _ranking(advice),
        _folded([COUNTED]),
        _folded(map(_basis, advice.ranked)),
        _folded(map(comparison_text, comparisons)),
        _without_offer(advice),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _folded(texts: Iterable[str]) -> list[str]:
    return [line for text in texts for line in folded(text, "")]


def summary_lines(advice: Advice) -> list[str]:
    """What the node shows: the cheapest card, what follows, and the settings; at most six lines."""
    if not advice.fitting:
        return ["This runs slowly on every card with a price: choose a smaller size or batch."]
    load = advice.images_per_hour
    best, *others = advice.fitting
    found = best.found
    lines = [
        f"Cheapest for {load:,.10g} images per hour: {_named(best, load)}, "
        f"${dollars(best.usd_for(load))} an image."
    ]
    if found.tight:
        lines += [verdict(found), safer_text(found)]
    exact = next((each for each in advice.fitting if _precision(each) == "bf16"), best)
    if exact is not best:
        bf16 = f"{_named(exact, load)}, ${dollars(exact.usd_for(load))}"
        lines.append(f"Cheapest in bf16, as the model was trained: {bf16}.")
    following = [f"{_named(each, load)} ${dollars(each.usd_for(load))}" for each in others[:2]]
    if following and not found.tight:
        lines.append(f"Next cheapest: {', '.join(following)}.")
    lines.append(f"Set: {settings_text(found.option.setting)}.")
    if advice.unpriced:
        lines.append(f"{len(advice.unpriced)} cards have no price: enter yours to rank them.")
    return lines


def comparison_text(found: Comparison) -> str:
    """Which of two cards is cheaper at which load, and how sure that is."""
    same = found.first.name == found.second.name
    first, second = (
        offer.name + f" at ${dollars(offer.usd_per_hour)}/h" * same
        for offer in (found.first, found.second)
    )
    pair = f"{first} or {second}: "
    if found.cheaper is None:
        return f"{pair}both cost the same at full load."
    if found.cheaper is found.second:
        first, second = second, first
    text = f"the {first} is cheaper at {'every load' if found.at_every_load else 'most loads'}"
    if load := found.break_even:
        about = f"{load:,.0f}" if load >= 10 else f"{load:.3g}"
        text = (
            f"the {first} is cheaper above about {about} images per hour; below that, sometimes "
            f"the {second}"
        )
    doubt = "" if found.certain else ". The predicted times overlap, so this may not hold"
    return f"{pair}{text}{doubt}."


def price_source(price: Price | None) -> str:
    """Whose price it is, from when; a starting price is called so. None is the user's own."""
    if price is None:
        return "your own"
    words = [price.provider, price.date]
    if price.kind == STARTING:
        words.insert(1, "a starting price")
    return ", ".join(words)


def setting_text(offer: Offer) -> str:
    """The setting that a card is estimated in, in one clause."""
    option = offer.found.option
    setting = option.setting
    words = [setting.precision, f"modulation {setting.modulation}"]
    words.append(f"text_encoder_placement {setting.text_encoder_place}")
    return ", ".join(words if option.resident else [*words, "weights move in every step"])


def _named(offer: Offer, load: float) -> str:
    """`2 RTX 4090 in int8`."""
    return (
        f"{offer.cards_for(load):,} {offer.name} in {_precision(offer)}"
        f"{', tight' * offer.found.tight}"
    )


def _precision(offer: Offer) -> str:
    return offer.found.option.setting.precision


def _ranking(advice: Advice) -> list[str]:
    """A row for each card; costs at other loads as well where the lines have room for them."""
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
    says = [f"{price}; {rests_on(found)}; {setting_text(offer)}"]
    if not found.fits:
        says.insert(0, found.verdict)
    if found.safer:
        says.append(f"safer: {changes(found.option.setting, found.safer.setting)}")
    return f"{offer.name}: {'; '.join(says)}"


def _without_offer(advice: Advice) -> list[str]:
    lines = _folded(f"{name}: {reason}" for name, reason in advice.refused.items())
    if advice.unpriced:
        first, count = advice.unpriced[0], len(advice.unpriced)
        lines.append(
            f"{count} cards have no price. Enter yours in USD per hour, in the node or as --price "
            f'"{first}=1.00":'
        )
        lines += folded(", ".join(advice.unpriced), "")
    return lines
