"""The whole estimate: its JSON, what it adds up, and what it refuses."""

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from qwen_l40s.charts.text import estimate_json, estimate_text, notes_of, remedy
from qwen_l40s.errors import UnavailableError
from qwen_l40s.families.qwen_image import FULL_SIZE
from qwen_l40s.families.registry import members
from qwen_l40s.machine.store import known_cards
from qwen_l40s.planning.bytes import text_encoder_bytes, weight_bytes
from qwen_l40s.planning.cards import find_card
from qwen_l40s.planning.estimate import DOES_NOT_FIT, FITS, TIGHT_BYTES, estimate
from qwen_l40s.planning.files import BRINGING, BRINGING_8_BITS, TO_CARD
from qwen_l40s.planning.phases import KEPT_FREE_BYTES, PHASES
from qwen_l40s.planning.rates import constants, measured, rates_by, rates_of
from qwen_l40s.planning.request import CFG_MODES, Loras, Parts, RunRequest, repaid_by
from qwen_l40s.planning.times import STOCK_FORMATS, forward_seconds, sampling_seconds
from qwen_l40s.spec.formats import GIB

CARDS = known_cards()
WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows" / "api"
L40S = CARDS["L40S"]
SMALL = replace(CARDS["RTX 3090"], memory_bytes=8 * GIB)
USUAL = RunRequest()


def card(name):
    return find_card(name, CARDS)


KEYS = {
    *("card", "family", "settings", "phases", "fits", "tight", "verdict", "headroom_gib"),
    "step_ms",
    *("step_bound_by", "step_cache", "stock"),
    *("image_seconds", "first_image_seconds", "cold_start_seconds", "usd_per_image"),
    *("ranges", "disk_gib", "disk", "host_ram_gib", "plan", "basis", "basis_detail", "notes"),
    *("ram_gib", "with_less_ram_gib", "offloaded_gib_per_step", "stock_as_fast"),
    *("template", "downloads_gib"),
}


@pytest.mark.parametrize("name", list(CARDS))
@pytest.mark.parametrize(
    "asked",
    [
        USUAL,
        RunRequest(batch=2, cfg="one pass", width=1024, height=1024),
        RunRequest(family="qwen-image-edit-2511", references=3, precision="int8"),
        RunRequest(family="qwen-image-layered", width=640, height=640, layers=3, references=1),
        RunRequest(loras=Loras(2, 32, "bypass"), controlnet_bytes=3_500_000_000, steps=4),
        RunRequest(steps=50, cache="balanced"),
    ],
    ids=["usual", "batch", "edit", "layered", "additions", "cache"],
)
def test_json(name, asked):
    if asked.precision != "auto" and not card(name).facts().multiplies(asked.precision):
        asked = replace(asked, precision="bf16")
    found = estimate(asked, card(name))
    answer = json.loads(json.dumps(estimate_json(found), allow_nan=False))
    assert answer.keys() == KEYS
    assert tuple(answer["phases"]) == PHASES
    for phase in answer["phases"].values():
        assert phase.keys() >= {"peak_gib", "card_gib", "parts", "seconds"}
        assert phase["parts"].keys() >= {"weights", "activations", "workspace", "resident"}
        assert phase["seconds"] >= 0
    for option in answer["plan"]:
        assert option.keys() == {
            *("precision", "modulation", "text_encoder_place", "tiles", "resident"),
            *(
                "peak_gib",
                "peak_phase",
                "headroom_gib",
                "image_seconds",
                "moved_gib",
                "recommended",
                "reason",
            ),
        }
    first = answer["plan"][0]
    assert answer["headroom_gib"] == first["headroom_gib"]
    assert answer["settings"]["precision"] == first["precision"]
    assert answer["settings"]["steps"] == asked.steps
    ranged = {"step_ms", "image_seconds", "first_image_seconds", "cold_start_seconds"}
    ranged |= {"usd_per_image"} if answer["usd_per_image"] else set()
    assert answer["ranges"].keys() == ranged
    for what, (low, high) in answer["ranges"].items():
        assert 0 < low <= high
        assert answer[what] == pytest.approx(math.sqrt(low * high), rel=2e-3)
    assert answer["basis"] in ("measured", "predicted")
    assert all(note.endswith(".") for note in answer["notes"])


