"""Estimates and advices for what a node was asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ....errors import UnavailableError
from ....machine.card_list import known_cards
from ....machine.store import load_calibration
from ....planning.advise import Advice, Comparison, Market, advise, market
from ....planning.estimate import Estimate, estimate
from ....planning.request import RunRequest
from .cards import ChosenCard
from .request import WiredRequest


def estimate_on(chosen: ChosenCard, wired: WiredRequest, usd_per_hour: float | None) -> Estimate:
    """The estimate of a request on a card, with what was measured on one of its name.

    Raises:
        SettingError: the price is negative or no number.
        UnavailableError: nothing that the request allows runs on the card.
    """
    card = chosen.card
    calibration = load_calibration(card)
    found = estimate(wired.request, card, calibration=calibration, usd_per_hour=usd_per_hour)
    return replace(found, notes=(*found.notes, *wired.notes), card_note=chosen.note)


@dataclass(frozen=True)
class LoadAdvice:
    """What a load costs on the cards of the list.

    Attributes:
        advices: The cheapest first.
        comparisons: Of the card that this package is about with its rivals.
    """

    market: Market
    advices: tuple[Advice, ...]
    comparisons: tuple[Comparison, ...]

    @property
    def best(self) -> Estimate:
        """Of the cheapest card that holds the request."""
        name = next(advice.offer.card.name for advice in self.advices if advice.offer.fits)
        return self.market.estimates[name]


def advise_on(
    request: RunRequest, images_per_hour: float, prices: Mapping[str, float]
) -> LoadAdvice:
    """Ranks the cards of the list.

    Args:
        prices: {card's name: USD an hour} over those of the list.

    Raises:
        SettingError: the load is not above 0.
        UnavailableError: no card with a price above 0 holds the request.
    """
    found = market(request, known_cards().values(), prices, load_calibration)
    advices = advise(images_per_hour, found.offers)
    if not any(advice.offer.fits and advice.offer.usd_per_hour for advice in advices):
        raise UnavailableError(
            "this fits no card with a price above 0: choose a smaller size or batch, leave "
            "settings on auto, or enter a price above 0."
        )
    return LoadAdvice(found, advices, found.comparisons())
