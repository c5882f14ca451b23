"""What each card of a list offers for a wish: its setting, its time, its price."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import UnavailableError
from .advise import Offer
from .cards import STARTING, Card, Price
from .crossover import Comparison, compare
from .estimator import Estimate, estimate
from .plan import Option
from .rates import Rates
from .wish import Wish

# The card that this package is about, and those that it is most often compared with.
SUBJECT = "L40S"
RIVALS = ("A100 80GB SXM", "H100 SXM")


@dataclass(frozen=True)
class Market:
    """Offers of many cards for one wish.

    Attributes:
        offers: Of the cards that have a price and run it.
        estimates: Of all cards that run it, by name.
        prices: {card's name: where its price is from}.
        unpriced: Names of cards that would run it and have no price.
        refused: {name of a card that cannot run it: why}.
    """

    offers: tuple[Offer, ...]
    estimates: Mapping[str, Estimate]
    prices: Mapping[str, str]
    unpriced: tuple[str, ...]
    refused: Mapping[str, str]

    def offer(self, name: str) -> Offer | None:
        """The offer of a card; None where it has none."""
        return next((offer for offer in self.offers if offer.card.name == name), None)

    def comparisons(self, names: Sequence[str] | None = None) -> tuple[Comparison, ...]:
        """The first of the named cards on which the wish fits, with each of the others.

        Args:
            names: of cards; by default the one that this package is about and its rivals.
        """
        found = map(self.offer, names or (SUBJECT, *RIVALS))
        offers = [offer for offer in found if offer and offer.fits]
        return tuple(compare(offers[0], other) for other in offers[1:])


def market(
    wish: Wish,
    cards: Iterable[Card],
    own_prices: Mapping[str, float] | None = None,
    calibration_of: Callable[[str], Rates | None] = lambda name: None,
) -> Market:
    """Estimates a wish on every card, each in the setting that its plan recommends.

    Args:
        own_prices: {card's name: USD an hour} over those of the list, of which the cheapest on
            demand counts.
        calibration_of: what was measured on a card of a name, or None.

    Raises:
        SettingError: a price is negative or no number.
    """
    own_prices = own_prices or {}
    offers, unpriced = [], []
    estimates: dict[str, Estimate] = {}
    prices: dict[str, str] = {}
    refused: dict[str, str] = {}
    for card in cards:
        listed, own = card.price(), own_prices.get(card.name)
        usd = own if own is not None else listed.usd_per_hour if listed else None
        try:
            found = estimate(wish, card, calibration=calibration_of(card.name), usd_per_hour=usd)
        except UnavailableError as error:
            refused[card.name] = str(error)
            continue
        estimates[card.name] = found
        if usd is None:
            unpriced.append(card.name)
            continue
        prices[card.name] = "your own" if own is not None else price_source(listed)
        offers.append(Offer(card, found.image_seconds, usd, found.fits, setting_note(found.option)))
    return Market(tuple(offers), estimates, prices, tuple(unpriced), refused)


def price_source(price: Price) -> str:
    """Whose price it is, from when; a starting price is called so."""
    words = [price.provider, price.date]
    if price.kind == STARTING:
        words.insert(1, "a starting price")
    return ", ".join(words)


def setting_note(option: Option) -> str:
    """The setting of an offer in one clause."""
    setting = option.setting
    words = [setting.precision, f"modulation {setting.modulation}"]
    words.append(f"text encoder {setting.text_encoder_place}")
    return ", ".join(words if option.resident else [*words, "weights move in every step"])