def test_the_sampling_peak_is_the_transformers_alone():
    found = estimate(RunRequest(precision="bf16", modulation="off card"), L40S)
    phase = estimate_json(found)["phases"]["sampling"]
    sizes = weight_bytes(FULL_SIZE, "bf16")
    weights = (sizes.total - sizes.modulation) / GIB
    assert phase["parts"]["weights"] == pytest.approx(weights, abs=1e-3)
    assert 0.3 < phase["peak_gib"] - weights < 0.8
    resident = phase["parts"]["resident"]
    assert set(resident) == {"VAE", "modulation table", "text encoder"}
    small = estimate_json(estimate(RunRequest(precision="int8", width=1024, height=1024), L40S))
    assert "CUDA graphs" in small["phases"]["sampling"]["parts"]["resident"]


# --- times ---


def file_of(run):
    return f"{run['what']} of {run['file']}"


@pytest.mark.parametrize("run", measured()["first_prompts"], ids=file_of)
def test_the_first_image_of_a_server_is_predicted(run):
    """4 steps at 1328x1328 without CFG, a prompt of 60 words, as main.py of ComfyUI ran them."""
    whole = replace(USUAL, precision=run["what"], steps=4, cfg="off", text_tokens=64)
    parts = Parts(transformer=FULL_SIZE)  # in bf16
    if run["file"] == run["what"] != "bf16":
        parts = Parts(transformer_bytes=weight_bytes(FULL_SIZE, run["what"]).total)
    found = estimate(replace(whole, parts=parts), card(measured()["conditions"]["card"]))
    first = found.first_image_seconds
    assert first.low < run["seconds"] < first.high
    assert first.middle == pytest.approx(run["seconds"], rel=0.2)


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
        step = 2 * forward_seconds(found.request, "int8", rates)
        assert found.step_seconds[end] == pytest.approx(step)


