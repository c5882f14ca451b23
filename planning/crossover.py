"""At which loads one offer is cheaper than another, exactly: both costs are steps over the load."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from .advise import Offer, exact

# Where two offers cost nearly the same at full use, their steps alternate without an end in sight.
MOST_CARDS = 1000
MOST_STRETCHES = 3


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


@dataclass(frozen=True)
class Comparison:
    """Two offers over all loads, at the middle of their times.

    Attributes:
        stretches: in order, from 0 on, without gaps; neighbours differ.
        certain: whether the same offer is the cheaper one at full use wherever in their ranges the
            times lie.
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
    last stretch ends there.
    """
    stretches = _stretches(first, second)
    certain = _certain(first, second)
    sentence = _sentence(first, second, stretches)
    if not certain and any(offer.seconds.low < offer.seconds.high for offer in (first, second)):
        sentence += "; the ranges of their costs overlap, so it may be the other way round"
    return Comparison(first, second, stretches, certain, sentence)


def _stretches(first: Offer, second: Offer) -> tuple[Stretch, ...]:
    offers = (first, second)
    rates = [offer.images_per_card_hour(offer.middle_seconds) for offer in offers]
    prices = [exact(offer.usd_per_hour) for offer in offers]
    full = [price / rate for price, rate in zip(prices, rates, strict=True)]

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


def _certain(first: Offer, second: Offer) -> bool:
    one, other = first.full_usd_per_image, second.full_usd_per_image
    return one.high < other.low or other.high < one.low


def _sentence(first: Offer, second: Offer, stretches: tuple[Stretch, ...]) -> str:
    names = _names(first, second)
    last = stretches[-1]
    end = "" if math.isinf(last.high) else f" (compared up to {_load(last.high)} images an hour)"
    winners = [stretch.cheaper for stretch in stretches if stretch.cheaper is not None]
    if not winners:
        return f"the {names[0]} and the {names[1]} cost the same at every load{end}"
    final = winners[-1]
    better, worse = names if final is first else names[::-1]
    others = [stretch for stretch in stretches if stretch.cheaper not in (None, final)]
    same = any(stretch.cheaper is None for stretch in stretches)
    if not others and not same:
        return f"the {better} is cheaper at every load{end}"
    if not others:
        return f"{_where(stretches, None)} both cost the same, else the {better} is cheaper{end}"
    if len(stretches) == 2:
        turn = _load(others[0].high)
        return f"the {worse} is cheaper up to {turn} images an hour; from there the {better}{end}"
    rest = (
        f"at other loads the {better}, or both cost the same"
        if same
        else (f"at all other loads the {better}")
    )
    offer = others[0].cheaper
    return f"the {worse} is cheaper {_where(stretches, offer)}; {rest}{end}"


def _where(stretches: tuple[Stretch, ...], winner: Offer | None) -> str:
    found = [stretch for stretch in stretches if stretch.cheaper is winner]
    parts = [_between(stretch) for stretch in found[:MOST_STRETCHES]]
    if len(found) > MOST_STRETCHES:
        more = len(found) - MOST_STRETCHES
        parts.append(f"in {more} shorter ranges up to {_load(found[-1].high)}")
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{text} images an hour"


def _between(stretch: Stretch) -> str:
    if math.isinf(stretch.high):
        return f"above {_load(stretch.low)}"
    if stretch.low == 0:
        return f"up to {_load(stretch.high)}"
    return f"from {_load(stretch.low)} to {_load(stretch.high)}"


def _load(value: float) -> str:
    return f"{math.floor(value):,}" if value >= 10 else f"{value:.3g}"


def _names(first: Offer, second: Offer) -> tuple[str, str]:
    names = (first.card.name, second.card.name)
    if names[0] != names[1]:
        return names
    return (
        f"{names[0]} at ${first.usd_per_hour:g}/h",
        f"{names[1]} at ${second.usd_per_hour:g}/h",
    )
