"""Ranking at a load, and the loads at which one card becomes cheaper than another."""

import json
import math
import re
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_l40s.errors import SettingError
from qwen_l40s.planning.advise import LOADS, MOST_CARDS, Offer, advise, compare, exact, price_source
from qwen_l40s.planning.cards import Price, known_cards
from qwen_l40s.planning.phases import Range

CARDS = known_cards()


def offer(name, seconds, usd, **more):
    low, high = seconds if isinstance(seconds, tuple) else (seconds, seconds)
    return Offer(CARDS[name], Range(low, high), usd, **more)


L40S = offer("L40S", 30, 0.72)  # 120 images an hour
H100 = offer("H100 SXM", 12, 1.33)  # 300 images an hour

SOME_LOADS = st.one_of(st.integers(1, 100_000), st.floats(0.01, 1e5))
CENTS = st.integers(0, 500).map(lambda cents: cents / 100)
TENTHS = st.integers(1, 2000).map(lambda tenths: tenths / 10)


@st.composite
def offers(draw, name="L40S"):
    one, other = sorted((draw(TENTHS), draw(TENTHS)))
    return offer(name, (one, other), draw(CENTS))


def test_ranks_by_the_cost_at_the_load():
    few = advise(100, [H100, L40S])
    assert [advice.offer for advice in few] == [L40S, H100]
    assert few[0].cards == (1, 1)
    assert few[0].middle_usd == pytest.approx(0.0072)
    assert few[0].utilisation == pytest.approx(100 / 120)
    many = advise(500, [L40S, H100])
    assert [advice.offer for advice in many] == [H100, L40S]
    assert many[1].middle_cards == 5
    assert many[1].middle_usd == pytest.approx(5 * 0.72 / 500)
    assert advise(1, []) == ()


def test_what_does_not_fit_comes_last_with_its_note():
    tight = offer("RTX 4090", 1, 0.01, fits=False, note="weights move in each step")
    ranked = advise(500, [tight, L40S])
    assert ranked[-1].offer is tight
    told = ranked[-1].as_dict()
    assert (told["card"], told["fits"], told["note"]) == ("RTX 4090", False, tight.note)


def test_ranges_go_through():
    advice = advise(100, [offer("L40S", (30, 60), 0.72)])[0]
    assert advice.cards == (1, 2)
    assert advice.middle_cards == 2
    assert advice.usd_per_image == pytest.approx(Range(0.0072, 0.0144))
    told = json.loads(json.dumps(advice.as_dict(), allow_nan=False))
    assert told["ranges"]["cards"] == [1, 2]
    assert told["ranges"]["full_usd_per_image"] == [0.006, 0.012]
    assert told["full_usd_per_image"] == pytest.approx(0.008485)
    assert told["seconds_per_image"] == pytest.approx(42.43)


@pytest.mark.parametrize("load", [0, -5, math.nan, math.inf, True, "100", None])
def test_no_load(load):
    with pytest.raises(SettingError, match=r"images per hour is .*: give a finite number above 0"):
        advise(load, [L40S])


@pytest.mark.parametrize("load", [1e299, 10**9 + 1, 1e-7, 5e-324])
def test_loads_that_no_answer_is_for(load):
    with pytest.raises(SettingError, match=r"images per hour is .*: give 1e-06 to 1,000,000,000"):
        advise(load, [L40S])


def test_the_largest_and_the_smallest_load_are_answered():
    for load in LOADS:
        told = advise(load, [L40S, H100])[0].as_dict()
        assert json.dumps(told, allow_nan=False)


def test_a_starting_price_is_called_so():
    starting, plain = (
        Price(0.72, "Spheron", kind, "2026-05-04", "list") for kind in ("from", "on demand")
    )
    assert price_source(starting) == "Spheron, a starting price, 2026-05-04"
    assert price_source(plain) == "Spheron, 2026-05-04"
    for name in ("L40S", "H100 SXM"):
        assert CARDS[name].price().kind == "from"


@pytest.mark.parametrize(
    ("seconds", "usd", "message"),
    [
        ((30, 20), 1, "give the shorter time first"),
        ((0, 20), 1, "seconds per image is 0"),
        ((1, math.inf), 1, "seconds per image is inf"),
        ((1, math.nan), 1, "seconds per image is nan"),
        ((1, 2), -1, "usd_per_hour is -1"),
        ((1, 2), math.nan, "usd_per_hour is nan"),
    ],
)
def test_no_offer(seconds, usd, message):
    with pytest.raises(SettingError, match=message):
        offer("L40S", seconds, usd)


