"""In which precision a transformer is loaded, and where its modulation waits, on cards that this
test is not on.
"""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_l40s.charts.text import reasons
from qwen_l40s.errors import CheckpointError, SettingError, UnavailableError
from qwen_l40s.families.qwen_image import FULL_SIZE
from qwen_l40s.families.qwen_image_21 import SHAPE as SHAPE_21
from qwen_l40s.hosts.loading import LOADER_PRECISIONS, decide_load
from qwen_l40s.planning.bytes import TransformerBytes, weight_bytes
from qwen_l40s.planning.phases import KEPT_FREE_BYTES, Setting, phases
from qwen_l40s.planning.plan import plan
from qwen_l40s.planning.request import RunRequest
from qwen_l40s.spec.formats import GIB, MIB, CardFacts
from qwen_l40s.spec.transformer import OFF_CARD, PLACES

L40S = CardFacts("NVIDIA L40S", 46068 * MIB, (8, 9))
H100 = CardFacts("NVIDIA H100", 80 * GIB, (9, 0))
A100 = CardFacts("NVIDIA A100", 81920 * MIB, (8, 0))
A100_40 = CardFacts("NVIDIA A100", 40960 * MIB, (8, 0))
RTX_4090 = CardFacts("RTX 4090", 24564 * MIB, (8, 9))
RTX_5090 = CardFacts("RTX 5090", 32607 * MIB, (12, 0))
RTX_3060 = CardFacts("RTX 3060", 12288 * MIB, (8, 6))
T4 = CardFacts("Tesla T4", 15360 * MIB, (7, 5))
NO_TRITON = replace(RTX_4090, no_int8="triton is not installed")
CARDS = (L40S, A100, A100_40, RTX_4090, RTX_5090, RTX_3060, T4)

# The least faithful first; auto gives bf16 and int8 alone where the file is not quantized.
FIDELITY = ("fp8", "int8", "bf16", "fp16", "fp32")


def decide(requested, stored, card, modulation="auto", sizes=None):
    return decide_load(
        requested, modulation, stored=stored, shape=FULL_SIZE, card=card, sizes=sizes
    )


def on_card(found):
    """GiB of weights that steps read, as the reasons write it."""
    sizes = weight_bytes(FULL_SIZE, found.precision)
    return f"{(sizes.total - sizes.modulation * found.off_card) / GIB:.1f} GiB of weights"


@pytest.mark.parametrize(
    ("requested", "card", "stored", "expected", "named"),
    [
        *(("auto", card, "bf16", "int8", card.name) for card in CARDS if card is not T4),
        ("auto", L40S, "fp32", "int8", "fp32"),
        ("auto", T4, "bf16", "bf16", "sm_75"),
        ("auto", NO_TRITON, "bf16", "bf16", "triton"),
        ("auto", NO_TRITON, "int8", "int8", "triton"),
        ("int8", NO_TRITON, "bf16", "int8", "save memory, not time"),
        ("auto", T4, "int8", "int8", "save memory, not time"),
        ("auto", L40S, "fp8", "fp8", "fp8"),
        ("auto", A100, "fp8", "int8", "again"),
        ("auto", T4, "fp8", "fp8", "sm_89"),
        ("auto", None, "bf16", "bf16", "no NVIDIA GPU"),
        ("auto", None, "fp32", "fp32", "no NVIDIA GPU"),
        ("auto", None, "fp8", "fp8", "full precision"),
        ("bf16", L40S, "bf16", "bf16", "25.4 GiB"),
        ("bf16", L40S, "fp32", "bf16", "rounded"),
        ("bf16", L40S, "fp8", "bf16", "fp8 lost"),
        ("bf16", RTX_4090, "bf16", "bf16", "in every pass"),
        ("bf16", None, "int8", "bf16", "int8 lost"),
        ("fp8", L40S, "bf16", "fp8", "quantized"),
        ("fp8", L40S, "int8", "fp8", "again"),
        ("int8", A100, "fp8", "int8", "again"),
        ("int8", None, "bf16", "int8", "full precision"),
        ("as stored", A100, "fp8", "fp8", "save memory, not time"),
    ],
)
def test_precisions_and_reasons(requested, card, stored, expected, named):
    found = decide(requested, stored, card)
    assert found.precision == expected
    assert named in found.reason
    assert len(found.why) <= 80 and (card is None or card.name in found.reason)
    starts = {"auto": f"auto: {expected}", "as stored": "default (as in file)"}.get(
        requested, "as requested"
    )
    assert found.why.startswith((starts, "auto: the file holds")), found.why


def test_layers_that_a_gguf_file_holds_in_bf16_are_not_called_its_blocks():
    found = decide_load("auto", stored="bf16", shape=FULL_SIZE, card=L40S, gguf=True)
    assert found.why.startswith(f"auto: {found.precision}")


def test_auto_is_what_the_plan_recommends():
    for card in CARDS:
        for stored in FIDELITY:
            option = plan(card, RunRequest(), stored)[0]
            found = decide("auto", stored, card)
            assert found.option.setting == option.setting
            assert found.option.needs == option.needs
            assert found.precision == option.setting.precision
            assert found.off_card == option.setting.off_card
            for what, clause in reasons(option).items():
                reason = found.place_reason if what == "modulation" else found.reason
                assert (clause in reason) == (what != "text encoder")


