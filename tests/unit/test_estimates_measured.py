"""What planning counts and predicts, against what cards measured and what shapes and code tell."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_l40s.charts.text import estimate_json
from qwen_l40s.families.parts import QWEN3_VL, QWEN25_VL
from qwen_l40s.families.protocol import StepTokens
from qwen_l40s.families.qwen_image import FULL_SIZE
from qwen_l40s.machine.store import known_cards
from qwen_l40s.planning import files
from qwen_l40s.planning.bytes import (
    GRAPH_WORKSPACES,
    PATCHES_PER_TOKEN,
    SAMPLER_LATENTS,
    embedding_rows,
    encoding_bytes,
    graph_bytes,
    lora_bytes,
    step_bytes,
    table_bytes,
    text_encoder_bytes,
    weight_bytes,
)
from qwen_l40s.planning.estimate import estimate
from qwen_l40s.planning.files import BRINGING, QUANTIZING, Load, host_memory, load_seconds
from qwen_l40s.planning.phases import KEPT_FREE_BYTES, phases, vae_bytes
from qwen_l40s.planning.rates import Launches, Rates, constants, measured, rates_by, rates_of
from qwen_l40s.planning.request import TEXT_PLACES, Loras, Parts, RunRequest, Setting
from qwen_l40s.planning.times import (
    PROCESSOR_FLOPS,
    Pass,
    encode_text_seconds,
    forward_seconds,
    forward_times,
    pass_times,
    product_seconds,
    prompt_seconds,
    sampling_seconds,
    table_seconds,
)
from qwen_l40s.planning.vae import plan_decode
from qwen_l40s.planning.vae_work import vae_seconds
from qwen_l40s.spec.formats import GIB, MIB, MULTIPLIED, QUANTIZED
from qwen_l40s.spec.sizes import MOST_TABLE_BYTES
from qwen_l40s.spec.transformer import OFF_CARD, ON_CARD
from qwen_l40s.spec.vae import VaeShape

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
CARDS = known_cards()
L40S = CARDS["L40S"]
USUAL = RunRequest()
EDIT = "qwen-image-edit-2511"
# Of the order of an H200's.
H200 = Rates(
    gemm={"bf16": 600e12, "fp8": 900e12, "int8": 850e12},
    attention=600e12,
    bandwidth=3.4e12,
    convolution=190e12,
    encoder=40e12,
    pcie=55e9,
)
# Bytes of a bf16 transformer, of its layers that are quantized, and of it with these in 8 bits.
WHOLE, LAYERS, EIGHT_BITS = 40_900_000_000, 27_200_000_000, 27_300_000_000
# Of the text encoder on the card, and of its file and the VAE's.
TEXT_ENCODER, OTHERS = 15_500_000_000, 16_800_000_000


def read(name):
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


# --- memory


def rows_of(name):
    found = read(name)
    for row in found["rows"]:
        precision = row["name"].removeprefix("ours ")
        if precision in MULTIPLIED and "extra_gib" in row:
            yield pytest.param(found["conditions"], row, id=f"{name}, {row['name']} {row['size']}")


@pytest.mark.parametrize(
    ("conditions", "row"),
    [*rows_of("forward-h200-launches.json"), *rows_of("forward-h200-edit-launches.json")],
)
def test_a_forward_pass_takes_what_an_h200_allocated(conditions, row):
    width, height = map(int, row["size"].split("x"))
    references = conditions["references"]
    # The benchmark's tokens are those of the whole prompt.
    request = RunRequest(
        family=EDIT if references else "qwen-image",
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
        if row["name"] != "ours fp8":  # cuBLAS keeps the workspaces of the first with graphs
            graphs -= GRAPH_WORKSPACES
    first = counted.first
    if setting.precision in QUANTIZED:
        # When this was measured, the first step looked for NaN in all tokens at once: in place of
        # attention's result, 2.5 of the image's stream.
        tokens = request.step_tokens
        first += int((2.5 * tokens.image_rows - tokens.rows) * 2 * request.transformer.dim)
    for found, count in (("extra_gib", counted.later + graphs), ("warmup_extra_gib", first)):
        assert (count + kept - latents) / GIB == pytest.approx(row[found], rel=0.04)


def test_the_phases_are_what_a_server_allocated():
    """4 steps in ComfyUI's server, prompt to image, with all of its tensors; the 1024x1024 images
    come after those of 1328x1328, whose table stays.
    """
    records = read("memory-h200.json")["records"]
    records = [it for it in records if it["mode"] == "legacy" and it["case"] == "ours-bf16"]
    for record in records:
        side = record["size"]
        request = RunRequest(width=side, height=side, steps=4, text_tokens=104)
        found = phases(request, Setting(modulation=OFF_CARD), int(44.4 * GIB))
        for name, as_measured in (("sampling", "sample"), ("decode", "decode")):
            phase = found[name]
            count = phase.peak_bytes - phase.workspace + sum(phase.resident.values())
            if record["image"] == "first" and side == 1328 and name == "sampling":
                count -= phase.resident["VAE"]  # which comes to the card with the first image
            if name == "decode":  # which ComfyUI's own layers did when this was measured
                sides = side // request.vae.pixels, side // request.vae.pixels
                own = plan_decode(request.vae, *sides, budget=None, image_on_card=False)
                count += own.peak_bytes - phase.activations
            allocated = record["phases"][as_measured]["max_allocated_gib"]
            assert count / GIB == pytest.approx(allocated, abs=0.15), (name, record["image"])
    assert text_encoder_bytes(USUAL, "bf16") / GIB == pytest.approx(14.43, abs=0.005)
    held = text_encoder_bytes(USUAL, "bf16") + encoding_bytes(RunRequest(text_tokens=40))
    first = records[0]["phases"]["encode"]["max_allocated_gib"]
    assert held / GIB == pytest.approx(first, abs=0.06)
    references = phases(RunRequest(EDIT, references=1), Setting(text_encoder_place="cpu"))["text"]
    assert references.weights == 0
    assert references.activations / GIB == pytest.approx(0.95, abs=0.02)


def test_what_shapes_tell_to_the_byte():
    # 60 blocks: 8 layers of 3072 x 3072 and 4 with one side of 12288; two streams of six rows.
    beside = RunRequest(loras=Loras(2, 32, "bypass"))
    assert lora_bytes(beside, Setting()) == 2 * 32 * 2 * 60 * (8 * 6144 + 4 * 15360)
    assert lora_bytes(replace(beside, loras=Loras(1, 4)), Setting("int8")) == (
        lora_bytes(beside, Setting()) // 8  # ranks are rounded up to 8
    )
    row = 60 * 6 * 3072 * 2
    for family, references, rows in (
        ("qwen-image-edit-2509", 1, 2),
        (EDIT, 0, 2),
        (EDIT, 1, 3),
    ):
        request = RunRequest(family, references=references)
        assert sum(embedding_rows(request)) == rows and table_bytes(request) == 20 * rows * row
    most = table_bytes(RunRequest(steps=1000))
    assert most <= MOST_TABLE_BYTES < table_bytes(RunRequest(steps=120)) * 1.02
    # At 1024x1024: two matrices of rows, workspaces and a timestep.
    small = RunRequest(width=1024, height=1024)
    rows = (4096 + 200) * 3072 * 2
    assert graph_bytes(small, Setting("int8")) == 2 * rows + 64 * MIB + 2 * row < 0.15 * GIB
    assert vae_bytes(USUAL) == phases(USUAL, Setting())["decode"].weights
    apart = RunRequest(batch=2).step_tokens
    assert RunRequest(batch=2, cfg="one pass").step_tokens == apart._replace(items=4)


@pytest.mark.parametrize("side", [128, 512, 1328])
@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_what_lies_beside_the_weights_adds_to_a_step(side, precision):
    plain, beside = (
        RunRequest(width=side, height=side, loras=Loras(n, 32, "bypass")) for n in (0, 1)
    )
    merged = replace(beside, loras=Loras(2, 32, "merge"))
    expanded = Setting(precision, weight_only=True)
    assert step_bytes(merged, Setting()) == step_bytes(plain, Setting())
    for less, more in (
        ((plain, expanded), (beside, expanded)),
        ((beside, Setting()), (beside, expanded)),
        ((plain, Setting()), (beside, Setting())),
        ((plain, Setting()), (replace(plain, attention="fast"), Setting())),
    ):
        assert step_bytes(*more).later >= step_bytes(*less).later
        assert step_bytes(*more).first >= step_bytes(*less).first
    held = phases(beside, Setting())["sampling"].resident
    assert held["LoRAs"] == lora_bytes(beside, Setting())
    assert "LoRAs" not in phases(merged, Setting())["sampling"].resident


@pytest.mark.parametrize("place", TEXT_PLACES)
@pytest.mark.parametrize("total", [8, 16, 24, 30, None])
def test_a_text_encoder_keeps_its_place(total, place):
    """Where nothing is short, and where weights are moved."""
    setting = Setting(modulation=OFF_CARD, text_encoder_place=place, resident=total is None)
    found = phases(USUAL, setting, total and total * GIB)
    whole = text_encoder_bytes(USUAL, "bf16")
    there = found["sampling"].resident.get("text encoder", 0)
    assert there <= whole * (place == ON_CARD)
    waits = "transformer" in found["text"].resident
    assert waits == (place == "cpu" or (place == ON_CARD and total not in (8, 16)))
    if total is None:
        weights = {"cpu": 0, "stream": 2 * -(-whole // 28)}.get(place, whole)
        assert found["text"].weights == weights and there == whole * (place == ON_CARD)
        return
    usable = total * GIB - KEPT_FREE_BYTES
    assert all(phase.card_bytes <= usable for phase in found.values())
    if place == ON_CARD:
        assert (there == whole) == (total > 16)
        assert found["sampling"].card_bytes == usable
    if total == 8 and place != "cpu":
        assert found["text"].weights < whole


def test_layers_are_decoded_as_images_and_tiles_take_less():
    side = {"family": "qwen-image-layered", "width": 640, "height": 640}
    alone, three = (phases(RunRequest(layers=n, **side), Setting())["decode"] for n in (0, 3))
    assert three.activations == pytest.approx(4 * alone.activations, rel=0.01)
    setting, card = Setting(modulation=OFF_CARD), int(44.4 * GIB)
    roomy, tiled = (phases(RunRequest(tiles=n), setting, card)["decode"] for n in (0, 4))
    tight = phases(USUAL, setting, card - 5 * GIB // 2)["decode"]
    assert max(tiled.activations, tight.activations) < roomy.activations
    # Where nothing fits, others leave for the decoder.
    found = phases(USUAL, Setting(), card)
    sampling = found["sampling"]
    left = sum(sampling.resident.values()) + sampling.weights
    assert found["decode"].card_bytes <= card and sum(found["decode"].resident.values()) < left


PLAIN = {"ComfyUI, torch and CUDA", "images"}
MADE = {"transformer, quantized on load", "staging while it is quantized"}
MOVED = "transformer that is moved in each pass"
READY = Parts(transformer_bytes=25 * GIB, modulation_bytes=12 * GIB)


@pytest.mark.parametrize(
    ("parts", "setting", "moved", "named"),
    [
        (Parts(), Setting(), 0, set()),
        (Parts(), Setting("int8"), 0, MADE),
        (Parts(), Setting("int8", OFF_CARD), 0, {*MADE, "pinned ring"}),
        (Parts(), Setting(text_encoder_place="cpu"), 0, {"text encoder on the CPU"}),
        (Parts(), Setting(text_encoder="int8"), 0, {"text encoder, quantized on load"}),
        (READY, Setting("int8"), 0, set()),
        (READY, Setting("int8"), 6 * GIB, {MOVED}),
        (Parts(), Setting(), 11 * GIB, {MOVED}),
        (Parts(), Setting("int8"), 6 * GIB, MADE),  # the copy that was made is there already
        (Parts(text_encoder_bytes=9 * GIB), Setting(text_encoder="int8"), 0, set()),
        (
            Parts(text_encoder_bytes=9 * GIB, file_bytes=(("text encoder", 16 * GIB),)),
            Setting(text_encoder="int8"),
            0,
            {"text encoder, quantized on load"},
        ),
        (Parts(gguf=True), Setting(), 0, {"transformer, expanded from GGUF"}),
        (Parts(converted=GIB), Setting(), 0, {"transformer, converted on load"}),
    ],
)
def test_system_ram_is_named_by_what_it_is_for(parts, setting, moved, named):
    found = host_memory(RunRequest(parts=parts), setting, moved_bytes=moved)
    assert {*found} == PLAIN | named
    sizes = weight_bytes(FULL_SIZE, "int8")
    expected = {
        "transformer, quantized on load": sizes.gemm + sizes.scales,
        "pinned ring": 128 * MIB,
        "text encoder on the CPU": text_encoder_bytes(USUAL, "bf16"),
        MOVED: moved,
    }
    assert all(found[name] == count for name, count in expected.items() if name in found)


# --- times of a pass


def test_arithmetic_is_what_a_forward_pass_is_counted_to_have():
    rates = replace(H200, bandwidth=1e30, gemm={"bf16": 1e12}, attention=1e12)
    work = Pass(FULL_SIZE, StepTokens(200, 4096))
    dim = FULL_SIZE.dim  # a token meets 4 products of D x D in attention and 8 in the MLP
    flops = 60 * (2 * 12 * work.tokens.joint * dim**2 + 4 * work.tokens.joint**2 * dim)
    found = pass_times(work, "bf16", rates).card * 1e12
    assert flops < found < 1.001 * flops  # the layers around the blocks
    large = product_seconds(4096, 12288, 3072, "bf16", H200)
    assert large == pytest.approx(2 * 4096 * 12288 * 3072 / 600e12)
    thin = product_seconds(1, 12288, 3072, "bf16", H200)
    assert thin == pytest.approx(2 * 12288 * 3072 / H200.bandwidth, rel=0.01)
    assert product_seconds(7, 8, 9, "fp8", H200, 3) == 3 * product_seconds(7, 8, 9, "fp8", H200)


@pytest.mark.parametrize("precision", MULTIPLIED)
def test_nag_adds_less_than_a_second_pass_and_to_the_positive_prompt_alone(precision):
    for family in ("qwen-image", "qwen-image-2.1"):
        off = RunRequest(family=family, width=1024, height=1024, cfg="off", steps=8)
        both = replace(off, cfg="two passes")
        times = {}
        for tokens in (0, 60, 1000):
            asked = replace(off, nag_tokens=tokens)
            times[tokens] = forward_seconds(asked, precision, H200)
            added, in_both = (
                sampling_seconds(replace(it, nag_tokens=tokens), precision, H200)
                - sampling_seconds(it, precision, H200)
                for it in (off, both)
            )
            assert added == pytest.approx(in_both)
            assert tokens == 0 or added > 8 * (times[tokens] - times[0]) * 0.999
        assert times[0] < times[60] < 1.3 * times[0] and times[60] < times[1000]
        eight_bits = (
            forward_seconds(replace(off, nag_tokens=it), precision, H200, attention="int8")
            for it in (60, 0)
        )
        once = times[60] - times[0]
        assert next(eight_bits) - next(eight_bits) > once  # attention is whole for each prompt
        text = (encode_text_seconds(replace(off, nag_tokens=it), H200) for it in (60, 0))
        assert next(text) > 1.4 * next(text)


@given(
    precision=st.sampled_from(MULTIPLIED),
    graph=st.booleans(),
    moved=st.integers(0, 10**10),
    block=st.floats(1e-5, 1e-2),
    others=st.tuples(st.floats(0, 0.1), st.floats(0, 0.1)),
)
def test_a_pass_takes_as_long_as_the_longer_of_card_and_processor(
    precision, graph, moved, block, others
):
    launches = Launches(dict.fromkeys(MULTIPLIED, block), *others)
    rates = replace(H200, launches=launches)
    how = {"moved_bytes": moved, "graph": graph}
    found = forward_times(RunRequest(width=256), precision, rates, **how)
    replay, host = others
    assert found.processor == pytest.approx(host + (replay if graph else 60 * block))
    assert found.card == forward_times(RunRequest(width=256), precision, H200, **how).card
    assert forward_seconds(RunRequest(width=256), precision, rates, **how) == max(found)
    assert getattr(found, found.bound) == found.seconds


def test_what_changes_the_time_of_a_pass():
    plain = forward_seconds(USUAL, "bf16", H200)
    merged, one, two = (
        forward_seconds(RunRequest(loras=Loras(count, 32, mode)), "bf16", H200)
        for count, mode in ((2, "merge"), (1, "bypass"), (2, "bypass"))
    )
    assert merged == plain and 0 < two - one < one - merged  # what is read once serves all
    ampere = replace(H200, gemm={"bf16": 600e12, "int8": 850e12})
    assert forward_seconds(USUAL, "int8", ampere) < plain
    # Weights are read once and written twice more, 13.6e9 of them.
    assert forward_seconds(USUAL, "fp8", ampere) > plain + 13.5e9 * 7 / ampere.bandwidth
    # 0.2 s of the link, which a host that can pin memory hides as long as the card computes.
    for hides, moved, added in ((0, 11, 0.2), (1, 11, 0.0), (1, 110, 2.0)):
        rates = replace(H200, hides=hides)
        more = forward_seconds(USUAL, "bf16", rates, moved_bytes=moved * 10**9)
        assert more - plain == pytest.approx(max(0, added - (plain if moved == 110 else 0)))


@pytest.mark.parametrize(
    ("changed", "bound"),
    [
        ({}, "card"),
        ({"width": 1328, "height": 1328, "steps": 4}, "card"),
        ({"steps": 4}, "processor"),
        ({"loras": Loras(1, 4, "bypass")}, "card"),  # a graph replays them too
    ],
)
def test_launches_bound_a_small_step_until_it_replays_a_graph(changed, bound):
    asked = replace(RunRequest(precision="int8", width=256, height=256), **changed)
    found = estimate(asked, CARDS["H200"])
    request, rates = found.request, rates_of(CARDS["H200"])[0]
    assert estimate_json(found)["step_bound_by"] == found.bound == bound
    launched, replayed = (
        2 * forward_seconds(request, "int8", rates, graph=it) for it in (False, True)
    )
    # Two, and as many as repay a capture.
    first = min(8, request.steps) if bound == "processor" or request.steps > 8 else request.steps
    steps = first * launched + (request.steps - first) * replayed
    assert found.step_seconds.low == pytest.approx(steps / request.steps)


def test_a_table_takes_the_link_where_its_weights_are_off_the_card():
    off, on = (table_seconds(USUAL, H200, place) for place in (OFF_CARD, ON_CARD))
    assert off == pytest.approx(0.26, rel=0.05)  # an H200, from the page cache
    assert on == pytest.approx(20 * 0.004, rel=0.05)  # the card's memory, once a timestep
    request = RunRequest(parts=Parts(modulation_bytes=55 * 10**9))
    assert table_seconds(request, H200, OFF_CARD) == pytest.approx(1.05)


def test_prompts_are_encoded_each_by_itself():
    one, two = (encode_text_seconds(RunRequest(cfg=cfg), H200) for cfg in ("off", "two passes"))
    assert two == pytest.approx(2 * one)
    assert one > 2 * 6.53e9 * (200 + 64) / H200.encoder
    edit = RunRequest(family="qwen-image-edit", references=1, cfg="off")
    assert encode_text_seconds(edit, H200) > 5 * one
    assert encode_text_seconds(USUAL, H200, "cpu") > encode_text_seconds(USUAL, H200)
    assert prompt_seconds(100, H200) < prompt_seconds(200, H200)
    seen, unseen = (prompt_seconds(200, H200, "cpu", vision_tokens=it) for it in (196, 0))
    vision = 2 * QWEN25_VL.vision * PATCHES_PER_TOKEN * 196
    words = 2 * QWEN25_VL.layer_parameters * 200
    assert unseen == pytest.approx(words / PROCESSOR_FLOPS)
    assert seen - unseen == pytest.approx(vision / PROCESSOR_FLOPS)
    bf16, fp8 = (prompt_seconds(168, H200, precision=it) for it in ("bf16", "fp8"))
    assert 1.03 < fp8 / bf16 < 1.2  # 1.08 to 1.12 on an H200
    stays, leaves = (
        estimate(RunRequest(text_encoder="bf16", text_encoder_place=place), L40S).phases["text"]
        for place in (ON_CARD, "drop after encoding")
    )
    moved = leaves.seconds.low - stays.seconds.low
    assert moved >= 14 * GIB / L40S.pcie_bytes_per_second


@pytest.mark.parametrize(
    ("references", "first_ms", "further_ms"), [(0, 63, 80), (1, 440, 146), (2, 822, 266)]
)
def test_prompts_take_what_an_h200_measured(references, first_ms, further_ms):
    """Qwen-Image-2.1 with references of 1024x1024; stock took 620 to 665 ms with one of them."""
    rates, _, _ = rates_of(CARDS["H200"])
    asked = RunRequest("qwen-image-2.1", width=1024, height=1024, references=references)
    asked = replace(asked, text_tokens=60, cfg="off")
    ends = [
        [
            encode_text_seconds(replace(asked, cfg=cfg), rates, split=True, end=end)
            for cfg in ("off", "two passes")
        ]
        for end in (0, 1)
    ]
    (low, both_low), (high, both_high) = ends
    assert low <= first_ms / 1e3 <= high
    assert both_low - low <= further_ms / 1e3 <= both_high - high
    if references == 1:
        tokens = 1024 + 60 + QWEN3_VL.template
        stock = prompt_seconds(tokens, rates, encoder=QWEN3_VL, vision_tokens=1024)
        assert 0.6 < stock < 0.68


def test_an_older_card_and_4_bits_encode_in_fp32():
    asked = RunRequest("qwen-image-2.1", "bf16", 1024, 1024, references=1)

    def seconds(card, precision):
        return estimate(replace(asked, text_encoder=precision), card).phases["text"].seconds.low

    older = replace(L40S, capability=(7, 5))
    for precision in ("bf16", "int8"):
        assert seconds(older, precision) > 1.3 * seconds(L40S, precision)
    assert seconds(older, "w4a8") == seconds(L40S, "w4a8") > 1.3 * seconds(L40S, "int8")


# --- the VAE


@pytest.mark.parametrize(("direction", "ms"), [("decode", 37.3), ("encode", 22.6)])
def test_the_vae_takes_what_an_h200_measured(direction, ms):
    """At 1024x1024, on the card alone; the nodes bring 12.6 MB from or to host memory too."""
    seconds = vae_seconds(direction, VaeShape(), (128, 128), 1, H200)
    copied = 4 * 3 * 1024**2 / 5.3e9
    assert (seconds - copied) * 1e3 == pytest.approx(ms, rel=0.1)


@given(
    tiles=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    latent=st.tuples(st.integers(4, 256), st.integers(4, 256)),
)
def test_tiles_cost_their_margins(tiles, latent):
    """Of 1328x1328 in two tiles an H200 took 1.07 times the whole's time, in four 1.15."""
    shape = VaeShape()
    for direction in ("decode", "encode"):
        whole = vae_seconds(direction, shape, latent, 1, H200)
        assert whole > 0
        assert vae_seconds(direction, shape, latent, tiles, H200) >= whole
        assert vae_seconds(direction, shape, latent, (1, 1), H200) == whole
    whole, two, four = (vae_seconds("decode", shape, (166, 166), it, H200) for it in (1, 2, 4))
    assert 1.02 < two / whole < 1.12 and two < four < 1.25 * whole


