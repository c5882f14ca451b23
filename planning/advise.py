"""Which card paints a load of images for the least, where cards are rented by the hour all day.

N images an hour at t seconds each need ceil(N t / 3600) cards, so the cost of an image is a
sawtooth over the load: lowest where the cards are busy all the time. The arithmetic is in fractions
of the decimal figures as they are written, so that a load that is just met needs no card more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ..errors import SettingError
from .cards import Card
from .cost import SECONDS_PER_HOUR, check_positive, check_price, usd_range
from .estimate import Range, figure

# Images an hour, beyond which an answer would be none: a card paints some hundred.
LOADS = (1e-6, 10**9)


@dataclass(frozen=True)
class Offer:
    """A card at a price, and how fast it paints.

    Args:
        seconds: for an image, from the shortest to the longest that is to be expected.
        usd_per_hour: for one card.
        fits: whether what is to run fits on it.
        note: of the setting that the time is for, in one clause.

    Raises:
        SettingError: the price is negative or no number, or a time is not above 0.
    """

    card: Card
    seconds: Range
    usd_per_hour: float
    fits: bool = True
    note: str = ""

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
    def middle_seconds(self) -> float:
        """For an image: what is named where there is room for one figure."""
        return self.seconds.low if self.seconds.low == self.seconds.high else self.seconds.middle

    @property
    def full_usd_per_image(self) -> Range:
        """US dollars for an image where the card is busy all the time."""
        return usd_range(self.usd_per_hour, self.seconds)

    def images_per_card_hour(self, seconds: float) -> Fraction:
        """Of one card at `seconds` an image."""
        return SECONDS_PER_HOUR / exact(seconds)

    def cards_for(self, images_per_hour: float, seconds: float) -> int:
        """How many cards a load needs."""
        return math.ceil(exact(images_per_hour) / self.images_per_card_hour(seconds))

    def usd_for(self, images_per_hour: float, seconds: float) -> float:
        """US dollars for an image at a load."""
        cards = self.cards_for(images_per_hour, seconds)
        return float(cards * exact(self.usd_per_hour) / exact(images_per_hour))


@dataclass(frozen=True)
class Advice:
    """What a load costs with one offer.

    Attributes:
        cards: how many are needed, at the shortest and the longest time.
        usd_per_image: at this load, at the shortest and the longest time.
        utilisation: the share of the rented hours in which the cards paint, at the middle time.
    """

    offer: Offer
    images_per_hour: float
    cards: tuple[int, int]
    usd_per_image: Range
    utilisation: float

    @property
    def middle_cards(self) -> int:
        """How many are needed at the middle of the times."""
        return self.offer.cards_for(self.images_per_hour, self.offer.middle_seconds)

    @property
    def middle_usd(self) -> float:
        """US dollars for an image at the middle of the times: what the ranking goes by."""
        return self.offer.usd_for(self.images_per_hour, self.offer.middle_seconds)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        full = self.offer.full_usd_per_image
        return {
            "card": self.offer.card.name,
            "usd_per_hour": self.offer.usd_per_hour,
            "seconds_per_image": figure(self.offer.middle_seconds),
            "cards": self.middle_cards,
            "usd_per_image": figure(self.middle_usd),
            "full_usd_per_image": figure(full.middle),
            "utilisation": figure(self.utilisation),
            "fits": self.offer.fits,
            "note": self.offer.note,
            "ranges": {
                "seconds_per_image": [figure(end) for end in self.offer.seconds],
                "cards": list(self.cards),
                "usd_per_image": [figure(end) for end in self.usd_per_image],
                "full_usd_per_image": [figure(end) for end in full],
            },
        }


def advise(images_per_hour: float, offers: Sequence[Offer]) -> tuple[Advice, ...]:
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
    advices = [_advice(images_per_hour, offer) for offer in offers]
    return tuple(sorted(advices, key=_rank))


def exact(value: float) -> Fraction:
    """A figure as it is written in decimals: 0.1 is a tenth, not the nearest binary number."""
    return Fraction(str(value))


def _advice(load: float, offer: Offer) -> Advice:
    ends = offer.seconds
    middle = offer.middle_seconds
    needed = offer.cards_for(load, middle)
    return Advice(
        offer,
        load,
        cards=(offer.cards_for(load, ends.low), offer.cards_for(load, ends.high)),
        usd_per_image=Range(offer.usd_for(load, ends.low), offer.usd_for(load, ends.high)),
        utilisation=float(exact(load) / offer.images_per_card_hour(middle) / needed),
    )


def _rank(advice: Advice) -> tuple:
    offer = advice.offer
    full = offer.full_usd_per_image.middle
    return (not offer.fits, advice.middle_usd, full, offer.card.name)