def test_true_sizes_decide():
    """Of files that are taken over as they are, and with layers that stay in bf16."""
    found = decide("auto", "int8", RTX_4090, sizes={"int8": TransformerBytes(30 * GIB, 6 * GIB)})
    assert "of 24.0 GiB of weights" in found.reason
    assert "modulation: 6.0 GiB stays in system RAM" in found.place_reason
    assert not found.option.resident
    assert decide("auto", "int8", RTX_4090).option.resident


@pytest.mark.slow
def test_every_decision_has_its_size_and_every_refusal_a_way_out():
    for card in (*CARDS, None):
        for stored in FIDELITY:
            for requested in LOADER_PRECISIONS:
                try:
                    found = decide(requested, stored, card)
                except UnavailableError as error:
                    choices = re.search(r"choose (.*)\.$", str(error))[1].split(", ")
                    assert [decide(other, stored, card).precision for other in choices]
                    continue
                # On the processor the loader says what is held.
                assert card is None or on_card(found) in found.reason
                assert "\n" not in found.reason
                assert card is None or card.name in found.reason
                if requested == "as stored":
                    assert found.precision == stored
                    assert found.reason.startswith(f"default (as in file): the file holds {stored}")
                elif requested != "auto":
                    assert found.precision == requested


def test_limits_of_the_cards():
    for requested, card, stored in (
        ("fp8", A100, "bf16"),
        ("fp8", A100, "fp8"),
        ("int8", T4, "bf16"),
    ):
        with pytest.raises(UnavailableError, match=f"precision {requested} .*as stored"):
            decide(requested, stored, card)
    for requested, capability in (("fp8", (8, 9)), ("fp8", (12, 0)), ("int8", (8, 0))):
        card = CardFacts("card", 80 * GIB, capability)
        assert decide(requested, "bf16", card).precision == requested


def test_the_reason_tells_whether_all_weights_stay():
    """Without guidance a step is a pass; here it is two."""
    for modulation in ("on card", "off card"):
        found = decide("int8", "bf16", RTX_5090, modulation)
        assert f"{on_card(found)} stay on RTX 5090" in found.reason
        assert "in every" not in found.reason
        found = decide("int8", "bf16", RTX_3060, modulation)
        assert f"of {on_card(found)}" in found.reason
        moved = found.option.moved_bytes / GIB
        ends = f"{moved:.1f} GiB moves to the GPU in every pass, {2 * moved:.1f} GiB in every step"
        assert found.reason.endswith(ends)


def test_a_card_smaller_than_one_step_at_the_usual_size():
    """It loads for a small image, because nobody has said yet how large it is to be."""
    card = CardFacts("GT 1030", 2 * GIB, (8, 9))
    assert "of 12.8 GiB of weights" in decide("auto", "bf16", card).reason
    with pytest.raises(UnavailableError, match="choose a smaller size or batch"):
        decide("auto", "bf16", CardFacts("tiny", GIB, (8, 9)))


def test_bad_input():
    for requested in ("fp16", "fp32", "FP8", ""):
        with pytest.raises(SettingError, match=f"precision '{requested}'"):
            decide(requested, "bf16", L40S)
    for card in (L40S, None):
        with pytest.raises(SettingError, match="modulation 'gpu'"):
            decide("bf16", "bf16", card, "gpu")
    with pytest.raises(CheckpointError, match="nf4"):
        decide("auto", "nf4", L40S)


# --- where the modulation waits


def test_the_place_and_its_reason():
    found = decide("bf16", "bf16", L40S)
    assert found.off_card
    assert found.place_reason == "modulation: 12.7 GiB stays in system RAM"
    found = decide("bf16", "bf16", H100)
    assert not found.off_card
    assert "12.7 GiB stays in VRAM" in found.place_reason
    assert not decide("int8", "bf16", L40S).off_card
    for card in (L40S, H100):
        found = decide("fp8", "bf16", card, "off card")
        assert found.off_card and "as requested" in found.place_reason
        assert not decide("bf16", "bf16", card, "on card").off_card


@pytest.mark.parametrize("card", [L40S, RTX_3060])
def test_one_modulation_for_all_blocks_has_no_place_to_choose(card):
    for place in PLACES:
        found = decide_load("auto", place, stored="bf16", shape=SHAPE_21, card=card)
        assert not found.off_card
        assert ("all blocks of this model share one" in found.place_reason) == (place == OFF_CARD)


def test_on_the_processor_there_is_no_card_to_leave():
    found = {place: decide("bf16", "bf16", None, place) for place in PLACES}
    assert not any(decision.off_card for decision in found.values())
    assert "no NVIDIA GPU" in found["off card"].place_reason
    assert found["auto"].place_reason == ""


@given(
    precision=st.sampled_from(["bf16", "int8", "fp8"]),
    total=st.one_of(st.integers(4 * GIB, 120 * GIB), st.integers(54 * GIB, 57 * GIB)),
)
@settings(max_examples=25, deadline=None)
def test_the_modulation_stays_exactly_where_all_fits(precision, total):
    card = CardFacts("card", total, (8, 9))
    setting = Setting(precision)
    most = max(phase.card_bytes for phase in phases(RunRequest(), setting, total).values())
    sampled = phases(RunRequest(), setting, total)["decode"].resident
    # The decoder must not need the room of the others.
    fits = most <= total - KEPT_FREE_BYTES and {"transformer", "text encoder"} <= sampled.keys()
    everything = phases(RunRequest(), setting)["sampling"]
    fits = fits and sampled["transformer"] == everything.weights
    fits = fits and sampled["text encoder"] == everything.resident["text encoder"]
    assert decide(precision, "bf16", card).off_card == (not fits)
