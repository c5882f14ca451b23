"""An advice in words: the cheapest card for a load first, then all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..planning.phases import Range
from .figures import between, dollars, duration, table, usd
from .words import rests_on

if TYPE_CHECKING:
    from ..planning.advise import Advice, Comparison, Market

ADVICE_COLUMNS = ["", "card", "in", "image", "cards", "busy", "USD an image", "when always busy"]


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
    rows = [_advice_row(market, number, advice) for number, advice in enumerate(advices, 1)]
    blocks = [
        _cheapest(market, advices),
        table([ADVICE_COLUMNS, *rows], right=(0, 3, 4, 5, 6, 7)),
        [f"{advice.offer.card.name}: {_setting_line(market, advice)}" for advice in advices],
        [comparison_text(found) for found in comparisons],
        _without_offer(market),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def comparison_text(found: Comparison) -> str:
    """Which of two cards is cheaper at which load, and how sure that is."""
    return f"{found.first.card.name} against {found.second.card.name}: {found.sentence}."


def _cheapest(market: Market, advices: Sequence[Advice]) -> list[str]:
    """The cheapest card; where it does not compute in bf16, the cheapest that does as well."""
    fitting = [advice for advice in advices if advice.offer.fits]
    if not fitting:
        return ["None of the cards with a price holds it: choose a smaller size or batch."]
    best = fitting[0]
    load = f"{best.images_per_hour:,.10g} images an hour"
    lines = [f"Cheapest for {load}: {_offer_words(market, best)}."]
    exact = next((each for each in fitting if _precision(market, each) == "bf16"), None)
    if exact not in (None, best):
        lines.append(f"Cheapest in bf16, as the model was trained: {_offer_words(market, exact)}.")
    return lines


def _offer_words(market: Market, advice: Advice) -> str:
    offer = advice.offer
    cards = between(Range(*advice.cards), lambda count: f"{count:.0f}")
    return (
        f"{cards} {offer.card.name} in {_precision(market, advice)} at "
        f"${dollars(offer.usd_per_hour)} an hour each, {usd(advice.usd_per_image)} an image"
    )


def _precision(market: Market, advice: Advice) -> str:
    return market.estimates[advice.offer.card.name].option.setting.precision


def _advice_row(market: Market, number: int, advice: Advice) -> list[str]:
    offer = advice.offer
    return [
        str(number) if offer.fits else "-",
        offer.card.name,
        _precision(market, advice),
        duration(offer.seconds),
        between(Range(*advice.cards), lambda count: f"{count:.0f}"),
        f"{advice.utilisation:.0%}",
        usd(advice.usd_per_image),
        usd(offer.full_usd_per_image),
    ]


def _setting_line(market: Market, advice: Advice) -> str:
    offer = advice.offer
    kind = rests_on(market.estimates[offer.card.name])
    fits = "" if offer.fits else "does not fit; "
    source = market.prices[offer.card.name]
    return f"{fits}{offer.note}; {kind}; ${dollars(offer.usd_per_hour)} an hour ({source})"


def _without_offer(market: Market) -> list[str]:
    lines = [f"{name}: {reason}" for name, reason in market.refused.items()]
    if market.unpriced:
        lines.append(
            f"no price is known of {', '.join(market.unpriced)}: give your own in USD an hour, as "
            f'--price "{market.unpriced[0]}=1.00" or as such a line in the node'
        )
    return lines
