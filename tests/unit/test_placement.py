"""Where the modulation weights wait, as the loaders decide it."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_l40s.errors import SettingError
from qwen_l40s.loaders.precision import choose_transformer
from qwen_l40s.planning.phases import KEPT_FREE_BYTES, Setting, phases
from qwen_l40s.planning.request import RunRequest
from qwen_l40s.spec import FULL_SIZE, GIB, MIB, PLACES, CardFacts

L40S = CardFacts("NVIDIA L40S", 46_068 * MIB, (8, 9))
H100 = CardFacts("NVIDIA H100", 80 * GIB, (9, 0))


def place(requested, precision, card):
    found = choose_transformer(precision, requested, stored="bf16", shape=FULL_SIZE, card=card)
    return found.modulation


@pytest.mark.parametrize(
    ("precision", "card", "off_card"),
    [("bf16", L40S, True), ("int8", L40S, False), ("bf16", H100, False), ("bf16", None, False)],
)
def test_auto_on_known_cards(precision, card, off_card):
    assert place("auto", precision, card).off_card == off_card


def test_the_reason_has_the_sizes():
    reason = place("auto", "bf16", L40S).reason
    assert reason.startswith("modulation: 12.7 GiB stays in host memory, because 38.1 GiB of")
    assert "14.4 GiB of text encoder do not fit NVIDIA L40S together" in reason
    assert "12.7 GiB stays on the card, where" in place("auto", "bf16", H100).reason


@pytest.mark.parametrize("card", [L40S, H100])
def test_by_name(card):
    assert place("off card", "fp8", card).off_card
    assert not place("on card", "bf16", card).off_card
    assert "as requested" in place("off card", "fp8", card).reason


def test_on_the_processor_there_is_no_card_to_leave():
    for requested in PLACES:
        assert not place(requested, "bf16", None).off_card
    assert "only an NVIDIA card" in place("off card", "bf16", None).reason
    assert place("auto", "bf16", None).reason == ""


@given(
    precision=st.sampled_from(["bf16", "int8", "fp8"]),
    total=st.one_of(st.integers(4 * GIB, 120 * GIB), st.integers(54 * GIB, 57 * GIB)),
)
@settings(max_examples=25, deadline=None)
def test_auto_leaves_them_exactly_where_all_fits(precision, total):
    card = CardFacts("card", total, (8, 9))
    setting = Setting(precision)
    most = max(phase.card_bytes for phase in phases(RunRequest(), setting, total).values())
    sampled = phases(RunRequest(), setting, total)["decode"].resident
    # The decoder must not need the room of the others.
    fits = most <= total - KEPT_FREE_BYTES and {"transformer", "text encoder"} <= sampled.keys()
    everything = phases(RunRequest(), setting)["sampling"]
    fits = fits and sampled["transformer"] == everything.weights
    fits = fits and sampled["text encoder"] == everything.resident["text encoder"]
    assert place("auto", precision, card).off_card == (not fits)


@pytest.mark.parametrize("card", [L40S, None])
def test_unknown_place(card):
    message = "modulation 'gpu' is unknown: choose auto, on card, off card."
    with pytest.raises(SettingError, match=re.escape(message)):
        place("gpu", "bf16", card)
