"""An advice in words: the cheapest card for a load in six lines, then all of them in a table."""

from __future__ import annotations

from collections.abc import Sequence
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
    from ..planning.advise import Advice, Comparison, Market

COLUMNS = ("", "card", "in", "an image", "cards", "busy", "USD per image")
COUNTED = (
    "The number of cards carries the load even at the slowest predicted time. USD per image "
    "includes idle time."
)


def table_loads(images_per_hour: float) -> tuple[float, float, float]:
    """The loads of the table: a tenth of the one that was asked for, itself, and ten times it."""
    return images_per_hour / 10, images_per_hour, images_per_hour * 10


def advise_text(
    market: Market, advices: Sequence[Advice], comparisons: Sequence[Comparison]
) -> str:
    """What `qwen-l40s advise` prints and the node keeps behind its picture: the cheapest card
    first, then all of them.

    Args:
        advices: of `market.offers`, ranked.
        comparisons: of the card that the package is about with others.
    """
    if not advices:
        return "\n".join(["None of these cards has a price.", *_without_offer(market)])
    first = market.estimates[advices[0].offer.card.name]
    priced = [line for advice in advices for line in folded(_basis(market, advice), "")]
    blocks = [
        summary_lines(market, advices),
        [line for text in step_cache_lines(first) for line in folded(text, "")],
        _ranking(market, advices),
        folded(COUNTED, ""),
        priced,
        [line for found in comparisons for line in folded(comparison_text(found), "")],
        _without_offer(market),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def summary_lines(market: Market, advices: Sequence[Advice]) -> list[str]:
    """What the node shows: the cheapest card, what follows, and the settings; at most six lines."""
    fitting = [advice for advice in advices if advice.offer.fits]
    if not fitting:
        return ["This runs slowly on every card with a price: choose a smaller size or batch."]
    best, *others = fitting
    found = market.estimates[best.offer.card.name]
    load = f"{best.images_per_hour:,.10g} images per hour"
    lines = [f"Cheapest for {load}: {_named(market, best)}, ${dollars(best.usd)} an image."]
    if found.tight:
        lines += [verdict(found), safer_text(found)]
    exact = next((each for each in fitting if _precision(market, each) == "bf16"), best)
    if exact is not best:
        bf16 = f"{_named(market, exact)}, ${dollars(exact.usd)}"
        lines.append(f"Cheapest in bf16, as the model was trained: {bf16}.")
    following = [f"{_named(market, each)} ${dollars(each.usd)}" for each in others[:2]]
    if following and not found.tight:
        lines.append(f"Next cheapest: {', '.join(following)}.")
    lines.append(f"Set: {settings_text(found.option.setting)}.")
    if market.unpriced:
        lines.append(f"{len(market.unpriced)} cards have no price: enter yours to rank them.")
    return lines


def comparison_text(found: Comparison) -> str:
    """Which of two cards is cheaper at which load, and how sure that is."""
    same = found.first.card.name == found.second.card.name
    first, second = (
        offer.card.name + f" at ${dollars(offer.usd_per_hour)}/h" * same
        for offer in (found.first, found.second)
    )
    pair = f"{first} or {second}: "
    if found.cheaper is None:
        return f"{pair}both cost the same at full load."
    better, other = (first, second) if found.cheaper is found.first else (second, first)
    text = f"the {better} is cheaper at every load"
    if found.break_even:
        text = (
            f"the {better} is cheaper above {load_text(found.break_even)} images per hour; below "
            f"that, sometimes the {other}"
        )
    doubt = "" if found.certain else ". The predicted times overlap, so this may not hold"
    return f"{pair}{text}{doubt}."


def load_text(load: float) -> str:
    """`1,234`, `0.123`."""
    return f"{load:,.0f}" if load >= 10 else f"{load:.3g}"


def price_source(price: Price | None) -> str:
    """Whose price it is, from when; a starting price is called so. None is the user's own."""
    if price is None:
        return "your own"
    words = [price.provider, price.date]
    if price.kind == STARTING:
        words.insert(1, "a starting price")
    return ", ".join(words)


def setting_text(market: Market, name: str) -> str:
    """The setting that a card is estimated in, in one clause."""
    option = market.estimates[name].option
    setting = option.setting
    words = [setting.precision, f"modulation {setting.modulation}"]
    words.append(f"text_encoder_placement {setting.text_encoder_place}")
    return ", ".join(words if option.resident else [*words, "weights move in every step"])


def _named(market: Market, advice: Advice) -> str:
    """`2 RTX 4090 in int8`."""
    name = advice.offer.card.name
    tight = ", tight" * advice.offer.tight
    return f"{advice.cards[1]:,} {name} in {_precision(market, advice)}{tight}"


def _precision(market: Market, advice: Advice) -> str:
    return market.estimates[advice.offer.card.name].option.setting.precision


def _ranking(market: Market, advices: Sequence[Advice]) -> list[str]:
    """A row for each card; costs at other loads as well where the lines have room for them."""
    less, _, more = loads = table_loads(advices[0].images_per_hour)
    heads = [*COLUMNS, *(f"at {load:,.10g}/h" for load in (less, more))]
    rows = [heads, *(_row(market, number, each, loads) for number, each in enumerate(advices, 1))]
    right = (0, 3, 4, 5, 6, 7, 8)
    lines = table(rows, right)
    if max(map(len, lines)) > LINE:
        lines = table([row[: len(COLUMNS)] for row in rows], right)
    return lines


def _row(market: Market, number: int, advice: Advice, loads: Sequence[float]) -> list[str]:
    offer = advice.offer
    less, _, more = (f"${dollars(offer.usd_for(load))}" for load in loads)
    return [
        str(number) if offer.fits else "-",
        offer.card.name + ", tight" * offer.tight,
        _precision(market, advice),
        duration(offer.seconds),
        f"{advice.cards[1]:,}",
        f"{advice.utilisation:.0%}",
        f"${dollars(advice.usd)}",
        less,
        more,
    ]


def _basis(market: Market, advice: Advice) -> str:
    offer = advice.offer
    name = offer.card.name
    found = market.estimates[name]
    price = f"${dollars(offer.usd_per_hour)} an hour ({price_source(market.prices[name])})"
    says = [f"{price}; {rests_on(found)}; {setting_text(market, name)}"]
    if not offer.fits:
        says.insert(0, found.verdict)
    if found.safer:
        says.append(f"safer: {changes(found.option.setting, found.safer.setting)}")
    return f"{name}: {'; '.join(says)}"


def _without_offer(market: Market) -> list[str]:
    lines = [
        line for name, reason in market.refused.items() for line in folded(f"{name}: {reason}", "")
    ]
    if market.unpriced:
        first, count = market.unpriced[0], len(market.unpriced)
        lines.append(
            f"{count} cards have no price. Enter yours in USD per hour, in the node or as --price "
            f'"{first}=1.00":'
        )
        lines += folded(", ".join(market.unpriced), "")
    return lines
