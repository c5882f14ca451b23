"""A stretch of loads in which one of two offers is the cheaper one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ..errors import SettingError, UnavailableError
from .cards import STARTING, Card, Price
from .cost import SECONDS_PER_HOUR, check_positive, check_price, usd_range
from .estimate import Estimate, estimate
from .phases import Range, figure
from .plan import Option
from .rates import Rates
from .request import RunRequest


@dataclass(frozen=True)
class Stretch:
    """Loads above `low` up to and with `high`, in images an hour, at which one offer is cheaper.

    Attributes:
        high: infinite where it has no end.
        cheaper: None where both cost the same.
    """

    low: float
    high: float
    cheaper: Offer | None


# At which loads one offer is cheaper than another, exactly: both costs are steps over the load.

# Where two offers cost nearly the same at full use, their steps alternate without an end in sight.
MOST_CARDS = 1000


@dataclass(frozen=True)
class Comparison:
    """Two offers over all loads, at the middle of their times.

    Attributes:
        stretches: in order, from 0 on, without gaps; neighbours differ.
        certain: whether the same offers are cheaper in the same order at all ends of the ranges of
            their times; only the loads at which that changes may differ.
        sentence: the answer in words.
    """

    first: Offer
    second: Offer
    stretches: tuple[Stretch, ...]
    certain: bool
    sentence: str


def compare(first: Offer, second: Offer) -> Comparison:
    """Finds the loads at which each of two offers is the cheaper one.

    With price p and c images a card and hour, a load N costs p ceil(N / c) an hour: at least
    N p / c and less than p above that. So from p / (difference of both p / c) on, p being that of
    the one that is cheaper at full use, it is always the cheaper one; below, the steps at the
    multiples of both c are gone through. Where that takes more than `MOST_CARDS` of a card, the
    last stretch ends there. The same is done for the four pairs of ends of both times.
    """
    offers = (first, second)
    stretches = _stretches(offers, [offer.middle_seconds for offer in offers])
    ends = [stretches]
    if any(offer.seconds.low < offer.seconds.high for offer in offers):
        pairs = itertools.product(*(offer.seconds for offer in offers))
        ends = [_stretches(offers, pair) for pair in pairs]
    certain = all(_winners(other) == _winners(stretches) for other in ends)
    sentence = sentence_of(offers, stretches, ends)
    return Comparison(first, second, stretches, certain, sentence)


def _stretches(offers: tuple[Offer, Offer], seconds: Sequence[float]) -> tuple[Stretch, ...]:
    """Those of one time for each offer."""
    pairs = list(zip(offers, seconds, strict=True))
    rates = [offer.images_per_card_hour(time) for offer, time in pairs]
    prices = [exact(offer.usd_per_hour) for offer in offers]
    full = [price / rate for price, rate in zip(prices, rates, strict=True)]
    if prices[0] == prices[1] and (rates[0] == rates[1] or not prices[0]):
        return (Stretch(0.0, math.inf, None),)

    def cheaper(costs: list[Fraction]) -> Offer | None:
        return None if costs[0] == costs[1] else offers[costs[1] < costs[0]]

    last = MOST_CARDS * min(rates)
    settled = None
    if full[0] != full[1]:
        settled = prices[full[1] < full[0]] / abs(full[0] - full[1])
        last = min(last, settled)
    edges = {last} if last else set()
    for rate in rates:
        edges.update(rate * count for count in range(1, math.floor(last / rate) + 1))
    found: list[tuple[Fraction, Offer | None]] = []
    for edge in sorted(edges):
        costs = [price * math.ceil(edge / rate) for price, rate in zip(prices, rates, strict=True)]
        found.append((edge, cheaper(costs)))
    ends = [(float(edge), winner) for edge, winner in found]
    if settled == last:
        ends.append((math.inf, cheaper(full)))
    return _merged(ends)


def _merged(ends: list[tuple[float, Offer | None]]) -> tuple[Stretch, ...]:
    stretches: list[Stretch] = []
    for end, winner in ends:
        if stretches and stretches[-1].cheaper is winner:
            stretches[-1] = Stretch(stretches[-1].low, end, winner)
        else:
            low = stretches[-1].high if stretches else 0.0
            stretches.append(Stretch(low, end, winner))
    return tuple(stretches)


def _winners(stretches: Iterable[Stretch]) -> list[Offer | None]:
    return [stretch.cheaper for stretch in stretches]


# At which loads one of two offers is the cheaper one, in a sentence.

Stretches = Sequence[Stretch]
MOST_STRETCHES = 3
# Of the faster offer: with so many the one card that is not always busy matters little.
MANY_CARDS = 100


def sentence_of(
    offers: tuple[Offer, Offer], stretches: Stretches, ends: Sequence[Stretches]
) -> str:
    """Which is cheaper where, at the middle of their times and at the ends of their ranges.

    Args:
        stretches: at the middle.
        ends: at each pair of ends; one of them where the times are no ranges.
    """
    pair = _pair(stretches)
    if pair is not None and all((each[0].cheaper, _final(each)) == pair for each in ends):
        return _turn(offers, pair, stretches, ends)
    return _middle_sentence(offers, stretches) + _doubt(offers, stretches, ends)


def _pair(stretches: Stretches) -> tuple[Offer, Offer] | None:
    """(the cheaper one at low loads, the cheaper one at all others); None where it is not so."""
    one, other = stretches[0].cheaper, stretches[-1].cheaper
    simple = len(stretches) == 2 and math.isinf(stretches[-1].high)
    return (one, other) if simple and one is not None and other is not None else None


def _turn(
    offers: tuple[Offer, Offer],
    pair: tuple[Offer, Offer],
    stretches: Stretches,
    ends: Sequence[Stretches],
) -> str:
    """Of offers of which one is cheaper at low loads and the other at high ones, at all ends."""
    worse, better = (_name(offers, offer) for offer in pair)
    middle, turns = _load(stretches[0].high), [each[0].high for each in ends]
    low, high = _load(min(turns)), _load(max(turns))
    text = f"the {worse} is cheaper up to {middle} images an hour; from there the {better}"
    if low != high:
        text = (
            f"the {worse} is cheaper up to between {low} and {high} images an hour ({middle} in "
            f"the middle); from there the {better}"
        )
    latest = max(each[-1].low for each in ends)
    return f"{text}, always from {_load(latest)} on" if latest > max(turns) else text


def _middle_sentence(offers: tuple[Offer, Offer], stretches: Stretches) -> str:
    names = [_name(offers, offer) for offer in offers]
    last = stretches[-1]
    end = "" if math.isinf(last.high) else f" (compared up to {_load(last.high)} images an hour)"
    winners = [stretch.cheaper for stretch in stretches if stretch.cheaper is not None]
    if not winners:
        return f"the {names[0]} and the {names[1]} cost the same at every load{end}"
    final = winners[-1]
    better, worse = names if final is offers[0] else names[::-1]
    others = [stretch for stretch in stretches if stretch.cheaper not in (None, final)]
    same = any(stretch.cheaper is None for stretch in stretches)
    if not others and not same:
        return f"the {better} is cheaper at every load{end}"
    if len(stretches) > 2 * MOST_STRETCHES:
        if not others:
            text = f"the {better} costs the same or less at every load{end}"
            return text + _apart(offers, last)
        return _alternating(offers, stretches)
    if not others:
        return f"{_where(stretches, None)} both cost the same, else the {better} is cheaper{end}"
    if len(stretches) == 2:
        turn = _load(others[0].high)
        return f"the {worse} is cheaper up to {turn} images an hour; from there the {better}{end}"
    rest = (
        f"at other loads the {better}, or both cost the same"
        if same
        else f"at all other loads the {better}"
    )
    return f"the {worse} is cheaper {_where(stretches, others[0].cheaper)}; {rest}{end}"


def _alternating(offers: tuple[Offer, Offer], stretches: Stretches) -> str:
    """Of many stretches: the first, and how it ends."""
    first = next(stretch for stretch in stretches if stretch.cheaper is not None)
    where = _between(first)
    text = f"the {_name(offers, first.cheaper)} is cheaper {where} images an hour; then they "
    last = stretches[-1]
    if math.isinf(last.high):
        text += f"alternate up to {_load(last.low)} images an hour, and from there the "
        return text + f"{_name(offers, last.cheaper)} is cheaper"
    return f"{text}alternate{_apart(offers, last)}"


def _apart(offers: tuple[Offer, Offer], last: Stretch) -> str:
    """How little costs differ at high loads, where nothing settles which is the lower one."""
    if math.isinf(last.high):
        return ""
    full = [offer.usd_per_hour * offer.middle_seconds for offer in offers]
    rates = [float(offer.images_per_card_hour(offer.middle_seconds)) for offer in offers]
    apart = max(full) / min(full) * (1 + 1 / MANY_CARDS) - 1
    return f", at most {apart:.1%} apart above {_load(MANY_CARDS * max(rates))} images an hour"


def _doubt(offers: tuple[Offer, Offer], stretches: Stretches, ends: Sequence[Stretches]) -> str:
    """What the ends of the ranges say otherwise; empty where nothing."""
    if all(list(other) == list(stretches) for other in ends):
        return ""
    finals = [_final(other) for other in (stretches, *ends)]
    if any(final is None or final is not finals[0] for final in finals):
        return "; the ranges of their costs overlap, so it may be the other way round"
    low, high = (_load(end(other[-1].low for other in ends)) for end in (min, max))
    name = _name(offers, finals[0])
    if low == high:
        return "; these loads are those of the middle of both times"
    return (
        f"; wherever in their ranges the times lie, from between {low} and {high} images an hour "
        f"on the {name} stays the cheaper one"
    )


def _final(stretches: Stretches) -> Offer | None:
    """The cheaper one at all high loads; None where nothing settles that."""
    return stretches[-1].cheaper if math.isinf(stretches[-1].high) else None


def _where(stretches: Stretches, winner: Offer | None) -> str:
    parts = [_between(stretch) for stretch in stretches if stretch.cheaper is winner]
    *others, last = parts
    text = f"{', '.join(others)} and {last}" if others else last
    return f"{text} images an hour"


def _between(stretch: Stretch) -> str:
    if math.isinf(stretch.high):
        return f"above {_load(stretch.low)}"
    if stretch.low == 0:
        return f"up to {_load(stretch.high)}"
    return f"from {_load(stretch.low)} to {_load(stretch.high)}"


def _load(value: float) -> str:
    return f"{math.floor(value):,}" if value >= 10 else f"{value:.3g}"


def _name(offers: tuple[Offer, Offer], offer: Offer) -> str:
    """Of one of them, with its price where both are the same card."""
    if offers[0].card.name != offers[1].card.name:
        return offer.card.name
    return f"{offer.card.name} at ${offer.usd_per_hour:g}/h"


# What each card of a list offers for a request: its setting, its time, its price.

# The card that this package is about, and those that it is most often compared with.
SUBJECT = "L40S"
RIVALS = ("A100 80GB SXM", "H100 SXM")


@dataclass(frozen=True)
class Market:
    """Offers of many cards for one request.

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
        """The first of the named cards on which the request fits, with each of the others.

        Args:
            names: of cards; by default the one that this package is about and its rivals.
        """
        found = map(self.offer, names or (SUBJECT, *RIVALS))
        offers = [offer for offer in found if offer and offer.fits]
        return tuple(compare(offers[0], other) for other in offers[1:])


def market(
    request: RunRequest,
    cards: Iterable[Card],
    own_prices: Mapping[str, float] | None = None,
    calibration_of: Callable[[str], Rates | None] = lambda name: None,
) -> Market:
    """Estimates a request on every card, each in the setting that its plan recommends.

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
            found = estimate(request, card, calibration=calibration_of(card.name), usd_per_hour=usd)
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


# Which card paints a load of images for the least, where cards are rented by the hour all day.
#
# N images an hour at t seconds each need ceil(N t / 3600) cards, so the cost of an image is a
# sawtooth over the load: lowest where the cards are busy all the time. The arithmetic is in
# fractions
# of the decimal figures as they are written, so that a load that is just met needs no card more.

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
