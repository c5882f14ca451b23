"""What planning counts of each phase: against what cards measured,
that parts add up, and that more of anything never takes less.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from qwen_l40s.errors import UnavailableError
from qwen_l40s.planning import phases as phases_module
from qwen_l40s.planning.bytes import (
    GRAPH_WORKSPACES,
    SAMPLER_LATENTS,
    buffer_bytes,
    encoding_bytes,
    graph_bytes,
    lora_bytes,
    step_bytes,
    table_bytes,
    text_encoder_bytes,
)
from qwen_l40s.planning.files import host_memory
from qwen_l40s.planning.phases import (
    GRAPHS,
    KEPT_FREE_BYTES,
    PHASES,
    phases,
    transformer_bytes,
    vae_bytes,
)
from qwen_l40s.planning.rates import Constants
from qwen_l40s.planning.request import TEXT_PLACES, Loras, Parts, RunRequest, Setting, replays_graph
from qwen_l40s.planning.vae import plan_decode
from qwen_l40s.spec.formats import GIB, MIB, MULTIPLIED, QUANTIZED
from qwen_l40s.spec.sizes import MOST_TABLE_BYTES

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
CARD = int(44.4 * GIB)

sides = st.integers(16, 128).map(lambda tokens: 16 * tokens)
loras = st.builds(
    Loras,
    count=st.integers(0, 3),
    rank=st.sampled_from([4, 16, 64]),
    mode=st.sampled_from(["merge", "bypass"]),
)
requests = st.one_of(
    st.builds(
        RunRequest,
        width=sides,
        height=sides,
        batch=st.integers(1, 3),
        steps=st.integers(1, 60),
        cfg=st.sampled_from(["two passes", "one pass", "off"]),
        text_tokens=st.integers(1, 1200),
        loras=loras,
        controlnet_bytes=st.sampled_from([0, 1, 3_536_000_000]),
    ),
    st.builds(
        RunRequest,
        family=st.sampled_from(["qwen-image-edit-2509", "qwen-image-edit-2511"]),
        width=sides,
        height=sides,
        references=st.integers(0, 3),
    ),
    st.builds(
        RunRequest,
        family=st.just("qwen-image-layered"),
        width=st.just(640),
        height=sides,
        layers=st.integers(0, 6),
    ),
)
settled = st.builds(
    Setting,
    precision=st.sampled_from(MULTIPLIED),
    modulation=st.sampled_from(["on card", "off card"]),
    text_encoder=st.sampled_from(MULTIPLIED),
    text_encoder_place=st.sampled_from(TEXT_PLACES),
)


# ----------------------------------------------------------------------- what was measured, counted


def rows_of(name):
    found = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    for row in found["rows"]:
        precision = row["name"].removeprefix("ours ")
        if precision in MULTIPLIED and "extra_gib" in row:
            yield pytest.param(found["conditions"], row, id=f"{name}, {row['name']} {row['size']}")


FORWARD = [
    *rows_of("forward-h200-launches.json"),
    *rows_of("forward-h200-edit-launches.json"),
]


# Of the rows of one process.
FIRST_WITH_GRAPHS = "ours fp8"


@pytest.mark.parametrize(("conditions", "row"), FORWARD)
def test_the_count_is_what_an_h200_allocated(conditions, row):
    width, height = map(int, row["size"].split("x"))
    references = conditions["references"]
    # The benchmark's tokens are those of the whole prompt.
    family = "qwen-image-edit-2511" if references else "qwen-image"
    request = RunRequest(
        family=family,
        width=width,
        height=height,
        references=references,
        text_tokens=max(1, conditions["text_tokens"] - 196 * references),
    )
    setting = Setting(row["name"].removeprefix("ours "))
    counted = step_bytes(request, setting)
    # The benchmark has no sampler, and the table of one size serves the next.
    latents = SAMPLER_LATENTS * 4 * request.transformer.in_channels * request.painted_tokens
    kept = 0 if ", 0 computed in this run" in row["paths"] else table_bytes(request)
    graphs = 0
    if "forward passes replay" in row["paths"]:
        graphs = graph_bytes(request, setting)
        assert graphs
        if row["name"] != FIRST_WITH_GRAPHS:  # cuBLAS keeps its workspaces
            graphs -= GRAPH_WORKSPACES
    first = counted.first
    if setting.precision in QUANTIZED:
        # When this was measured, the first step looked for NaN in all tokens at once: in place of
        # attention's result, 2.5 of the image's stream.
        tokens = request.step_tokens
        first += int((2.5 * tokens.image_rows - tokens.rows) * 2 * request.transformer.dim)
    for found, count in (
        ("extra_gib", counted.later + graphs),
        ("warmup_extra_gib", first),
    ):
        assert (count + kept - latents) / GIB == pytest.approx(row[found], rel=0.04)


def server_records():
    found = json.loads((RESULTS / "memory-h200.json").read_text(encoding="utf-8"))
    return [
        record
        for record in found["records"]
        if record["mode"] == "legacy" and record["case"] == "ours-bf16"
    ]


def test_the_phases_are_what_a_server_allocated():
    """4 steps in ComfyUI's server, prompt to image, with all of its tensors; the 1024x1024 images
    come after those of 1328x1328, whose table stays.
    """
    setting = Setting(modulation="off card")
    for record in server_records():
        side = record["size"]
        request = RunRequest(width=side, height=side, steps=4, text_tokens=104)
        found = phases(request, setting, CARD)
        for name, measured in (("sampling", "sample"), ("decode", "decode")):
            phase = found[name]
            count = phase.peak_bytes - phase.workspace + sum(phase.resident.values())
            if record["image"] == "first" and side == 1328 and name == "sampling":
                count -= phase.resident["VAE"]  # which comes to the card with the first image
            if name == "decode":  # which ComfyUI's own layers did when this was measured
                sides = side // request.vae.pixels, side // request.vae.pixels
                own = plan_decode(request.vae, *sides, budget=None, image_on_card=False)
                count += own.peak_bytes - phase.activations
            allocated = record["phases"][measured]["max_allocated_gib"]
            assert count / GIB == pytest.approx(allocated, abs=0.15), (name, record["image"])


def test_the_text_encoder_is_what_an_h200_held():
    assert text_encoder_bytes(RunRequest(), "bf16") / GIB == pytest.approx(14.43, abs=0.005)
    first = server_records()[0]["phases"]["encode"]["max_allocated_gib"]
    held = text_encoder_bytes(RunRequest(), "bf16") + encoding_bytes(RunRequest(text_tokens=40))
    assert held / GIB == pytest.approx(first, abs=0.06)


# ------------------------------------------------------------------------------------- the phases


@hypothesis_settings(max_examples=60, deadline=None)
@given(request=requests, setting=settled, card=st.sampled_from([None, 139 * GIB]))
def test_parts_add_up_and_none_is_negative(request, setting, card):
    found = phases(request, setting, card)
    assert tuple(found) == PHASES
    for name, phase in found.items():
        assert phase.name == name
        parts = [phase.weights, phase.activations, phase.workspace, phase.context]
        parts += phase.resident.values()
        assert all(isinstance(part, int) and part >= 0 for part in parts)
        assert all(phase.resident.values())
        assert phase.peak_bytes == sum(parts[:3])
        assert phase.card_bytes == sum(parts)
    held = transformer_bytes(request, setting)
    waits = held.modulation if setting.off_card else 0
    assert found["sampling"].weights == held.total - waits
    assert ("text encoder" in found["sampling"].resident) == (
        setting.text_encoder_place == "on card"
    )
    assert (
        found["sampling"].resident["modulation table"] == table_bytes(request) <= MOST_TABLE_BYTES
    )


@hypothesis_settings(max_examples=80, deadline=None)
@given(request=requests, setting=settled, data=st.data())
def test_more_never_takes_less(request, setting, data):
    name = data.draw(st.sampled_from(["width", "height", "batch", "steps", "text_tokens", "rank"]))
    if name == "rank":
        more = replace(request, loras=replace(request.loras, rank=request.loras.rank + 8))
    else:
        more = replace(
            request, **{name: getattr(request, name) + (16 if name in ("width", "height") else 1)}
        )
    assert step_bytes(more, setting).first >= step_bytes(request, setting).first
    assert step_bytes(more, setting).later >= step_bytes(request, setting).later
    assert lora_bytes(more, setting) >= lora_bytes(request, setting)
    assert encoding_bytes(more) >= encoding_bytes(request)
    assert sum(host_memory(more, setting).values()) >= sum(host_memory(request, setting).values())
    less, most = phases(request, setting), phases(more, setting)
    for phase in PHASES:
        assert most[phase].activations >= less[phase].activations
        assert most[phase].weights >= less[phase].weights


@pytest.mark.parametrize("references", [0, 1, 2])
def test_a_reference_more_takes_more(references):
    less = RunRequest(family="qwen-image-edit-2511", references=references)
    more = replace(less, references=references + 1)
    for setting in (Setting(), Setting("int8"), Setting("fp8", weight_only=True)):
        assert step_bytes(more, setting).first > step_bytes(less, setting).first
        assert step_bytes(more, setting).later > step_bytes(less, setting).later
    assert phases(more, Setting())["text"].activations >= encoding_bytes(less)


def test_two_prompts_in_one_pass_take_twice_the_tokens():
    apart = RunRequest(batch=2).step_tokens
    assert RunRequest(batch=2, cfg="one pass").step_tokens == apart._replace(items=4)
    assert step_bytes(RunRequest(cfg="off"), Setting()) == step_bytes(RunRequest(), Setting())


def test_edit_2511_has_two_rows_of_modulation_for_the_image():
    table = {
        (family, references): table_bytes(
            RunRequest(family=family, references=references, steps=20, batch=1)
        )
        for family in ("qwen-image-edit-2509", "qwen-image-edit-2511")
        for references in (0, 1)
    }
    assert table["qwen-image-edit-2509", 1] == 20 * 60 * 2 * 6 * 3072 * 2
    assert table["qwen-image-edit-2511", 1] * 2 == table["qwen-image-edit-2509", 1] * 3
    assert table["qwen-image-edit-2511", 0] == table["qwen-image-edit-2509", 0]
    assert (
        table_bytes(RunRequest(steps=1000))
        <= MOST_TABLE_BYTES
        < table_bytes(RunRequest(steps=120)) * 1.02
    )


@given(request=requests, setting=settled)
def test_graphs_stay_with_the_transformer_where_passes_replay_them(request, setting):
    found, most = phases(request, setting), graph_bytes(request, setting)
    assert (most > 0) == replays_graph(request, setting)
    kept = most + buffer_bytes(request, setting) if most else 0
    for name, phase in found.items():
        alone = name == "text" and setting.text_encoder_place in ("drop after encoding", "stream")
        expected = 0 if name == "load" or alone else kept
        assert phase.resident.get(GRAPHS, 0) == expected
    wider = replace(request, text_tokens=request.text_tokens + 100)
    if replays_graph(wider, setting):
        assert graph_bytes(wider, setting) >= most


def test_graphs_of_one_image_take_what_a_run_may_take_for_them():
    """At 1024x1024 no more than 0.15 GiB: two matrices of rows, workspaces and a timestep."""
    found = graph_bytes(RunRequest(width=1024, height=1024), Setting("int8"))
    assert found == 2 * (4096 + 200) * 3072 * 2 + 64 * MIB + 60 * 2 * 6 * 3072 * 2
    assert found < 0.15 * GIB


def test_loras_count_beside_the_weights_and_not_in_them():
    merged, beside = (RunRequest(loras=Loras(2, 32, mode)) for mode in ("merge", "bypass"))
    assert "LoRAs" not in phases(merged, Setting())["sampling"].resident
    held = phases(beside, Setting())["sampling"].resident["LoRAs"]
    # 60 blocks: 8 layers of 3072 x 3072 and 4 with one side of 12288.
    assert held == 2 * 32 * 2 * 60 * (8 * 6144 + 4 * 15360)
    assert step_bytes(merged, Setting()) == step_bytes(RunRequest(), Setting())
    assert step_bytes(beside, Setting()).later > step_bytes(merged, Setting()).later


@pytest.mark.parametrize("side", [128, 512, 1328])
@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_loras_beside_weights_that_are_expanded_never_take_less(side, precision):
    plain, beside = (
        RunRequest(width=side, height=side, loras=Loras(n, 32, "bypass")) for n in (0, 1)
    )
    expanded = Setting(precision, weight_only=True)
    for less, more in (
        ((plain, expanded), (beside, expanded)),
        ((beside, Setting()), (beside, expanded)),
    ):
        assert step_bytes(*more).later >= step_bytes(*less).later
        assert step_bytes(*more).first >= step_bytes(*less).first


def test_true_sizes_stand_above_published_ones():
    parts = Parts(
        transformer_bytes=30 * GIB,
        modulation_bytes=10 * GIB,
        text_encoder_bytes=5 * GIB,
        vae_bytes=GIB,
    )
    found = phases(RunRequest(parts=parts), Setting(modulation="off card"))
    assert found["sampling"].weights == 20 * GIB
    assert found["text"].weights == 5 * GIB
    assert found["decode"].weights == GIB
    assert found["sampling"].resident["text encoder"] == 5 * GIB
    smaller = Parts(transformer_bytes=5 * GIB)  # less than the published modulation
    assert (
        phases(RunRequest(parts=smaller), Setting(modulation="off card"))["sampling"].weights == 0
    )


def test_the_places_of_the_text_encoder():
    place = {name: phases(RunRequest(), Setting(text_encoder_place=name)) for name in TEXT_PLACES}
    whole = text_encoder_bytes(RunRequest(), "bf16")
    assert place["on card"]["text"].weights == place["drop after encoding"]["text"].weights == whole
    assert "transformer" in place["on card"]["text"].resident
    assert "transformer" not in place["drop after encoding"]["text"].resident
    assert place["cpu"]["text"].peak_bytes == 0
    for name in ("drop after encoding", "cpu"):
        assert "text encoder" not in place[name]["decode"].resident


def test_references_are_encoded_by_the_vae_wherever_the_prompt_is():
    request = RunRequest(family="qwen-image-edit-2511", references=1)
    on_processor = phases(request, Setting(text_encoder_place="cpu"))["text"]
    assert on_processor.weights == 0
    assert on_processor.activations / GIB == pytest.approx(0.95, abs=0.02)


# ----------------------------------------------------------------------------------- the decoder


def test_the_decoder_plans_within_what_is_left():
    setting = Setting(modulation="off card")
    roomy = phases(RunRequest(), setting, CARD)["decode"]
    assert roomy.card_bytes <= CARD
    tight = phases(RunRequest(), setting, CARD - 5 * GIB // 2)["decode"]
    assert tight.card_bytes <= CARD - 5 * GIB // 2
    assert tight.activations < roomy.activations
    tiled = phases(RunRequest(tiles=4), setting, CARD)["decode"]
    assert tiled.activations < roomy.activations


def test_the_decoder_has_others_moved_where_nothing_exact_fits():
    setting = Setting()  # more than the card has
    found = phases(RunRequest(), setting, CARD)
    decode = found["decode"]
    assert decode.card_bytes <= CARD
    assert sum(decode.resident.values()) < sum(found["sampling"].resident.values()) + (
        found["sampling"].weights
    )


def test_layers_are_decoded_as_images():
    alone = RunRequest(family="qwen-image-layered", width=640, height=640, layers=0)
    one = phases(alone, Setting())["decode"]
    request = RunRequest(family="qwen-image-layered", width=640, height=640, layers=3)
    four = phases(request, Setting())["decode"]
    assert four.activations == pytest.approx(4 * one.activations, rel=0.01)
    assert four.weights == vae_bytes(request)


# ------------------------------------------------------------------------------------- host memory


# From a file that is quantized already.
WRITTEN = RunRequest(parts=Parts(transformer_bytes=25 * GIB, modulation_bytes=12 * GIB))


def test_host_memory_is_named_by_what_it_is_for():
    plain = host_memory(RunRequest(), Setting())
    assert set(plain) == {"ComfyUI, torch and CUDA", "images"}
    quantized = host_memory(RunRequest(), Setting("int8", "off card", text_encoder_place="cpu"))
    assert quantized["transformer, quantized on load"] / GIB == pytest.approx(12.7, abs=0.1)
    assert not any("modulation" in name for name in quantized)  # in the mapped file
    assert quantized["pinned ring"] == 128 * MIB
    assert quantized["text encoder on the CPU"] == text_encoder_bytes(RunRequest(), "bf16")
    written = host_memory(WRITTEN, Setting("int8"))
    assert not any("quantized" in name for name in written)


@pytest.mark.parametrize("place", TEXT_PLACES)
@pytest.mark.parametrize("total", [8, 16, 24, 30])
def test_a_text_encoder_keeps_its_place_where_weights_are_moved(total, place):
    setting = Setting(modulation="off card", text_encoder_place=place, resident=False)
    found = phases(RunRequest(), setting, total * GIB)
    usable = total * GIB - KEPT_FREE_BYTES
    assert all(phase.card_bytes <= usable for phase in found.values())
    there = found["sampling"].resident.get("text encoder", 0)
    whole = text_encoder_bytes(RunRequest(), "bf16")
    assert there == 0 if place != "on card" else there <= whole
    if place == "on card":
        assert (there == whole) == (total > 16)
        assert found["sampling"].card_bytes == usable
    if total == 8 and place != "cpu":
        assert found["text"].weights < whole


def test_what_is_moved_in_each_pass_waits_in_host_memory():
    setting = Setting(resident=False, text_encoder_place="drop after encoding")
    parts = host_memory(RunRequest(), setting, moved_bytes=11 * GIB)
    assert parts["transformer that is moved in each pass"] == 11 * GIB
    # A copy that was quantized on load is there already.
    setting = replace(setting, precision="int8", modulation="off card")
    name = "transformer that is moved in each pass"
    assert name not in host_memory(RunRequest(), setting, moved_bytes=6 * GIB)
    written = host_memory(WRITTEN, setting, moved_bytes=6 * GIB)
    assert written[name] == 6 * GIB


def test_what_is_at_hand_is_not_quantized_again():
    parts = Parts(transformer_bytes=27 * GIB, text_encoder_bytes=9 * GIB)
    found = host_memory(RunRequest(parts=parts), Setting("int8", text_encoder="int8"))
    assert not any("quantized" in name for name in found)
    made = Setting(text_encoder="int8")
    assert "text encoder, quantized on load" in host_memory(RunRequest(), made)
    # A file that holds something else is quantized, too.
    parts = Parts(text_encoder_bytes=9 * GIB, file_bytes=(("text encoder", 16 * GIB),))
    assert "text encoder, quantized on load" in host_memory(RunRequest(parts=parts), made)


# ----------------------------------------------------------------------------- settings, constants


def test_the_fitted_workspace_and_context_are_taken(monkeypatch):
    fitted = Constants(0.5, 0.5, 0.5, 0.5, 0.5, 0.5, workspace=123.0, context=456.0)
    monkeypatch.setattr(phases_module, "constants", lambda: fitted)
    sampling = phases(RunRequest(), Setting())["sampling"]
    assert (sampling.workspace, sampling.context) == (123, 456)


def test_memory_is_planned_without_the_measurements(monkeypatch):
    def damaged():
        raise UnavailableError("measured.json cannot be read: install the package again.")

    monkeypatch.setattr(phases_module, "constants", damaged)
    sampling = phases(RunRequest(), Setting())["sampling"]
    assert sampling.workspace > 0 and sampling.context > 0
