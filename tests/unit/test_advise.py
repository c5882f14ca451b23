"""Ranking at a load."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_l40s.charts.text import price_source
from qwen_l40s.errors import SettingError
from qwen_l40s.machine.store import known_cards
from qwen_l40s.planning.advise import LOADS, Advice, Offer
from qwen_l40s.planning.cards import Price
from qwen_l40s.planning.phases import Range

CARDS = known_cards()


def offer(name, seconds, usd, fits=True):
    low, high = seconds if isinstance(seconds, tuple) else (seconds, seconds)
    found = SimpleNamespace(card=CARDS[name], image_seconds=Range(low, high), fits=fits)
    return Offer(found, usd)


L40S = offer("L40S", 30, 0.72)  # 120 images per hour
H100 = offer("H100 SXM", 12, 1.33)  # 300 images per hour

SOME_LOADS = st.one_of(st.integers(1, 100_000), st.floats(0.01, 1e5))
CENTS = st.integers(0, 500).map(lambda cents: cents / 100)
TENTHS = st.integers(1, 2000).map(lambda tenths: tenths / 10)


def test_ranks_by_the_cost_at_the_load():
    few = Advice(100, [H100, L40S])
    assert few.ranked == [L40S, H100]
    assert few.loads == (10, 100, 1000)
    assert L40S.cards_for(100) == 1
    assert L40S.usd_for(100) == pytest.approx(0.0072)
    assert L40S.utilisation(100) == pytest.approx(100 / 120)
    assert Advice(500, [L40S, H100]).ranked == [H100, L40S]
    assert L40S.usd_for(500) == pytest.approx(5 * 0.72 / 500)
    assert Advice(1, []).ranked == []
    free, too_small = offer("H200", 9, 0), offer("RTX 4090", 1, 0.01, fits=False)
    found = Advice(500, [too_small, L40S, free])
    assert found.ranked == [free, L40S, too_small]
    assert (found.fitting, found.paid) == ([free, L40S], [L40S])


def test_loads_that_make_no_sense_are_refused():
    for load in (0, -5, math.nan, math.inf, True, "100", None):
        with pytest.raises(SettingError, match="images per hour"):
            Advice(load, [L40S])
    for load in (1e299, 10**9 + 1, 1e-7, 5e-324):
        with pytest.raises(SettingError, match="images per hour"):
            Advice(load, [L40S])
    for load in LOADS:
        assert all(math.isfinite(each.usd_for(load)) for each in Advice(load, [L40S, H100]).ranked)


def test_whose_price_it_is():
    starting, plain = (
        Price(0.72, "Spheron", kind, "2026-05-04", "list") for kind in ("from", "on demand")
    )
    assert price_source(starting) == "Spheron, a starting price, 2026-05-04"
    assert price_source(plain) == "Spheron, 2026-05-04"
    assert price_source(None) == "your own"


@given(TENTHS, CENTS, SOME_LOADS)
def test_the_cards_carry_the_load_and_none_of_them_is_spare(seconds, usd, load):
    one = offer("L40S", seconds, usd)
    cards = one.cards_for(load)
    assert (cards - 1) * 3600 / seconds < load <= cards * 3600 / seconds * (1 + 1e-8)
    assert one.usd_for(load) >= one.busy_usd.high * (1 - 1e-8)
    assert one.utilisation(load) * one.usd_for(load) == pytest.approx(one.busy_usd.high, rel=1e-8)


@given(TENTHS, CENTS, st.integers(1, 1000))
def test_a_load_that_is_just_met_needs_no_further_card(seconds, usd, count):
    one = offer("L40S", seconds, usd)
    load = count * 3600 / seconds
    assert one.cards_for(load) == count
    assert one.cards_for(load * (1 + 1e-6)) == count + 1