# --- loads


def named(run):
    return f"{run['what']} of {run['file']}"


@pytest.mark.parametrize("run", measured()["first_prompts"], ids=named)
def test_a_servers_first_image_and_its_parts_are_predicted(run):
    """4 steps at 1328x1328 without CFG, a prompt of 60 words, as main.py of ComfyUI ran them."""
    whole = RunRequest(precision=run["what"], steps=4, cfg="off", text_tokens=64)
    parts = Parts(transformer=FULL_SIZE)  # in bf16
    if run["file"] == run["what"] != "bf16":
        parts = Parts(transformer_bytes=weight_bytes(FULL_SIZE, run["what"]).total)
    first = estimate(replace(whole, parts=parts), CARDS["H200"]).first_image_seconds
    assert first.low < run["seconds"] < first.high
    assert first.middle == pytest.approx(run["seconds"], rel=0.2)
    ready = EIGHT_BITS if run["file"] == "int8" else 0
    made = LAYERS if run["file"] != run["what"] else 0
    loaded = load_seconds(Load(OTHERS if ready else WHOLE + OTHERS, ready, made), H200)
    assert 0.95 * loaded.low <= run["load_seconds"] <= loaded.high
    text = load_seconds(Load(read=0, to_card=TEXT_ENCODER), H200)
    assert text.low <= run["text_seconds"] <= 1.05 * text.high
    bf16, eight_bits = (WHOLE, 0) if run["what"] == "bf16" else (0, EIGHT_BITS)
    brought = load_seconds(Load(read=0, brought=bf16, brought_8_bits=eight_bits), H200)
    assert brought.low <= run["sampling_seconds"] <= brought.high + 1.1  # and the four steps


