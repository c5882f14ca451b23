"""The whole estimate: its JSON, what it adds up, and what it refuses."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_l40s.errors import SettingError, UnavailableError
from qwen_l40s.planning.cards import find_card, known_cards, with_memory
from qwen_l40s.planning.estimate import PHASES
from qwen_l40s.planning.estimator import estimate
from qwen_l40s.planning.memory import GIB, weight_bytes
from qwen_l40s.planning.phases import KEPT_FREE_BYTES
from qwen_l40s.planning.plan import plan
from qwen_l40s.planning.rates import rates_of
from qwen_l40s.planning.timing import forward_seconds
from qwen_l40s.planning.wish import Loras, Parts, Wish
from qwen_l40s.planning.work import FULL_SIZE

CARDS = known_cards()
L40S = CARDS["L40S"]
SMALL = with_memory(CARDS["RTX 3090"], 8 * GIB)
USUAL = Wish()


def card(name):
    return find_card(name, CARDS)


KEYS = {
    *("card", "family", "settings", "phases", "fits", "headroom_gib", "step_ms"),
    *("image_seconds", "first_image_seconds", "cold_start_seconds", "usd_per_image"),
    *("ranges", "disk_gib", "disk", "host_ram_gib", "plan", "basis", "basis_detail", "notes"),
}


@pytest.mark.parametrize("name", list(CARDS))
@pytest.mark.parametrize(
    "wish",
    [
        USUAL,
        Wish(batch=2, cfg="one pass", width=1024, height=1024),
        Wish(family="qwen-image-edit-2511", references=3, precision="int8"),
        Wish(family="qwen-image-layered", width=640, height=640, layers=3, references=1),
        Wish(loras=Loras(2, 32, "beside"), controlnet_bytes=3_500_000_000, steps=4),
    ],
    ids=["usual", "batch", "edit", "layered", "additions"],
)
def test_json(name, wish):
    found = estimate(wish, card(name))
    answer = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert answer.keys() == KEYS
    assert tuple(answer["phases"]) == PHASES
    for phase in answer["phases"].values():
        assert phase.keys() >= {"peak_gib", "card_gib", "parts", "seconds"}
        assert phase["parts"].keys() >= {"weights", "activations", "workspace", "resident"}
        assert phase["seconds"] >= 0
    for option in answer["plan"]:
        assert option.keys() == {
            *("precision", "modulation", "text_encoder_place", "tiles", "resident"),
            *("peak_gib", "headroom_gib", "reason"),
        }
    first = answer["plan"][0]
    assert answer["headroom_gib"] == first["headroom_gib"]
    assert answer["settings"]["precision"] == first["precision"]
    assert answer["settings"]["steps"] == wish.steps
    ranged = {"step_ms", "image_seconds"} | (
        {"usd_per_image"} if answer["usd_per_image"] else set()
    )
    assert answer["ranges"].keys() == ranged
    for what, (low, high) in answer["ranges"].items():
        assert 0 < low <= high
        assert answer[what] == pytest.approx(math.sqrt(low * high), rel=2e-3)
    assert answer["basis"] in ("measured", "predicted")
    assert all(note.endswith(".") for note in answer["notes"])


@pytest.mark.parametrize("name", list(CARDS))
def test_it_is_the_plans_recommendation(name):
    found = estimate(USUAL, card(name))
    assert found.options == plan(card(name).facts(), USUAL)
    assert found.option == found.options[0]
    assert found.fits == (found.headroom_bytes >= 0) == found.option.resident
    usable = card(name).memory_bytes - KEPT_FREE_BYTES
    assert found.fits == all(phase.card_bytes <= usable for phase in found.phases.values())


def test_the_sampling_peak_is_the_transformers_alone():
    phase = estimate(Wish(precision="bf16", modulation="off card"), L40S).as_dict()["phases"][
        "sampling"
    ]
    sizes = weight_bytes(FULL_SIZE, "bf16")
    weights = (sizes.total - sizes.modulation) / GIB
    assert phase["parts"]["weights"] == pytest.approx(weights, abs=1e-3)
    assert 0.3 < phase["peak_gib"] - weights < 0.8
    assert set(phase["parts"]["resident"]) == {"VAE", "modulation table", "text encoder"}


# --- times ---


def test_times_add_up():
    found = estimate(replace(USUAL, batch=2), L40S)
    parts = {name: phase.seconds for name, phase in found.phases.items()}
    for end in (0, 1):
        warm = sum(parts[name][end] for name in ("text", "sampling", "decode"))
        assert found.image_seconds[end] == pytest.approx(warm / 2)
        first = warm + parts["load"][end] + parts["tables"][end]
        assert found.first_image_seconds[end] == pytest.approx(first)
        assert found.step_seconds[end] == pytest.approx(parts["sampling"][end] / 20)
        rates = rates_of(L40S)[1 - end]
        step = 2 * forward_seconds(found.wish, "bf16", rates)
        assert found.step_seconds[end] == pytest.approx(step)


def test_a_calibration_stands_in_for_the_range():
    measured = rates_of(L40S)[0]
    found = estimate(USUAL, L40S, calibration=measured)
    assert found.basis.kind == "measured"
    assert found.step_seconds.low == found.step_seconds.high
    assert found.step_seconds.high == estimate(USUAL, L40S).step_seconds.high
    assert not any("Times are a range" in note for note in found.notes)
    assert any("Times are a range" in note for note in estimate(USUAL, L40S).notes)


def test_weights_that_are_moved_cost_time():
    slow = estimate(Wish(precision="bf16"), card("4090"))
    fast = estimate(Wish(precision="bf16"), L40S)
    assert not slow.fits
    moved = 2 * slow.option.moved_bytes
    link = card("4090").pcie_bytes_per_second
    assert slow.step_seconds.low > moved / link
    assert any("cross PCIe in every step" in note for note in slow.notes)
    assert any("int8 with modulation off card" in note for note in slow.notes)
    assert not any("PCIe" in note for note in fast.notes)


def test_a_text_encoder_that_leaves_comes_back_for_each_prompt():
    stays = estimate(USUAL, L40S)
    leaves = estimate(replace(USUAL, text_encoder_place="drop after encoding"), L40S)
    here = replace(USUAL, text_encoder_place="cpu")
    more = leaves.phases["text"].seconds.low - stays.phases["text"].seconds.low
    assert more >= 14 * GIB / L40S.pcie_bytes_per_second
    assert any("brings the text encoder" in note for note in leaves.notes)
    assert any("16 cores" in note for note in estimate(here, L40S).notes)


@given(
    steps=st.integers(1, 60),
    batch=st.integers(1, 3),
    name=st.sampled_from(["L40S", "4090", "H200"]),
)
@settings(max_examples=15, deadline=None)
def test_more_work_takes_longer(steps, batch, name):
    wish = Wish(width=1024, height=1024, steps=steps, batch=batch)
    known = estimate(wish, card(name))
    longer = estimate(replace(wish, steps=steps + 1), card(name))
    assert longer.image_seconds.low > known.image_seconds.low
    assert known.first_image_seconds.low > batch * known.image_seconds.low
    larger = estimate(replace(wish, width=1328), card(name))
    assert larger.step_seconds.high > known.step_seconds.high


def test_cfg_off_halves_a_step():
    found = estimate(replace(USUAL, cfg="off"), L40S).step_seconds
    assert found.times(2) == pytest.approx(estimate(USUAL, L40S).step_seconds)


# --- cost ---


def test_cost_is_the_price_of_the_time():
    price = L40S.price()
    found = estimate(USUAL, L40S)
    assert found.usd_per_image == pytest.approx(
        found.image_seconds.times(price.usd_per_hour / 3600)
    )
    assert any(f"{price.usd_per_hour:g} USD an hour" in note for note in found.notes)
    own = estimate(USUAL, L40S, usd_per_hour=2.0)
    assert own.usd_per_image == pytest.approx(own.image_seconds.times(2 / 3600))
    assert any("your own" in note for note in own.notes)
    assert estimate(USUAL, L40S, usd_per_hour=0).as_dict()["usd_per_image"] == 0


def test_without_a_price_there_is_no_cost():
    found = estimate(USUAL, replace(L40S, prices=()))
    assert found.usd_per_image is None
    answer = found.as_dict()
    assert answer["usd_per_image"] is None
    assert "usd_per_image" not in answer["ranges"]
    assert any("give your own" in note for note in found.notes)


@pytest.mark.parametrize("price", [-1, -0.01, math.nan, math.inf, "2"])
def test_no_price(price):
    with pytest.raises(SettingError, match="usd_per_hour is"):
        estimate(USUAL, L40S, usd_per_hour=price)


# --- notes ---


def test_small_cards_are_told_what_they_cost():
    four = with_memory(CARDS["RTX 3090"], 4 * GIB)
    found = estimate(USUAL, four)
    assert not found.fits
    assert any("nearly all weights are moved" in note for note in found.notes)
    assert not any("nearly all" in note for note in estimate(USUAL, SMALL).notes)
    assert any("It runs, slowly" in note for note in estimate(USUAL, SMALL).notes)
    with pytest.raises(UnavailableError, match="choose a smaller size or batch"):
        estimate(USUAL, with_memory(L40S, GIB))


def test_additions_are_named():
    beside = estimate(replace(USUAL, loras=Loras(2, 64, "beside")), L40S)
    merged = estimate(replace(USUAL, loras=Loras(2, 64, "merged")), L40S)
    assert any("2 LoRAs beside the weights take" in note for note in beside.notes)
    assert beside.step_seconds.low > merged.step_seconds.low
    assert not any("LoRA" in note for note in merged.notes)
    control = estimate(replace(USUAL, controlnet_bytes=10**9), L40S)
    assert any("ControlNet" in note for note in control.notes)


def test_quantizing_on_load_is_said_of_files_that_are_not():
    int8 = replace(USUAL, precision="int8")
    assert any("qwen-l40s quantize" in note for note in estimate(int8, L40S).notes)
    at_hand = replace(int8, parts=Parts(transformer_bytes=27 * GIB, modulation_bytes=12 * GIB))
    found = estimate(at_hand, L40S)
    assert not any("qwen-l40s quantize" in note for note in found.notes)
    assert found.phases["sampling"].weights in (27 * GIB, 15 * GIB)
    assert found.disk.files_bytes < estimate(int8, L40S).disk.files_bytes


def test_the_decoders_turn_is_counted_where_the_transformer_has_to_leave():
    wish = Wish(width=2048, height=2048, tiles=1, precision="bf16")
    tight = estimate(wish, with_memory(L40S, 30 * GIB))
    roomy = estimate(wish, L40S)
    assert not tight.fits
    assert tight.option.moved_bytes == 0
    assert tight.phases["decode"].seconds.low > roomy.phases["decode"].seconds.low
    assert any("come back for each image" in note for note in tight.notes)