@given(offers(), SOME_LOADS, SOME_LOADS)
def test_more_images_never_need_fewer_cards(one, first, second):
    low, high = sorted((first, second))
    few, many = (advise(load, [one])[0] for load in (low, high))
    assert few.cards[0] <= many.cards[0]
    assert few.cards[1] <= many.cards[1]
    assert few.cards[0] <= few.middle_cards <= few.cards[1]
    assert few.usd_per_image.low <= few.usd_per_image.high


@given(offers(), SOME_LOADS)
def test_no_load_is_cheaper_than_a_card_that_is_always_busy(one, load):
    advice = advise(load, [one])[0]
    full = one.full_usd_per_image
    assert advice.usd_per_image.low >= full.low * (1 - 1e-12)
    assert advice.usd_per_image.high >= full.high * (1 - 1e-12)
    assert 0 < advice.utilisation <= 1
    used = advice.utilisation * advice.middle_usd
    middle = one.usd_per_hour * one.middle_seconds / 3600
    assert used == pytest.approx(middle, rel=1e-9)


@given(TENTHS, CENTS, st.integers(1, 1000))
def test_whole_cards_cost_what_a_busy_card_costs(seconds, usd, count):
    one = offer("L40S", seconds, usd)
    load = count * one.images_per_card_hour(seconds)
    assert one.cards_for(load, seconds) == count
    assert one.usd_for(load, seconds) == pytest.approx(one.full_usd_per_image.low, rel=1e-12)
    assert one.cards_for(load + Fraction(1, 10**9), seconds) == count + 1


def test_a_tenth_is_a_tenth():
    assert offer("L40S", 0.1, 1).cards_for(36_000, 0.1) == 1


def test_the_crossover_in_words():
    found = compare(L40S, H100)
    ends = [(stretch.low, stretch.high, stretch.cheaper) for stretch in found.stretches]
    assert ends == [
        (0, 120, L40S),
        (120, 300, H100),
        (300, 360, L40S),
        (360, math.inf, H100),
    ]
    assert found.certain
    assert found.sentence == (
        "the L40S is cheaper up to 120 and from 300 to 360 images an hour; at all other loads the "
        "H100 SXM"
    )


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        (
            offer("L40S", 2, 1),
            offer("H100 SXM", 0.5, 1.5),
            "the L40S is cheaper up to 1,800 images an hour; from there the H100 SXM",
        ),
        (L40S, offer("H100 SXM", 30, 1.33), "the L40S is cheaper at every load"),
        (
            L40S,
            offer("L40S", 30, 1.86),
            "the L40S at $0.72/h is cheaper at every load",
        ),
        (
            offer("L40S", 30, 1),
            offer("H100 SXM", 15, 1),
            "up to 120 images an hour both cost the same, else the H100 SXM is cheaper",
        ),
        (
            offer("L40S", 30, 0),
            offer("H100 SXM", 15, 0),
            "the L40S and the H100 SXM cost the same at every load",
        ),
        (offer("L40S", 30, 0), H100, "the L40S is cheaper at every load"),
        (
            offer("L40S", (20, 80), 0.72),
            offer("H100 SXM", (8, 12), 1.33),
            "so it may be the other way round",
        ),
        (
            offer("L40S", 30, 0.72),
            offer("H100 SXM", 15, 1.44),
            "the L40S costs the same or less at every load (compared up to 120,000 images an "
            "hour), at most 1.0% apart above 24,000 images an hour",
        ),
        (
            offer("L40S", 30, 0.72),
            offer("H100 SXM", 20, 1.08),
            "the L40S is cheaper up to 120 images an hour; then they alternate, at most 1.0% apart "
            "above 18,000 images an hour",
        ),
        (
            offer("L40S", 30, 0.72),
            offer("H100 SXM", 20, 1.07),
            "; then they alternate up to 12,840 images an hour, and from there the H100 SXM is",
        ),
        (
            offer("L40S", 20, 0.72),
            offer("L40", 20, 0.72),
            "the L40S and the L40 cost the same at every load",
        ),
        (
            offer("L40S", (24, 40), 0.72),
            offer("H100 SXM", (8.5, 15), 0.8),
            "the L40S is cheaper up to between 90 and 150 images an hour (116 in the middle); from "
            "there the H100 SXM, always from 300 on",
        ),
        (
            offer("L40S", (24, 40), 0.72),
            offer("H100 SXM", (8.5, 8.6), 0.8),
            "(116 in the middle); from there the H100 SXM",
        ),
        (
            offer("L40S", (29, 31), 0.72),
            offer("H100 SXM", (11.9, 12.1), 1.33),
            "; wherever in their ranges the times lie, from between",
        ),
    ],
)
def test_sentences(first, second, sentence):
    found = compare(first, second).sentence
    assert sentence in found
    assert len(found) < 250


