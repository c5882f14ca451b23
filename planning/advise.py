"""Which card paints a load of images for the least, where cards are rented by the hour all day.

N images an hour at t seconds each need ceil(N t / 3600) cards, so the cost of an image is a
sawtooth over the load: lowest where the cards are busy all the time. Where t is predicted as a
range, its slow end counts, so that the cards carry the load in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SettingError, UnavailableError
from .cards import SECONDS_PER_HOUR, Card, Price, check_positive, check_price
from .estimate import Estimate, estimate, usd_range
from .phases import Range, figure
from .rates import Rates
from .request import RunRequest

# The card that this package is about, and those that it is most often compared with.
SUBJECT = "L40S"
RIVALS = ("A100 80GB SXM", "H100 SXM")
# Images an hour. A card paints some hundred.
LOADS = (1e-6, 10**9)
# A load that so many cards just meet in decimals needs no further card for a rounding error.
ROUNDING = 1e-9
# Offers whose costs at full use differ by less than this share count as equal.
EQUAL = 0.001


@dataclass(frozen=True)
class Offer:
    """A card at a price, and how fast it paints.

    Args:
        seconds: for an image, from the shortest to the longest that is to be expected.
        usd_per_hour: for one card.
        fits: whether what is to run fits on it.
        tight: whether it fits with little to spare, as `Estimate.tight` says.

    Raises:
        SettingError: the price is negative or no number, or a time is not above 0.
    """

    card: Card
    seconds: Range
    usd_per_hour: float
    fits: bool = True
    tight: bool = False

    def __post_init__(self) -> None:
        check_price(self.usd_per_hour)
        for seconds in self.seconds:
            check_positive("seconds per image", seconds)
        if self.seconds.low > self.seconds.high:
            raise SettingError(
                f"seconds per image are {self.seconds.low} to {self.seconds.high}: give the "
                "shorter time first."
            )

    @property
    def full_usd_per_image(self) -> Range:
        """US dollars for an image where the card is busy all the time."""
        return usd_range(self.usd_per_hour, self.seconds)

    def cards_for(self, images_per_hour: float, seconds: float | None = None) -> int:
        """How many cards a load needs at `seconds` an image, by default the longest."""
        seconds = self.seconds.high if seconds is None else seconds
        needed = images_per_hour * seconds / SECONDS_PER_HOUR
        return max(1, math.ceil(needed * (1 - ROUNDING)))

    def usd_for(self, images_per_hour: float, seconds: float | None = None) -> float:
        """US dollars for an image at a load, on the cards for `seconds` an image."""
        return self.cards_for(images_per_hour, seconds) * self.usd_per_hour / images_per_hour


@dataclass(frozen=True)
class Advice:
    """What a load costs with one offer.

    Attributes:
        cards: how many are needed, at the shortest and the longest time.
        usd_per_image: at this load, at the shortest and the longest time.
    """

    offer: Offer
    images_per_hour: float
    cards: tuple[int, int]
    usd_per_image: Range

    @property
    def usd(self) -> float:
        """US dollars for an image on cards that carry the load at the longest time: what the
        ranking goes by, and what is printed.
        """
        return self.offer.usd_for(self.images_per_hour)

    @property
    def utilisation(self) -> float:
        """The share of the rented hours in which these cards paint, at the longest time."""
        busy = self.images_per_hour * self.offer.seconds.high / SECONDS_PER_HOUR
        return min(1.0, busy / self.cards[1])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        offer, full = self.offer, self.offer.full_usd_per_image
        return {
            "card": offer.card.name,
            "usd_per_hour": offer.usd_per_hour,
            "seconds_per_image": figure(offer.seconds.middle),
            "cards": self.cards[1],
            "usd_per_image": figure(self.usd),
            "full_usd_per_image": figure(full.middle),
            "utilisation": figure(self.utilisation),
            "fits": offer.fits,
            "tight": offer.tight,
            "ranges": {
                "seconds_per_image": [figure(end) for end in offer.seconds],
                "cards": list(self.cards),
                "usd_per_image": [figure(end) for end in self.usd_per_image],
                "full_usd_per_image": [figure(end) for end in full],
            },
        }


def advise(images_per_hour: float, offers: Iterable[Offer]) -> tuple[Advice, ...]:
    """Ranks offers by the cost of an image at a load; what does not fit comes last.

    Raises:
        SettingError: the load is not a finite number above 0, or beyond `LOADS`.
    """
    check_positive("images per hour", images_per_hour)
    least, most = LOADS
    if not least <= images_per_hour <= most:
        raise SettingError(
            f"images per hour is {images_per_hour:g}: give {least:g} to {most:,} of them."
        )
    advices = []
    for offer in offers:
        cards, usd = (
            [of(images_per_hour, end) for end in offer.seconds]
            for of in (offer.cards_for, offer.usd_for)
        )
        advices.append(Advice(offer, images_per_hour, tuple(cards), Range(*usd)))
    return tuple(sorted(advices, key=_rank))


def _rank(advice: Advice) -> tuple:
    offer = advice.offer
    full = offer.full_usd_per_image.high
    return (not offer.fits, round(advice.usd, 15), full, offer.card.name)


@dataclass(frozen=True)
class Comparison:
    """Two offers over all loads, at the longest of their times.

    Attributes:
        cheaper: the one that costs less where cards are always busy; None where both cost the same.
        break_even: images an hour, above which it costs less or the same at every load; 0 where
            that is so from the first image on.
        certain: whether the ranges of both costs at full use are disjoint.
    """

    first: Offer
    second: Offer
    cheaper: Offer | None
    break_even: float
    certain: bool


def compare(first: Offer, second: Offer) -> Comparison:
    """Finds the load from which one of two offers is the cheaper one for good.

    With price p and c images a card and hour, a load N costs p ceil(N / c) an hour: at least
    N p / c and less than p above that. So from p / (difference of both p / c) on, p being that of
    the cheaper one, it stays the cheaper one. Below, for each number of its cards, the other one
    is the cheaper one while fewer dollars of it are needed.
    """
    full = [offer.full_usd_per_image for offer in (first, second)]
    busy = [offer.usd_per_hour * offer.seconds.high for offer in (first, second)]
    certain = full[0].high < full[1].low or full[1].high < full[0].low
    if math.isclose(*busy, rel_tol=EQUAL):
        return Comparison(first, second, None, 0.0, certain)
    better, other = (first, second) if busy[0] < busy[1] else (second, first)
    return Comparison(
        first, second, better, _last_load(better, other, abs(busy[0] - busy[1])), certain
    )


def _last_load(better: Offer, other: Offer, difference: float) -> float:
    """The highest load at which `other` is still the cheaper one; 0 where there is none."""
    rate, other_rate = (SECONDS_PER_HOUR / offer.seconds.high for offer in (better, other))
    ratio = better.usd_per_hour / other.usd_per_hour
    settled = better.usd_per_hour * SECONDS_PER_HOUR / difference
    for cards in range(math.floor(settled / rate) + 1, 0, -1):
        fewer_dollars = math.ceil(cards * ratio * (1 - ROUNDING)) - 1
        load = min(fewer_dollars * other_rate, cards * rate)
        if load > (cards - 1) * rate * (1 + ROUNDING):
            return load
    return 0.0


@dataclass(frozen=True)
class Market:
    """Offers of many cards for one request.

    Attributes:
        offers: Of the cards that have a price and run it.
        estimates: Of all cards that run it, by name.
        prices: {card's name: its listed price, or None where it is the user's own}.
        unpriced: Names of cards that would run it and have no price.
        refused: {name of a card that cannot run it: why}.
    """

    offers: tuple[Offer, ...]
    estimates: Mapping[str, Estimate]
    prices: Mapping[str, Price | None]
    unpriced: tuple[str, ...]
    refused: Mapping[str, str]

    def comparisons(self, names: Sequence[str] = (SUBJECT, *RIVALS)) -> tuple[Comparison, ...]:
        """The first of the named cards on which the request fits, with each of the others."""
        fitting = {offer.card.name: offer for offer in self.offers if offer.fits}
        offers = [fitting[name] for name in names if name in fitting]
        return tuple(compare(offers[0], other) for other in offers[1:])


def market(
    request: RunRequest,
    cards: Iterable[Card],
    own_prices: Mapping[str, float] | None = None,
    calibration_of: Callable[[Card], Rates | None] = lambda card: None,
) -> Market:
    """Estimates a request on every card, each in the setting that its plan recommends.

    Args:
        own_prices: {card's name: USD an hour} over those of the list, of which the cheapest on
            demand counts.
        calibration_of: gives what was measured on a card, or None.

    Raises:
        SettingError: a price is negative or no number.
    """
    own_prices = own_prices or {}
    offers, unpriced = [], []
    estimates: dict[str, Estimate] = {}
    prices: dict[str, Price | None] = {}
    refused: dict[str, str] = {}
    for card in cards:
        price = None if card.name in own_prices else card.price()
        usd = own_prices.get(card.name, price and price.usd_per_hour)
        try:
            found = estimate(request, card, calibration=calibration_of(card), usd_per_hour=usd)
        except UnavailableError as error:
            refused[card.name] = str(error)
            continue
        estimates[card.name] = found
        if usd is None:
            unpriced.append(card.name)
        else:
            prices[card.name] = price
            offers.append(Offer(card, found.image_seconds, usd, found.fits, found.tight))
    return Market(tuple(offers), estimates, prices, tuple(unpriced), refused)
