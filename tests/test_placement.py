"""Where the modulation weights wait."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_l40s.errors import SettingError
from qwen_l40s.planning.memory import (
    GIB,
    MIB,
    RESERVE_BYTES,
    USUAL_SIDE,
    CardFacts,
    TransformerShape,
    step_activation_bytes,
    weight_bytes,
)
from qwen_l40s.planning.placement import PLACES, TEXT_ENCODER_BYTES, place_modulation

REAL = TransformerShape(60, 3072, 24, 128, 3584, 64, 64)
STEP = step_activation_bytes(REAL, width=USUAL_SIDE, height=USUAL_SIDE)
L40S = CardFacts("NVIDIA L40S", 46_068 * MIB, (8, 9))
H100 = CardFacts("NVIDIA H100", 80 * GIB, (9, 0))


def place(requested, precision, card):
    weights = weight_bytes(REAL, precision)
    return place_modulation(
        requested,
        weights=weights.total,
        modulation=weights.modulation,
        activations=STEP,
        card=card,
    )


@pytest.mark.parametrize(
    ("precision", "card", "off_card"),
    [("bf16", L40S, True), ("int8", L40S, False), ("bf16", H100, False), ("bf16", None, False)],
)
def test_auto_on_known_cards(precision, card, off_card):
    assert place("auto", precision, card).off_card == off_card


def test_the_reason_has_the_sizes():
    reason = place("auto", "bf16", L40S).reason
    assert reason.startswith("modulation: 12.7 GiB stays in host memory, because 38.1 GiB of")
    assert "14.4 GiB of bf16 text encoder do not fit NVIDIA L40S together" in reason
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


@given(weights=st.integers(0, 100 * GIB), total=st.integers(GIB, 200 * GIB))
def test_auto_leaves_them_exactly_where_all_fits(weights, total):
    card = CardFacts("card", total, (8, 9))
    found = place_modulation(
        "auto", weights=weights, modulation=weights // 3, activations=STEP, card=card
    )
    fits = weights + TEXT_ENCODER_BYTES <= max(0, total - RESERVE_BYTES - STEP)
    assert found.off_card == (not fits)


def test_unknown_place():
    message = "the place of the modulation 'gpu' is unknown: choose auto, on card, off card."
    with pytest.raises(SettingError, match=re.escape(message)):
        place("gpu", "bf16", L40S)