def test_no_load_is_called_certain_whose_order_changes_within_the_ranges():
    moves = compare(offer("L40S", (24, 40), 0.72), offer("H100 SXM", (8.5, 15), 0.8))
    assert not moves.certain  # at one corner the L40S is cheaper twice
    assert compare(offer("L40S", (24, 40), 0.72), offer("H100 SXM", (8.5, 8.6), 0.8)).certain
    assert not compare(offer("L40S", (20, 80), 0.72), offer("H100 SXM", (8, 12), 1.33)).certain


@settings(deadline=None, max_examples=40)
@given(offers(), offers("H100 SXM"))
def test_the_turns_of_a_sentence_are_those_of_the_ends(first, second):
    sentence = compare(first, second).sentence
    found = re.search(r"between ([\d,.]+) and ([\d,.]+) images an hour \(", sentence)
    if found is None:
        return
    said = {float(end.replace(",", "")) for end in found.groups()}
    turns = {
        compare(
            replace(first, seconds=Range(one, one)), replace(second, seconds=Range(other, other))
        )
        .stretches[0]
        .high
        for one in first.seconds
        for other in second.seconds
    }
    for turn in said:
        assert any(turn == pytest.approx(each, rel=0.1, abs=1) for each in turns)
    assert max(said) <= max(turns) * 1.01


def hourly(one, load):
    """What a load costs an hour, from first principles."""
    cards = math.ceil(exact(load) * exact(one.middle_seconds) / 3600)
    return cards * exact(one.usd_per_hour)


def cheaper(first, second, load):
    one, other = hourly(first, load), hourly(second, load)
    return None if one == other else first if one < other else second


@settings(deadline=None, max_examples=60)
@given(TENTHS, CENTS, TENTHS, CENTS)
def test_crossovers_agree_with_a_scan_of_loads(seconds, usd, other_seconds, other_usd):
    first, second = offer("L40S", seconds, usd), offer("H100 SXM", other_seconds, other_usd)
    stretches = compare(first, second).stretches
    for load in [0.01, 0.5, *range(1, 400), 1234.5, 5000, 99_999, 10**6]:
        inside = [stretch for stretch in stretches if stretch.low < load <= stretch.high]
        if inside:
            assert inside[0].cheaper is cheaper(first, second, load)
        else:
            assert load > stretches[-1].high


@settings(deadline=None, max_examples=60)
@given(offers(), offers("H100 SXM"))
def test_stretches_have_no_gaps_and_go_on_to_the_end(first, second):
    found = compare(first, second)
    stretches = found.stretches
    assert stretches[0].low == 0
    for before, after in pairwise(stretches):
        assert before.high == after.low > before.low
        assert before.cheaper is not after.cheaper
    slowest = max(first.middle_seconds, second.middle_seconds)
    assert stretches[-1].high >= MOST_CARDS * 3600 / slowest * (1 - 1e-12)
    if math.isinf(stretches[-1].high) and stretches[-1].cheaper is not None:
        full = [one.usd_per_hour * one.middle_seconds for one in (first, second)]
        assert stretches[-1].cheaper is (first, second)[full[1] < full[0]]
    swapped = compare(second, first)
    assert swapped.stretches == stretches
    if any(stretch.cheaper for stretch in stretches):
        assert swapped.sentence == found.sentence


@given(offers(), offers("H100 SXM"), SOME_LOADS)
def test_ranking_and_crossovers_agree(first, second, load):
    """The middle of a range is a rounded root, so what is as good as equal is left out."""
    costs = [float(hourly(one, load)) for one in (first, second)]
    best = advise(load, [first, second])[0].offer
    if costs[0] != pytest.approx(costs[1], rel=1e-9):
        assert best is (first, second)[costs[1] < costs[0]]