@pytest.mark.parametrize("load", measured()["loads"], ids=lambda load: load["what"])
def test_measured_loads_are_within_the_range(load, monkeypatch):
    cold = load["source"] == "disk"
    monkeypatch.setattr(files, "DISK", load.get("disk_bytes_per_second"))
    kind = "read" if load["what"] == "bf16" else "read_quantized"
    work = Load(**{"read": 0, kind: load["bytes"]}, to_card=load["bytes"])
    low, high = load_seconds(work, H200, cold=cold)
    assert 0.95 * low <= load["load_seconds"] + load["to_card_seconds"] <= 1.05 * high


@given(count=st.integers(MIB, 2**37))
def test_each_part_of_a_load_takes_its_time(count):
    load = Load(read=count, brought=count, to_card=count)
    memory, disk = (load_seconds(load, H200, cold=cold) for cold in (False, True))
    assert 0 < memory.low <= memory.high < disk.high
    assert memory.low <= disk.low >= count / files.DISK
    made = load_seconds(load._replace(quantized=count), H200)
    assert made.high - memory.high == pytest.approx(QUANTIZING.high * count)
    for way in ("brought", "brought_8_bits", "to_card"):
        slow_link = load_seconds(Load(read=0, **{way: count}), replace(H200, pcie=1e9))
        assert slow_link.low >= count / 1e9
        assert load_seconds(load._replace(**{way: 2 * count}), H200).high > memory.high


