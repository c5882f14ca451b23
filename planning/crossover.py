"""At which loads one offer is cheaper than another, exactly: both costs are steps over the load."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from .advise import Offer, exact
from .crossover_words import sentence_of
from .stretch import Stretch

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
