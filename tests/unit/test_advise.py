"""Ranking at a load, and the load from which one card is cheaper than another."""

import json
import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_l40s.charts.advice import comparison_text, price_source
from qwen_l40s.charts.figures import dollars
from qwen_l40s.errors import SettingError
from qwen_l40s.machine.card_list import known_cards
from qwen_l40s.planning.advise import LOADS, Offer, advise, compare
from qwen_l40s.planning.cards import Price
from qwen_l40s.planning.phases import Range

CARDS = known_cards()


def offer(name, seconds, usd, **more):
    low, high = seconds if isinstance(seconds, tuple) else (seconds, seconds)
    return Offer(CARDS[name], Range(low, high), usd, **more)


L40S = offer("L40S", 30, 0.72)  # 120 images per hour
H100 = offer("H100 SXM", 12, 1.33)  # 300 images per hour

SOME_LOADS = st.one_of(st.integers(1, 100_000), st.floats(0.01, 1e5))
CENTS = st.integers(0, 500).map(lambda cents: cents / 100)
TENTHS = st.integers(1, 2000).map(lambda tenths: tenths / 10)


@st.composite
def offers(draw, name="L40S"):
    one, other = sorted((draw(TENTHS), draw(TENTHS)))
    return offer(name, (one, other), draw(CENTS))


def hourly(one, load):
    """What a load costs an hour, exactly."""
    seconds, usd = (Fraction(str(value)) for value in (one.seconds.low, one.usd_per_hour))
    return math.ceil(Fraction(str(load)) * seconds / 3600) * usd


def test_ranks_by_the_cost_at_the_load():
    few = advise(100, [H100, L40S])
    assert [advice.offer for advice in few] == [L40S, H100]
    assert few[0].cards == (1, 1)
    assert few[0].usd == pytest.approx(0.0072)
    assert few[0].utilisation == pytest.approx(100 / 120)
    many = advise(500, [L40S, H100])
    assert [advice.offer for advice in many] == [H100, L40S]
    assert many[1].usd == pytest.approx(5 * 0.72 / 500)
    assert advise(1, []) == ()
    tight = offer("RTX 4090", 1, 0.01, fits=False)
    assert advise(500, [tight, L40S])[-1].offer is tight


def test_ranges_go_through():
    advice = advise(100, [offer("L40S", (30, 60), 0.72)])[0]
    assert advice.cards == (1, 2)
    assert advice.usd_per_image == pytest.approx(Range(0.0072, 0.0144))
    found = json.loads(json.dumps(advice.as_dict(), allow_nan=False))
    assert (found["card"], found["fits"], found["cards"]) == ("L40S", True, 2)
    assert found["usd_per_image"] == 0.0144 and found["tight"] is False
    assert found["ranges"]["cards"] == [1, 2]
    assert found["ranges"]["full_usd_per_image"] == [0.006, 0.012]
    assert found["full_usd_per_image"] == pytest.approx(0.008485)
    assert found["seconds_per_image"] == pytest.approx(42.43)


def test_loads_and_offers_that_make_no_sense_are_refused():
    for load in (0, -5, math.nan, math.inf, True, "100", None):
        with pytest.raises(SettingError, match=r"images per hour is .*: give a finite number"):
            advise(load, [L40S])
    for load in (1e299, 10**9 + 1, 1e-7, 5e-324):
        with pytest.raises(SettingError, match=r"images per hour is .*: give 1e-06 to 1,000,000"):
            advise(load, [L40S])
    for load in LOADS:
        assert json.dumps(advise(load, [L40S, H100])[0].as_dict(), allow_nan=False)
    for seconds, usd, message in (
        ((30, 20), 1, "give the shorter time first"),
        ((0, 20), 1, "seconds per image is 0"),
        ((1, math.inf), 1, "seconds per image is inf"),
        ((1, math.nan), 1, "seconds per image is nan"),
        ((1, 2), -1, "usd_per_hour is -1"),
        ((1, 2), math.nan, "usd_per_hour is nan"),
    ):
        with pytest.raises(SettingError, match=message):
            offer("L40S", seconds, usd)


def test_whose_price_it_is():
    starting, plain = (
        Price(0.72, "Spheron", kind, "2026-05-04", "list") for kind in ("from", "on demand")
    )
    assert price_source(starting) == "Spheron, a starting price, 2026-05-04"
    assert price_source(plain) == "Spheron, 2026-05-04"
    assert price_source(None) == "your own"