def test_an_estimates_load_is_what_is_done():
    def load(known=L40S, **more):
        asked = RunRequest(**{"precision": "int8", "text_encoder": "bf16", **more})
        return estimate(asked, known).phases["load"].seconds

    int8, cpu = load(), load(text_encoder_place="cpu")
    small = load(replace(L40S, memory_bytes=6 * GIB), text_encoder_place="cpu")
    sizes = weight_bytes(FULL_SIZE, "int8")
    parts = Parts(transformer_bytes=sizes.total, modulation_bytes=sizes.modulation)
    ready, off = load(parts=parts), load(modulation=OFF_CARD)
    on = load(CARDS["H200"], precision="bf16", modulation=ON_CARD)
    less = load(CARDS["H200"], precision="bf16", modulation=OFF_CARD)
    brought = BRINGING.times(weight_bytes(FULL_SIZE, "bf16").modulation)
    assert cpu == pytest.approx(load(text_encoder_place="drop after encoding"))
    for end in (0, 1):
        # The text encoder's way to the card, and that of weights which every step moves.
        assert small[end] < cpu[end] < int8[end] and off[end] <= int8[end]
        assert int8[end] - ready[end] > 1.2  # quantizing, and reading a file that is larger
        assert on[end] - less[end] == pytest.approx(brought[end], rel=1e-6)


def test_a_calibration_stands_in_for_the_range():
    whole = rates_of(L40S)[0]
    part = replace(whole, gemm={"bf16": whole.gemm["bf16"]})
    for rates, precision, kind in (
        (whole, "int8", "measured"),
        (whole, "bf16", "measured"),
        (part, "bf16", "measured"),
        (part, "int8", "predicted"),
        (None, "int8", "predicted"),
        (rates_by(constants(), L40S), "int8", "measured"),
    ):
        found = estimate(RunRequest(precision=precision), L40S, calibration=rates)
        assert found.basis.kind == kind
        assert (found.step_seconds.low == found.step_seconds.high) == (kind == "measured")
    slow = estimate(RunRequest(precision="int8"), L40S, calibration=whole).step_seconds
    assert slow.high == estimate(RunRequest(precision="int8"), L40S).step_seconds.high