def test_a_step_cache_takes_its_computed_steps():
    asked = RunRequest(steps=50, cache="balanced")
    found, plain = (estimate(replace(asked, cache=cache), L40S) for cache in ("balanced", "off"))
    assert found.step_seconds == pytest.approx(plain.step_seconds)
    sampling, whole = (each.phases["sampling"] for each in (found, plain))
    assert sampling.seconds.high == pytest.approx(whole.seconds.high * 26 / 50)
    latent = 4 * 16 * (1328 // 8) ** 2
    assert sampling.card_bytes - whole.card_bytes == 3 * latent
    custom = estimate(replace(asked, cache="custom", computed=26), L40S).phases["sampling"]
    assert custom.card_bytes == sampling.card_bytes
    assert found.phases["tables"].seconds == plain.phases["tables"].seconds
    assert found.usd_per_image.high < plain.usd_per_image.high
    answer = estimate_json(found)
    assert answer["settings"]["cache"] == "balanced"
    assert answer["step_cache"] == {"name": "balanced", "computed_steps": 26}
    text = " ".join(estimate_text(found).split())
    assert "Step cache: balanced computes 26 of 50 steps, " in text
    assert "a computed step" in text and "Step cache" not in estimate_text(plain)
    none = estimate(replace(asked, steps=8), L40S)
    assert none.step_seconds == estimate(replace(USUAL, steps=8), L40S).step_seconds
    assert "Step cache: balanced has no effect: runs of 10 steps or fewer" in estimate_text(none)
    assert estimate_json(none)["step_cache"]["computed_steps"] == 8


@pytest.mark.parametrize(
    ("changed", "bound"),
    [
        ({}, "card"),
        ({"width": 1328, "height": 1328, "steps": 4}, "card"),
        ({"steps": 4}, "processor"),
        ({"loras": Loras(1, 4, "bypass")}, "card"),  # a graph replays them too
    ],
)
def test_a_step_says_that_the_processor_bounds_it(changed, bound):
    asked = RunRequest(precision="int8", width=256, height=256)
    found = estimate(replace(asked, **changed), card("H200"))
    assert estimate_json(found)["step_bound_by"] == found.bound == bound
    text = " ".join(estimate_text(found).split())
    assert ("a step, bound by the CPU (" in text) == (bound == "processor")
    request, rates = found.request, rates_of(card("H200"))[0]
    repaid = repaid_by(request, found.option.setting)
    steps = sampling_seconds(request, "int8", rates, repaid=repaid)
    assert found.step_seconds.low == pytest.approx(steps / request.steps)
    assert (repaid == 8) == (request.steps > 8)  # two, and as many as repay a capture
    launched, replayed = (
        2 * forward_seconds(request, "int8", rates, graph=it) for it in (False, True)
    )
    first = min(8, request.steps)
    assert steps == pytest.approx(first * launched + (request.steps - first) * replayed)


def test_a_calibration_stands_in_for_the_range():
    measured = rates_of(L40S)[0]
    found = estimate(USUAL, L40S, calibration=measured)
    assert found.basis.kind == "measured"
    assert found.step_seconds.low == found.step_seconds.high
    assert found.step_seconds.high == estimate(USUAL, L40S).step_seconds.high
    assert not any("Times are a range" in note for note in notes_of(found))
    assert estimate(USUAL, L40S).basis.text.startswith("predicted as a range: no L40S was")


def test_a_precision_that_the_calibration_left_out_is_a_range():
    whole = rates_of(L40S)[0]
    part = replace(whole, gemm={"bf16": whole.gemm["bf16"]})
    bf16, int8 = (
        estimate(RunRequest(precision=precision), L40S, calibration=part)
        for precision in ("bf16", "int8")
    )
    assert bf16.basis.kind == "measured"
    assert bf16.step_seconds.low == bf16.step_seconds.high
    assert int8.basis.kind == "predicted"
    assert int8.step_seconds.high < bf16.step_seconds.high  # as the plan says it
    assert "int8, which it did not measure" in int8.basis.text


def test_what_was_not_measured_is_predicted_on_the_measured_card_too():
    h200 = card("H200")
    assert estimate(USUAL, h200).basis.kind == "measured"
    for request, known in (
        (replace(USUAL, controlnet_bytes=3 * 10**9), h200),
        (replace(USUAL, text_encoder_place="cpu"), h200),
        (replace(USUAL, loras=Loras(3, 32, "bypass")), replace(h200, memory_bytes=12 * GIB)),
    ):
        found = estimate(request, known)
        assert found.basis.kind == "predicted"
        assert "predicted from rates measured on an NVIDIA H200" in found.basis.text
        assert "within" not in found.basis.text
        assert not any("Times are a range" in note for note in notes_of(found))
    changed = estimate(USUAL, replace(h200, bandwidth=1e12, changed=True))
    assert changed.basis.kind == "predicted"
    assert "no H200 with the figures of your list was measured" in changed.basis.text


# --- loads ---


def test_loading_takes_what_is_done():
    def load(known=L40S, **more):
        found = estimate(replace(USUAL, **{"text_encoder": "bf16", **more}), known)
        cold, memory = found.times.cold_start, found.phases["load"].seconds
        assert cold.low > memory.low and cold.high > memory.high
        return memory

    int8, cpu = load(precision="int8"), load(precision="int8", text_encoder_place="cpu")
    small = load(replace(L40S, memory_bytes=6 * GIB), precision="int8", text_encoder_place="cpu")
    dropped = load(precision="int8", text_encoder_place="drop after encoding")
    sizes = weight_bytes(FULL_SIZE, "int8")
    parts = Parts(transformer_bytes=sizes.total, modulation_bytes=sizes.modulation)
    ready = load(precision="int8", parts=parts)
    assert cpu == pytest.approx(dropped)
    for end in (0, 1):
        # The text encoder's way to the card, and that of weights which every step moves.
        assert small[end] < cpu[end] < int8[end]
        assert int8[end] - ready[end] > 1.2  # quantizing, and reading a file that is larger


@pytest.mark.parametrize(("precision", "bringing"), [("bf16", BRINGING), ("int8", BRINGING_8_BITS)])
def test_what_of_the_transformer_is_on_the_card_is_brought_and_the_text_encoder_is_not(
    precision, bringing
):
    def load(**more):
        return estimate(replace(request, **more), card("H200")).phases["load"].seconds

    request = replace(USUAL, precision=precision, modulation="on card")
    modulation = bringing.times(weight_bytes(FULL_SIZE, precision).modulation)
    text = TO_CARD.times(text_encoder_bytes(request, "bf16"))
    less = [load(modulation="off card"), load(text_encoder_place="cpu")]
    for end in (0, 1):
        differences = [load()[end] - other[end] for other in less]
        assert differences == pytest.approx([modulation[end], text[end]], rel=1e-6)


def test_the_text_encoders_precision_is_in_its_time():
    request = replace(USUAL, precision="int8")
    bf16, fp8 = (
        estimate(replace(request, text_encoder=precision), card("H200")).phases["text"].seconds
        for precision in ("bf16", "fp8")
    )
    assert 1.03 < fp8.low / bf16.low < 1.2  # 1.08 to 1.12 on an H200


def test_weights_that_are_moved_cost_time():
    slow = estimate(RunRequest(precision="bf16"), card("4090"))
    fast = estimate(RunRequest(precision="bf16"), L40S)
    assert not slow.fits
    moved = 2 * slow.option.moved_bytes
    link = card("4090").pcie_bytes_per_second
    assert slow.step_seconds.low > moved / link
    assert estimate_json(slow)["offloaded_gib_per_step"] == pytest.approx(moved / GIB, abs=0.01)
    assert remedy(slow).startswith("Next: set precision int8")
    assert estimate_json(fast)["offloaded_gib_per_step"] == 0


def test_a_text_encoder_that_leaves_comes_back_for_each_prompt():
    stays = estimate(USUAL, L40S)
    bf16 = replace(USUAL, text_encoder="bf16")
    leaves = estimate(replace(bf16, text_encoder_place="drop after encoding"), L40S)
    here = replace(USUAL, text_encoder_place="cpu")
    more = leaves.phases["text"].seconds.low - stays.phases["text"].seconds.low
    assert more >= 14 * GIB / L40S.pcie_bytes_per_second
    assert any("16 cores" in note for note in notes_of(estimate(here, L40S)))


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
    assert any(f"${price.usd_per_hour:g} an hour or more" in note for note in notes_of(found))
    own = estimate(USUAL, L40S, usd_per_hour=2.0)
    assert own.usd_per_image == pytest.approx(own.image_seconds.times(2 / 3600))
    assert any("your own" in note for note in notes_of(own))
    assert estimate_json(estimate(USUAL, L40S, usd_per_hour=0))["usd_per_image"] == 0


# --- notes ---


def test_small_cards_are_told_what_they_cost():
    four = replace(CARDS["RTX 3090"], memory_bytes=4 * GIB)
    found = estimate(USUAL, four)
    assert not found.fits
    with pytest.raises(UnavailableError, match="choose a smaller size or batch"):
        estimate(USUAL, replace(L40S, memory_bytes=GIB))


def test_additions_are_named():
    beside = estimate(replace(USUAL, loras=Loras(2, 64, "bypass")), L40S)
    merged = estimate(replace(USUAL, loras=Loras(2, 64, "merge")), L40S)
    assert any("2 LoRAs in bypass mode add" in note for note in notes_of(beside))
    assert beside.step_seconds.low > merged.step_seconds.low
    assert not any("LoRA" in note for note in notes_of(merged))
    control = estimate(replace(USUAL, controlnet_bytes=10**9), L40S)
    assert any("ControlNet" in note for note in notes_of(control))


def test_quantizing_on_load_is_said_of_files_that_are_not():
    int8 = replace(USUAL, precision="int8")
    assert any("qwen-l40s quantize" in note for note in notes_of(estimate(int8, L40S)))
    at_hand = replace(int8, parts=Parts(transformer_bytes=27 * GIB, modulation_bytes=12 * GIB))
    found = estimate(at_hand, L40S)
    assert not any("qwen-l40s quantize" in note for note in notes_of(found))
    assert found.phases["sampling"].weights in (27 * GIB, 15 * GIB)


def test_the_decoders_turn_is_counted_where_the_transformer_has_to_leave():
    request = RunRequest(width=2048, height=2048, tiles=1, precision="bf16")
    tight = estimate(request, replace(L40S, memory_bytes=28 * GIB))
    roomy = estimate(request, L40S)
    assert not tight.fits
    assert tight.option.moved_bytes == 0
    # Of what comes back in the next pass, a host that pins memory hides some.
    slow, quick = (
        found.phases["text"].seconds.high + found.phases["decode"].seconds.high
        for found in (tight, roomy)
    )
    assert slow > quick
    assert "come back" in estimate_text(tight)


@pytest.mark.parametrize(("layers", "counted"), [(None, 4), (3, 3), (0, 0)])
def test_what_an_image_is_of_a_layered_model(layers, counted):
    request = RunRequest(family="qwen-image-layered", layers=layers)
    assert request.layers == counted
    notes = notes_of(estimate(request, find_card("L40S", known_cards())))
    assert any(f"its {counted} layers" in note for note in notes) == (counted > 0)


def test_a_layered_model_counts_the_layers_of_its_template():
    template = json.loads((WORKFLOWS / "layered.json").read_text(encoding="utf-8"))
    (size,) = (node for node in template.values() if "layers" in node["inputs"])
    (scale,) = (node for node in template.values() if "largest_size" in node["inputs"])
    request = RunRequest("qwen-image-layered", width=None, height=None)
    assert request.layers == size["inputs"]["layers"]
    assert request.width == scale["inputs"]["largest_size"]


# --- what fits with little to spare


def with_spare(request, spare, listed):
    """A card that has so much memory that a setting leaves `spare` bytes of it."""
    option = estimate(request, replace(listed, memory_bytes=200 * GIB)).option
    return replace(listed, memory_bytes=option.peak_bytes + KEPT_FREE_BYTES + spare)


EVERYTHING = RunRequest(precision="bf16", modulation="on card", text_encoder_place="on card")


@pytest.mark.parametrize(
    "spare, tight",
    [(-1, False), (0, True), (TIGHT_BYTES - 1, True), (TIGHT_BYTES, False)],
)
def test_tight_is_what_fits_with_little_to_spare(spare, tight):
    request = replace(EVERYTHING, tiles=1)
    assert estimate(request, with_spare(request, spare, L40S)).tight == tight
    assert not estimate(request, with_spare(request, spare, card("H200"))).tight


NEAR_L40S = replace(L40S, memory_bytes=L40S.memory_bytes - GIB)


def test_a_calibration_measures_no_memory():
    calibration = rates_by(constants(), L40S)
    found = estimate(USUAL, NEAR_L40S, calibration=calibration)
    assert found.basis.kind == "measured" and found.tight


def test_the_safer_setting_stays_on_the_card_with_room():
    safer = estimate(USUAL, NEAR_L40S).safer
    assert (safer.setting.precision, safer.setting.modulation) == ("int8", "off card")
    assert safer.resident and safer.headroom_bytes >= TIGHT_BYTES
    bf16 = estimate(replace(USUAL, precision="bf16"), NEAR_L40S).safer
    assert (bf16.setting.precision, bf16.setting.text_encoder) == ("bf16", "fp8")
    assert bf16.headroom_bytes >= TIGHT_BYTES
    assert estimate(USUAL, card("H100 SXM")).safer is None


def test_where_nothing_leaves_more_nothing_is_called_safer():
    least = estimate(USUAL, replace(card("RTX 4090"), memory_bytes=16 * GIB))
    assert least.tight and least.safer is None


@pytest.mark.parametrize("family", list(members()))
@pytest.mark.parametrize("name", list(CARDS))
def test_every_listed_card_gets_a_sensible_answer(name, family):
    """With weights that move in each step where they do not stay, and never a refusal."""
    listed = card(name)
    member = members()[family]
    size = dict.fromkeys(("width", "height"), min(member.side, 1344))
    request = RunRequest(family=family, references=min(1, member.most_references), **size)
    for precision in ("auto", "bf16", "int8", "fp8"):
        if not listed.facts().multiplies(precision) and precision != "auto":
            with pytest.raises(UnavailableError, match=f"{precision} needs a GPU of sm_"):
                estimate(replace(request, precision=precision), listed)
            continue
        found = estimate(replace(request, precision=precision), listed)
        json.dumps(estimate_json(found), allow_nan=False)
        usable = listed.memory_bytes - KEPT_FREE_BYTES
        assert all(phase.card_bytes <= usable for phase in found.phases.values())
        assert 0 < found.image_seconds.low <= found.image_seconds.high < 24 * 3600
        moved = found.option.moved_bytes
        assert not (found.fits and moved)
        # Nothing crosses the link faster than it can.
        assert found.step_seconds.low * listed.pcie_bytes_per_second >= moved
        if precision == "auto":
            others = [option for option in found.options if option.resident]
            assert found.fits or not others


# --- stock ComfyUI, system RAM, and what to download


@pytest.mark.parametrize("name", CARDS)
def test_no_row_of_stock_is_faster_without_the_answer_saying_so(name):
    rows = {
        row for row, how in STOCK_FORMATS.items() if card(name).facts().multiplies(how.products)
    }
    for family, side, cfg, steps in itertools.product(
        ("qwen-image", "qwen-image-2.1"), (None, 1024), ("two passes", "off"), (4, None)
    ):
        asked = RunRequest(family=family, width=side, height=side, cfg=cfg, steps=steps)
        found = estimate(asked, card(name))
        answer = estimate_json(found)
        assert answer["stock"].keys() == rows
        fast = {row for row in rows if answer["stock"][row]["times_as_fast"][0] < 1}
        assert set(answer["stock_as_fast"]) == fast
        assert all(row in estimate_text(found) for row in fast)
        # Turing has no products in 8 bits; ours and ComfyUI's in bf16 take the same time there.
        exact = {row for row in fast if not STOCK_FORMATS[row].attends_in_int8}
        assert not exact or found.option.setting.precision == "bf16"
        assert all(answer["stock"][row]["times_as_fast"][0] > 0.99 for row in exact)


@pytest.mark.parametrize("name", ["T4", "4060", "4070", "4090", "L40S", "H200"])
@pytest.mark.parametrize("ram", [4, 8, 16, 32])
def test_where_system_ram_is_short_the_answer_names_what_does(name, ram):
    for family, precision in itertools.product(members(), ("auto", "bf16", "int8", "fp8")):
        asked = RunRequest(family, precision, width=None, height=None)
        if not card(name).facts().multiplies(precision):
            continue
        found = estimate(asked, card(name), ram_bytes=ram * GIB)
        answer = estimate_json(found)
        short = found.host_ram_bytes > ram * GIB
        assert (
            (answer["verdict"] == DOES_NOT_FIT) == short == estimate_text(found).startswith("Not")
        )
        assert answer["ram_gib"] == ram and f" of {ram}.0 GiB of system RAM" in estimate_text(found)
        less = found.with_less_ram
        assert all(count <= ram * GIB for count in less.values()) and not (less and not short)
        assert all(what in remedy(found) for what in less)
        others = [RunRequest(what, width=None, height=None) for what in less if what in members()]
        if set_so := SET.findall(remedy(found)):
            others.append(replace(asked, **{NAMES[name]: value for name, value in set_so}))
        for other in others:
            again = estimate(other, card(name), ram_bytes=ram * GIB)
            assert not again.short_of_ram and (short or again.verdict == FITS)


NAMES = {
    "precision": "precision",
    "modulation": "modulation",
    "text_encoder_precision": "text_encoder",
    "text_encoder_placement": "text_encoder_place",
}
SET = re.compile(rf"\b({'|'.join(NAMES)}) ([^,(]+)(?:,| \()")


def test_auto_takes_the_file_as_it_is_where_system_ram_is_short():
    for family, stored in ("qwen-image-2512", "fp8"), ("qwen-image-layered", "bf16"):
        asked = RunRequest(family, width=None, height=None)
        found = estimate(asked, card("4090"), ram_bytes=16 * GIB)
        assert not found.short_of_ram and found.option.setting.precision == stored
        assert found.downloads[0].name == asked.member.files[stored].name
        named = estimate(replace(asked, precision="int8"), card("4090"), ram_bytes=16 * GIB)
        assert named.short_of_ram and len(named.with_less_ram) == 3
    count = weight_bytes(FULL_SIZE, "fp8").total
    cast = Parts(FULL_SIZE, count, 0, file_bytes=(("transformer", count),), kept="fp8", cast=True)
    for gib, precision in (16, "fp8"), (32, "int8"):
        found = estimate(RunRequest(precision="fp8", parts=cast), L40S, ram_bytes=gib * GIB)
        assert not found.short_of_ram and found.option.setting.precision == precision


@pytest.mark.parametrize("member", members().values(), ids=members())
def test_the_template_and_its_files_are_named(member):
    for precision, steps, cfg in itertools.product(("auto", "bf16"), (4, 8, 30), CFG_MODES):
        asked = RunRequest(member.name, precision, None, None, steps=steps, cfg=cfg)
        found = estimate(asked, card("4090"))
        answer = estimate_json(found)
        if not member.templates:
            assert answer["template"] is None and not answer["downloads_gib"]
            continue
        template = found.template
        assert (template is member.templates[0]) or cfg == "off" or precision == "bf16"
        names = [name.removesuffix(".safetensors") for name in answer["downloads_gib"]]
        assert template.lora is None or template.lora.name in names
        assert member.vae_file.name in names and len(names) == 3 + (template.lora is not None)
        assert all(name in estimate_text(found) for name in [template.name, *names])
        workflow = (WORKFLOWS / f"{template.name}.json").read_text("utf-8")
        assert precision == "bf16" or all(f"{name}.safetensors" in workflow for name in names)
    at_hand = replace(asked, parts=Parts(transformer_bytes=GIB))
    assert not estimate(at_hand, card("4090")).downloads


def test_every_option_of_a_plan_has_its_time():
    found = estimate(USUAL, card("4090"))
    times = [option["image_seconds"] for option in estimate_json(found)["plan"]]
    assert times[0] == pytest.approx(list(found.image_seconds), rel=1e-3)
    bf16 = estimate(replace(USUAL, precision="bf16"), card("4090"))
    assert times[1] == pytest.approx(list(bf16.image_seconds), rel=1e-3)
