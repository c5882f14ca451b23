"""An advice in words: the cheapest card for a load first, then all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..planning.cards import STARTING, Price
from ..planning.phases import Range
from .figures import between, dollars, duration, table, usd
from .words import rests_on, settings_text

if TYPE_CHECKING:
    from ..planning.advise import Advice, Comparison, Market

COLUMNS = ("", "card", "in", "image", "cards", "busy")


def table_loads(images_per_hour: float) -> tuple[float, float, float]:
    """The loads of the table: a tenth of the one that was asked for, itself, and ten times it."""
    return images_per_hour / 10, images_per_hour, images_per_hour * 10


def advise_text(
    market: Market, advices: Sequence[Advice], comparisons: Sequence[Comparison]
) -> str:
    """What `qwen-l40s advise` and the node print: the cheapest card first, then all of them.

    Args:
        advices: of `market.offers`, ranked.
        comparisons: of the card that the package is about with others.
    """
    if not advices:
        return "\n".join(["None of these cards has a price to compare.", *_without_offer(market)])
    loads = table_loads(advices[0].images_per_hour)
    heads = [*COLUMNS, *(f"USD at {load:,.10g}/h" for load in loads), "when always busy"]
    rows = [_row(market, number, advice, loads) for number, advice in enumerate(advices, 1)]
    blocks = [
        _cheapest(market, advices),
        table([heads, *rows], right=(0, 3, 4, 5, 6, 7, 8, 9)),
        [f"{advice.offer.card.name}: {_basis(market, advice)}" for advice in advices],
        [comparison_text(found) for found in comparisons],
        _without_offer(market),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def comparison_text(found: Comparison) -> str:
    """Which of two cards is cheaper at which load, and how sure that is."""
    same = found.first.card.name == found.second.card.name
    first, second = (
        offer.card.name + f" at ${dollars(offer.usd_per_hour)}/h" * same
        for offer in (found.first, found.second)
    )
    pair = f"{first} against {second}: "
    if found.cheaper is None:
        return f"{pair}both cost the same where the cards are always busy."
    better, other = (first, second) if found.cheaper is found.first else (second, first)
    text = f"the {better} is cheaper at every load"
    if found.break_even:
        text = (
            f"the {better} is cheaper above {load_text(found.break_even)} images an hour, the "
            f"{other} at some loads up to there"
        )
    doubt = "" if found.certain else " (the ranges of their costs overlap, so it may be otherwise)"
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
    words.append(f"text encoder {setting.text_encoder_place}")
    return ", ".join(words if option.resident else [*words, "weights move in every step"])


def _cheapest(market: Market, advices: Sequence[Advice]) -> list[str]:
    """The cheapest card; where it does not compute in bf16, the cheapest that does as well."""
    fitting = [advice for advice in advices if advice.offer.fits]
    if not fitting:
        return ["None of the cards with a price holds it: choose a smaller size or batch."]
    best = fitting[0]
    load = f"{best.images_per_hour:,.10g} images an hour"
    lines = [f"Cheapest for {load}: {_offer_text(market, best)}."]
    exact = next((each for each in fitting if _precision(market, each) == "bf16"), None)
    if exact not in (None, best):
        lines.append(f"Cheapest in bf16, as the model was trained: {_offer_text(market, exact)}.")
    setting = market.estimates[best.offer.card.name].option.setting
    return [*lines, f"Set: {settings_text(setting)}."]


def _offer_text(market: Market, advice: Advice) -> str:
    offer = advice.offer
    return (
        f"{_cards(advice)} {offer.card.name} in {_precision(market, advice)} at "
        f"${dollars(offer.usd_per_hour)} an hour each, {usd(advice.usd_per_image)} an image"
    )


def _precision(market: Market, advice: Advice) -> str:
    return market.estimates[advice.offer.card.name].option.setting.precision


def _cards(advice: Advice) -> str:
    return between(Range(*advice.cards), lambda count: f"{count:.0f}")


def _row(market: Market, number: int, advice: Advice, loads: Sequence[float]) -> list[str]:
    """Costs are at the middle of the times; the last one is a range."""
    offer = advice.offer
    return [
        str(number) if offer.fits else "-",
        offer.card.name,
        _precision(market, advice),
        duration(offer.seconds),
        _cards(advice),
        f"{advice.utilisation:.0%}",
        *(f"${dollars(offer.usd_for(load))}" for load in loads),
        usd(offer.full_usd_per_image),
    ]


def _basis(market: Market, advice: Advice) -> str:
    offer = advice.offer
    name = offer.card.name
    fits = "" if offer.fits else "does not fit; "
    price = f"${dollars(offer.usd_per_hour)} an hour ({price_source(market.prices[name])})"
    return f"{fits}{setting_text(market, name)}; {rests_on(market.estimates[name])}; {price}"


def _without_offer(market: Market) -> list[str]:
    lines = [f"{name}: {reason}" for name, reason in market.refused.items()]
    if market.unpriced:
        lines.append(
            f"no price is known of {', '.join(market.unpriced)}: give your own in USD an hour, as "
            f'--price "{market.unpriced[0]}=1.00" or as such a line in the node'
        )
    return lines