@given(offers(), SOME_LOADS, SOME_LOADS)
def test_costs_follow_the_load(one, first, second):
    low, high = sorted((first, second))
    few, many = (advise(load, [one])[0] for load in (low, high))
    assert few.cards[0] <= many.cards[0]
    assert few.cards[1] <= many.cards[1]
    assert few.cards[0] <= one.cards_for(low) <= few.cards[1]
    full = one.full_usd_per_image
    assert few.usd_per_image.low >= full.low * (1 - 1e-8)
    assert few.usd_per_image.high >= full.high * (1 - 1e-8)
    assert 0 < few.utilisation <= 1
    used = few.utilisation * few.usd
    assert used == pytest.approx(one.usd_per_hour * one.seconds.high / 3600, rel=1e-8)


@given(st.lists(offers(), min_size=2, max_size=5), SOME_LOADS)
def test_what_is_printed_ranks_and_no_card_is_before_one_that_is_cheaper_at_both_ends(some, load):
    ranked = advise(load, some)
    printed = [float(dollars(advice.usd).replace(",", "")) for advice in ranked]
    assert printed == sorted(printed)
    for place, dearer in enumerate(ranked):
        for cheaper in ranked[place + 1 :]:
            low, high = cheaper.usd_per_image
            below = low < dearer.usd_per_image.low and high < dearer.usd_per_image.high
            assert not below or math.isclose(high, dearer.usd, rel_tol=1e-9, abs_tol=1e-15)


@given(offers(), SOME_LOADS)
def test_the_cards_carry_the_load_at_the_slowest_time(one, load):
    advice = advise(load, [one])[0]
    assert advice.cards[1] * 3600 / one.seconds.high >= load * (1 - 1e-8)


@given(TENTHS, CENTS, st.integers(1, 1000))
def test_a_load_that_is_just_met_needs_no_further_card(seconds, usd, count):
    one = offer("L40S", seconds, usd)
    load = count * 3600 / seconds
    assert one.cards_for(load) == count
    assert one.usd_for(load) == pytest.approx(one.full_usd_per_image.low, rel=1e-12)
    assert one.cards_for(load * (1 + 1e-6)) == count + 1


@settings(deadline=None, max_examples=50)
@given(TENTHS, CENTS, TENTHS, CENTS)
def test_the_break_even_load_agrees_with_a_scan_of_loads(seconds, usd, other_seconds, other_usd):
    first, second = offer("L40S", seconds, usd), offer("H100 SXM", other_seconds, other_usd)
    found = compare(first, second)
    swapped = compare(second, first)
    assert (swapped.cheaper, swapped.break_even) == (found.cheaper, found.break_even)
    full = [one.usd_per_hour * one.seconds.low for one in (first, second)]
    if found.cheaper is None:
        assert full[0] == pytest.approx(full[1], rel=1e-3)
        return
    better = found.cheaper
    other = second if better is first else first
    assert better is (first, second)[full[1] < full[0]]
    if found.break_even:  # there the other one is cheaper; exact at a multiple of its cards
        load = found.break_even * (1 - 1e-6)
        assert hourly(other, load) < hourly(better, load)
    edges = [3600 / one.seconds.low * count for one in (first, second) for count in range(1, 60)]
    for load in (edge * (1 + shift) for edge in edges for shift in (-1e-6, 1e-6)):
        if load > found.break_even * (1 + 1e-5):
            assert hourly(better, load) <= hourly(other, load)


def test_the_break_even_load_in_words():
    ranged = offer("L40S", (24, 40), 0.72)
    for first, second, break_even, sentence in (
        (L40S, H100, 360, "the H100 SXM is cheaper above 360 images per hour; below that, "),
        (L40S, offer("H100 SXM", 30, 1.33), 0, "H100 SXM: the L40S is cheaper at every load."),
        (L40S, replace(L40S, usd_per_hour=1.86), 0, "the L40S at $0.72/h is cheaper at every"),
        (offer("L40S", 30, 0), H100, 0, "the L40S is cheaper at every load"),
        (L40S, offer("H100 SXM", 15, 1.44), 0, "both cost the same at full load"),
        (offer("L40S", 30, 0), offer("H100 SXM", 15, 0), 0, "both cost the same"),
        (ranged, offer("H100 SXM", (8.5, 15), 1.3), 270, "The predicted times overlap, so"),
    ):
        found = compare(first, second)
        assert found.break_even == pytest.approx(break_even, abs=1e-6)
        assert sentence in comparison_text(found)
    assert compare(ranged, offer("H100 SXM", (1, 1.1), 1.3)).certain
    assert not compare(ranged, offer("H100 SXM", (8.5, 15), 1.3)).certain
