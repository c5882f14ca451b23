"""At which loads one of two offers is the cheaper one, in a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .advise import Offer
from .stretch import Stretch

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
