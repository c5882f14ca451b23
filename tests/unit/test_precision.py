"""Which precision a transformer is held in, on cards that this test is not on."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_l40s.errors import CheckpointError, SettingError, UnavailableError
from qwen_l40s.loaders.precision import (
    TRANSFORMER_PRECISIONS,
    check_host_memory,
    choose_transformer,
)
from qwen_l40s.planning.bytes import TransformerBytes, weight_bytes
from qwen_l40s.planning.phases import KEPT_FREE_BYTES
from qwen_l40s.planning.plan import plan
from qwen_l40s.planning.request import RunRequest
from qwen_l40s.spec import FULL_SIZE, GIB, MIB, CardFacts

L40S = CardFacts("NVIDIA L40S", 46068 * MIB, (8, 9))
A100 = CardFacts("NVIDIA A100", 81920 * MIB, (8, 0))
A100_40 = CardFacts("NVIDIA A100", 40960 * MIB, (8, 0))
RTX_4090 = CardFacts("RTX 4090", 24564 * MIB, (8, 9))
RTX_5090 = CardFacts("RTX 5090", 32607 * MIB, (12, 0))
RTX_3060 = CardFacts("RTX 3060", 12288 * MIB, (8, 6))
T4 = CardFacts("Tesla T4", 15360 * MIB, (7, 5))
CARDS = (L40S, A100, A100_40, RTX_4090, RTX_5090, RTX_3060, T4, None)

# The least faithful first; auto gives bf16 and int8 alone where the file is not quantized.
FIDELITY = ("fp8", "int8", "bf16", "fp16", "fp32")


def choose(requested, stored, card, modulation="auto", held=None):
    return found(requested, stored, card, modulation, held).precision


def found(requested, stored, card, modulation="auto", held=None):
    return choose_transformer(
        requested, modulation, stored=stored, shape=FULL_SIZE, card=card, held=held
    )


def on_card(found):
    """GiB of weights that steps read."""
    name = found.precision.name
    sizes = weight_bytes(FULL_SIZE, name)
    return (sizes.total - sizes.modulation * found.modulation.off_card) / GIB


# --- auto ---


@pytest.mark.parametrize(
    ("card", "stored", "name", "reason"),
    [
        (
            L40S,
            "bf16",
            "bf16",
            "auto: bf16 is what the model was trained in, and it fits; 25.4 GiB",
        ),
        (L40S, "fp32", "bf16", "the file's fp32 is rounded to bf16"),
        (L40S, "fp16", "bf16", "the file's fp16 is rounded to bf16"),
        (A100, "bf16", "bf16", "38.1 GiB of weights stay on NVIDIA A100"),
        (A100, "bf16", "bf16", "it has 80.0 GiB, of which 0.4 GiB stay free"),
        (A100_40, "bf16", "bf16", "25.4 GiB of weights stay on NVIDIA A100"),
        (RTX_5090, "bf16", "bf16", "25.4 GiB of weights stay on RTX 5090"),
        (RTX_4090, "bf16", "int8", "bf16 with 25.4 GiB of weights does not stay on the card"),
        (RTX_4090, "bf16", "int8", "tells for yours); 12.8 GiB of weights stay on RTX 4090"),
        (RTX_3060, "bf16", "int8", "of 12.8 GiB of weights 10."),
        (RTX_3060, "bf16", "int8", "to it in every pass"),
        (T4, "bf16", "int8", "sm_75 does not multiply int8, which needs sm_80"),
        (L40S, "fp8", "fp8", "auto: the file holds fp8, and dequantizing it would gain nothing"),
        (L40S, "int8", "int8", "auto: the file holds int8"),
        (A100, "fp8", "fp8", "sm_80 does not multiply fp8, which needs sm_89"),
        (T4, "fp8", "fp8", "computed in bf16 and save memory, not time"),
        (None, "bf16", "bf16", "auto on the CPU: as the file holds it, bf16; 38.1 GiB of weights"),
        (None, "fp32", "fp32", "76.1 GiB of weights in host memory"),
        (None, "fp8", "fp8", "the CPU computes in full precision from the fp8 weights"),
    ],
)
def test_auto(card, stored, name, reason):
    choice = choose("auto", stored, card)
    assert choice.name == name
    assert reason in choice.reason


@pytest.mark.parametrize("card", [card for card in CARDS if card], ids=str)
@pytest.mark.parametrize("stored", FIDELITY)
def test_auto_is_what_the_plan_recommends(card, stored):
    option = plan(card, RunRequest(), stored)[0]
    choice = found("auto", stored, card)
    assert choice.option == option
    assert choice.precision.name == option.setting.precision
    assert choice.modulation.off_card == option.setting.off_card
    for what, clause in option.reasons.items():
        said = choice.modulation.reason if what == "modulation" else choice.precision.reason
        assert (clause in said) == (what != "text encoder")


def test_auto_takes_bf16_exactly_where_it_stays():
    """The border, to the byte: sampling without the text encoder, and what stays free."""
    lowest, highest = 20 * GIB, 40 * GIB  # int8 below, bf16 above
    while highest - lowest > 1:
        middle = (lowest + highest) // 2
        found = choose("auto", "bf16", CardFacts("card", middle, (9, 0)))
        lowest, highest = (lowest, middle) if found.name == "bf16" else (middle, highest)
    option = plan(CardFacts("card", highest, (9, 0)), RunRequest())[0]
    assert option.setting.precision == "bf16"
    assert option.headroom_bytes == highest - KEPT_FREE_BYTES - option.peak_bytes >= 0
    assert plan(CardFacts("card", lowest, (9, 0)), RunRequest())[0].setting.precision == "int8"
    assert 26 * GIB < highest < 29 * GIB


@given(
    total=st.integers(3 * GIB, 100 * GIB),
    more=st.integers(0, 30 * GIB),
    stored=st.sampled_from(FIDELITY),
    capability=st.sampled_from([(7, 5), (8, 0), (8, 9), (9, 0), (12, 0)]),
)
@settings(max_examples=15, deadline=None)
def test_more_memory_is_never_less_faithful(total, more, stored, capability):
    small, large = (
        choose("auto", stored, CardFacts("card", size, capability)).name
        for size in (total, total + more)
    )
    assert FIDELITY.index(small) <= FIDELITY.index(large)


def test_true_sizes_decide():
    """Of files that are taken over as they are, and with layers that stay in bf16."""
    held = {"int8": TransformerBytes(30 * GIB, 6 * GIB)}
    choice = found("auto", "int8", RTX_4090, held=held)
    assert "of 24.0 GiB of weights" in choice.precision.reason
    assert "modulation: 6.0 GiB stays in host memory" in choice.modulation.reason
    assert not choice.option.resident
    assert found("auto", "int8", RTX_4090).option.resident


# --- as stored ---


@pytest.mark.parametrize("card", CARDS, ids=str)
@pytest.mark.parametrize("stored", FIDELITY)
def test_as_stored_is_what_the_file_holds_everywhere(card, stored):
    choice = found("as stored", stored, card)
    assert choice.precision.name == stored
    assert choice.precision.reason.startswith(f"as stored: the file holds {stored}; ")
    assert f"{on_card(choice):.1f} GiB of weights" in choice.precision.reason


def test_fp8_file_on_a_card_without_fp8_is_weight_only():
    reason = choose("as stored", "fp8", A100).reason
    assert "so the fp8 weights are computed in bf16 and save memory, not time" in reason
    assert "computed in bf16" not in choose("as stored", "fp8", L40S).reason


# --- a precision by name ---


@pytest.mark.parametrize(
    ("requested", "stored", "card", "reason"),
    [
        ("bf16", "bf16", L40S, "requested: the file holds bf16; 25.4 GiB of weights stay on"),
        ("bf16", "fp32", L40S, "requested: the file's fp32 is rounded to bf16"),
        ("bf16", "fp8", L40S, "dequantized, which does not bring back what fp8 lost"),
        ("bf16", "int8", None, "dequantized, which does not bring back what int8 lost"),
        ("bf16", "bf16", RTX_4090, "of 25.4 GiB of weights 2"),
        ("bf16", "bf16", RTX_4090, "stay on RTX 4090"),
        ("bf16", "bf16", RTX_4090, " to it in every pass, "),
        ("bf16", "bf16", None, "38.1 GiB of weights in host memory"),
        ("fp8", "bf16", L40S, "the file's bf16 is quantized to fp8 on load; 25.4 GiB of weights"),
        ("fp8", "fp8", L40S, "requested: the file holds fp8"),
        ("fp8", "bf16", RTX_4090, "12.8 GiB of weights stay on RTX 4090"),
        ("fp8", "bf16", None, "the CPU computes in full precision from the fp8 weights"),
        ("fp8", "int8", L40S, "int8 is quantized a second time to fp8, so that both errors add up"),
        ("int8", "fp8", A100, "fp8 is quantized a second time to int8"),
        ("int8", "bf16", A100, "the file's bf16 is quantized to int8 on load"),
        ("int8", "bf16", None, "the CPU computes in full precision from the int8 weights"),
    ],
)
def test_requested(requested, stored, card, reason):
    choice = choose(requested, stored, card)
    assert choice.name == requested
    assert reason in choice.reason


@pytest.mark.parametrize("stored", ["bf16", "fp8"])
def test_fp8_demanded_of_a_card_without_it(stored):
    message = (
        "fp8 was demanded and NVIDIA A100 is sm_80: fp8 is multiplied by cards from sm_89 on, so "
        "choose auto, bf16, int8, as stored."
    )
    with pytest.raises(UnavailableError, match=re.escape(message)):
        choose("fp8", stored, A100)


def test_int8_demanded_of_a_card_without_it():
    with pytest.raises(UnavailableError, match="from sm_80 on, so choose auto, bf16, as stored"):
        choose("int8", "bf16", T4)


@pytest.mark.parametrize(
    ("requested", "capability", "runs"),
    [
        ("fp8", (8, 9), True),
        ("fp8", (8, 6), False),
        ("fp8", (9, 0), True),
        ("fp8", (12, 0), True),
        ("int8", (8, 0), True),
        ("int8", (7, 5), False),
    ],
)
def test_limits_of_the_cards(requested, capability, runs):
    card = CardFacts("card", 80 * GIB, capability)
    if runs:
        assert choose(requested, "bf16", card).name == requested
    else:
        with pytest.raises(UnavailableError):
            choose(requested, "bf16", card)


# --- words and bad input ---


@pytest.mark.parametrize("card", CARDS, ids=str)
@pytest.mark.parametrize("stored", FIDELITY)
@pytest.mark.parametrize("requested", TRANSFORMER_PRECISIONS)
def test_every_reason_has_the_size_and_every_refusal_has_a_way_out(requested, stored, card):
    try:
        choice = found(requested, stored, card)
    except UnavailableError as error:
        choices = re.search(r"choose (.*)\.$", str(error))[1].split(", ")
        assert [choose(other, stored, card).name for other in choices]
        return
    reason = choice.precision.reason
    assert f"{on_card(choice):.1f} GiB of weights" in reason
    assert "\n" not in reason
    assert card is None or card.name in reason


@pytest.mark.parametrize("modulation", ["on card", "off card"])
def test_the_reason_tells_whether_all_weights_stay(modulation):
    """Without guidance a step is a pass; here it is two."""
    for card, stays in ((RTX_5090, True), (RTX_3060, False)):
        choice = found("int8", "bf16", card, modulation)
        size = f"{on_card(choice):.1f} GiB of weights"
        if stays:
            assert f"{size} stay on {card.name}" in choice.precision.reason
            assert "in every" not in choice.precision.reason
            continue
        moved = choice.option.moved_bytes / GIB
        assert f"of {size}" in choice.precision.reason
        ends = f"moves {moved:.1f} GiB to it in every pass, {2 * moved:.1f} GiB in every step"
        assert choice.precision.reason.endswith(ends)


def test_a_card_smaller_than_one_step_at_the_usual_size():
    """It loads for a small image, because nobody has said yet how large it is to be."""
    card = CardFacts("GT 1030", 2 * GIB, (8, 9))
    assert "of 12.8 GiB of weights" in choose("auto", "bf16", card).reason
    with pytest.raises(UnavailableError, match="choose a smaller size or batch"):
        choose("auto", "bf16", CardFacts("tiny", GIB, (8, 9)))


@pytest.mark.parametrize("requested", ["fp16", "fp32", "FP8", ""])
def test_unknown_name(requested):
    message = f"precision '{requested}' is unknown: choose auto, bf16, fp8, int8, as stored."
    with pytest.raises(SettingError, match=re.escape(message)):
        choose(requested, "bf16", L40S)


def test_file_in_a_precision_that_is_not_run():
    with pytest.raises(CheckpointError, match="as 'nf4': this package computes with bf16"):
        choose("auto", "nf4", L40S)


def test_host_memory():
    check_host_memory(8 * GIB, 8 * GIB, "model.safetensors in int8")
    message = "model.safetensors in int8 needs 8.0 GiB of host memory and 7.5 GiB is available: "
    with pytest.raises(UnavailableError, match=re.escape(message) + ".*fp8 or int8"):
        check_host_memory(8 * GIB, 15 * GIB // 2, "model.safetensors in int8")
