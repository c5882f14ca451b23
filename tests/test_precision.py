"""Which precision a transformer is held in, on cards that this test is not on."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_l40s.errors import CheckpointError, SettingError, UnavailableError
from qwen_l40s.loaders.precision import (
    TRANSFORMER_PRECISIONS,
    check_host_memory,
    choose_transformer_precision,
)
from qwen_l40s.planning.memory import GIB, MIB, RESERVE_BYTES, CardFacts

L40S = CardFacts("NVIDIA L40S", 46068 * MIB, (8, 9))
A100 = CardFacts("NVIDIA A100", 81920 * MIB, (8, 0))
A100_40 = CardFacts("NVIDIA A100", 40960 * MIB, (8, 0))
RTX_4090 = CardFacts("RTX 4090", 24564 * MIB, (8, 9))
RTX_5090 = CardFacts("RTX 5090", 32607 * MIB, (12, 0))
T4 = CardFacts("Tesla T4", 15360 * MIB, (7, 5))
CARDS = (L40S, A100, A100_40, RTX_4090, RTX_5090, T4, None)

WEIGHTS = {
    "bf16": int(38.05 * GIB),
    "fp16": int(38.05 * GIB),
    "fp32": int(76.1 * GIB),
    "fp8": int(25.4 * GIB),
    "int8": int(25.4 * GIB),
}
STEP = int(1.7 * GIB)
# The least faithful first; auto gives bf16 and int8 alone where the file is not quantized.
FIDELITY = ("fp8", "int8", "bf16", "fp16", "fp32")


def choose(requested, stored, card, weights=WEIGHTS, activations=STEP):
    return choose_transformer_precision(
        requested, stored=stored, weights=weights, activations=activations, card=card
    )


# --- auto ---


@pytest.mark.parametrize(
    ("card", "stored", "name", "reason"),
    [
        (
            L40S,
            "bf16",
            "bf16",
            "auto: bf16 is what the model was trained in, and it fits; 38.0 GiB",
        ),
        (L40S, "fp32", "bf16", "the file's fp32 is rounded to bf16"),
        (L40S, "fp16", "bf16", "the file's fp16 is rounded to bf16"),
        (A100, "bf16", "bf16", "stay on NVIDIA A100 (80.0 GiB less 1.2 GiB in reserve"),
        (A100_40, "bf16", "int8", "tells for yours); 25.4 GiB of weights stay on"),
        (RTX_5090, "bf16", "int8", "bf16 with 38.0 GiB of weights does not stay on the card"),
        (RTX_4090, "bf16", "int8", "the host moves 4.3 GiB to it in every step"),
        (T4, "bf16", "int8", "sm_75 does not multiply int8, which needs sm_80"),
        (L40S, "fp8", "fp8", "auto: the file holds fp8, and dequantizing it would gain nothing"),
        (L40S, "int8", "int8", "auto: the file holds int8"),
        (A100, "fp8", "fp8", "sm_80 does not multiply fp8, which needs sm_89"),
        (T4, "fp8", "fp8", "computed in bf16 and save memory, not time"),
        (None, "bf16", "bf16", "auto on the CPU: as the file holds it, bf16; 38.0 GiB of weights"),
        (None, "fp32", "fp32", "76.1 GiB of weights in host memory"),
        (None, "fp8", "fp8", "the CPU computes in full precision from the fp8 weights"),
    ],
)
def test_auto(card, stored, name, reason):
    choice = choose("auto", stored, card)
    assert choice.name == name
    assert reason in choice.reason


def test_auto_needs_room_for_the_reserve_and_one_step():
    exact = WEIGHTS["bf16"] + RESERVE_BYTES + STEP
    assert choose("auto", "bf16", CardFacts("card", exact, (9, 0))).name == "bf16"
    assert choose("auto", "bf16", CardFacts("card", exact - 1, (9, 0))).name == "int8"


sizes = st.integers(0, 100 * GIB)


@given(
    total=sizes,
    more=sizes,
    activations=sizes,
    stored=st.sampled_from(FIDELITY),
    capability=st.sampled_from([(7, 5), (8, 0), (8, 9), (9, 0), (12, 0)]),
    weights=st.fixed_dictionaries(dict.fromkeys(FIDELITY, st.integers(1, 100 * GIB))),
)
def test_more_memory_is_never_less_faithful(total, more, activations, stored, capability, weights):
    small, large = (
        choose("auto", stored, CardFacts("card", size, capability), weights, activations).name
        for size in (total, total + more)
    )
    assert FIDELITY.index(small) <= FIDELITY.index(large)


@given(
    total=sizes,
    activations=sizes,
    stored=st.sampled_from(["bf16", "fp16", "fp32"]),
    weights=st.fixed_dictionaries(dict.fromkeys(FIDELITY, st.integers(1, 100 * GIB))),
)
def test_auto_takes_bf16_exactly_when_it_stays(total, activations, stored, weights):
    choice = choose("auto", stored, CardFacts("card", total, (8, 9)), weights, activations)
    stays = weights["bf16"] + activations + RESERVE_BYTES <= total
    assert choice.name == ("bf16" if stays else "int8")


# --- as stored ---


@pytest.mark.parametrize("card", CARDS, ids=str)
@pytest.mark.parametrize("stored", FIDELITY)
def test_as_stored_is_what_the_file_holds_everywhere(card, stored):
    choice = choose("as stored", stored, card)
    assert choice.name == stored
    assert choice.reason.startswith(f"as stored: the file holds {stored}; ")


def test_fp8_file_on_a_card_without_fp8_is_weight_only():
    reason = choose("as stored", "fp8", A100).reason
    assert "so the fp8 weights are computed in bf16 and save memory, not time" in reason
    assert "computed in bf16" not in choose("as stored", "fp8", L40S).reason


# --- a precision by name ---


@pytest.mark.parametrize(
    ("requested", "stored", "card", "reason"),
    [
        ("bf16", "bf16", L40S, "requested: the file holds bf16; 38.0 GiB of weights stay on"),
        ("bf16", "fp32", L40S, "requested: the file's fp32 is rounded to bf16"),
        ("bf16", "fp8", L40S, "dequantized, which does not bring back what fp8 lost"),
        ("bf16", "int8", None, "dequantized, which does not bring back what int8 lost"),
        ("bf16", "bf16", RTX_4090, "of 38.0 GiB of weights 21.1 GiB stay on RTX 4090"),
        ("bf16", "bf16", RTX_4090, "the host moves 17.0 GiB to it in every step"),
        ("bf16", "bf16", None, "38.0 GiB of weights in host memory"),
        ("fp8", "bf16", L40S, "the file's bf16 is quantized to fp8 on load; 25.4 GiB of weights"),
        ("fp8", "fp8", L40S, "requested: the file holds fp8"),
        ("fp8", "bf16", RTX_4090, "the host moves 4.3 GiB to it in every step"),
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
        choice = choose(requested, stored, card)
    except UnavailableError as error:
        choices = re.search(r"choose (.*)\.$", str(error))[1].split(", ")
        assert [choose(other, stored, card).name for other in choices]
        return
    assert f"{WEIGHTS[choice.name] / GIB:.1f} GiB of weights" in choice.reason
    assert "\n" not in choice.reason
    assert card is None or card.name in choice.reason


def test_the_reason_tells_whether_all_weights_stay():
    exact = WEIGHTS["int8"] + RESERVE_BYTES + STEP
    all_stay = choose("int8", "bf16", CardFacts("card", exact, (8, 9))).reason
    assert "25.4 GiB of weights stay on card" in all_stay
    assert "in every step" not in all_stay
    assert "in every step" in choose("int8", "bf16", CardFacts("card", exact - 1, (8, 9))).reason


def test_a_card_smaller_than_one_step():
    card = CardFacts("GT 1030", 2 * GIB, (8, 9))
    assert "of 25.4 GiB of weights 0 MiB stay on GT 1030" in choose("auto", "bf16", card).reason


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
