"""Times from counted work: properties, and what an H200 measured of single kernels and forwards."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_l40s.families.protocol import StepTokens
from qwen_l40s.families.qwen_image import FULL_SIZE
from qwen_l40s.planning import files
from qwen_l40s.planning.files import QUANTIZING, Load, load_seconds
from qwen_l40s.planning.rates import Launches, Rates, measured
from qwen_l40s.planning.request import Loras, RunRequest
from qwen_l40s.planning.times import (
    Pass,
    block_bytes,
    encode_text_seconds,
    forward_seconds,
    forward_times,
    pass_times,
    product_seconds,
    prompt_seconds,
    sampling_seconds,
    table_seconds,
)
from qwen_l40s.planning.vae_work import (
    WORK,
    decode_seconds,
    encode_image_seconds,
    vae_seconds,
)
from qwen_l40s.spec.formats import MIB
from qwen_l40s.spec.vae import (
    VaeLayer,
    VaeShape,
    after_middle,
    before_middle,
    down_steps,
    up_steps,
)

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
# Of the order of an H200's.
H200 = Rates(
    gemm={"bf16": 600e12, "fp8": 900e12, "int8": 850e12},
    attention=600e12,
    bandwidth=3.4e12,
    convolution=190e12,
    encoder=40e12,
    pcie=55e9,
)
AMPERE = replace(H200, gemm={"bf16": 600e12, "int8": 850e12})
FREE = replace(H200, bandwidth=1e30)
PRECISIONS = ("bf16", "fp8", "int8")
# Bytes of a bf16 transformer, of its layers that are quantized, and of it with these in 8 bits.
WHOLE, LAYERS, EIGHT_BITS = 40_900_000_000, 27_200_000_000, 27_300_000_000
# Of the text encoder on the card, and of its file and the VAE's.
TEXT_ENCODER, OTHERS = 15_500_000_000, 16_800_000_000
sizes = st.integers(1, 128).map(lambda side: 16 * side)


@pytest.fixture
def kernels():
    return json.loads((RESULTS / "kernels-h200.json").read_text())["rows"]


def slower(rates, factor):
    figures = {name: getattr(rates, name) / factor for name in ("attention", "bandwidth")}
    gemm = {name: rate / factor for name, rate in rates.gemm.items()}
    return replace(rates, gemm=gemm, **figures)


# --- the forward pass


@pytest.mark.parametrize("precision", PRECISIONS)
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
        text = (encode_text_seconds(replace(off, nag_tokens=it), H200) for it in (60, 0))
        assert next(text) > 1.4 * next(text)


def test_arithmetic_is_what_a_forward_pass_is_counted_to_have():
    rates = replace(FREE, gemm={"bf16": 1e12}, attention=1e12)
    work = Pass(FULL_SIZE, StepTokens(200, 4096))
    dim = FULL_SIZE.dim  # a token meets 4 products of D x D in attention and 8 in the MLP
    flops = 60 * (2 * 12 * work.tokens.joint * dim**2 + 4 * work.tokens.joint**2 * dim)
    found = pass_times(work, "bf16", rates).card * 1e12
    assert flops < found < 1.001 * flops  # the layers around the blocks


def test_the_kernels_between_products_are_counted_as_their_benchmark_counts_them(kernels):
    """The measured rates count each kernel's bytes by themselves, at 1024x1024."""
    moved = {
        row["task"]: row["gb_s"] * row["ms"] * 1e6
        for row in kernels
        if row["way"] == "ours" and row["size"] == "1024x1024"
    }
    work = Pass(FULL_SIZE, StepTokens(200, 4096))
    bf16 = 2 * moved["residual_norm bf16"] + moved["qk_norm_rope bf16"]
    assert block_bytes(work, "bf16") == pytest.approx(bf16, rel=0.03)
    for precision in ("fp8", "int8"):
        narrow = 2 * moved[f"residual_norm {precision}"] + moved["qk_norm_rope bf16"]
        narrow += moved[f"row_quantize {precision} of 3072"]
        narrow += moved[f"gelu_quantize {precision}"]
        assert block_bytes(work, precision) == pytest.approx(narrow, rel=0.03)


@given(width=sizes, height=sizes, batch=st.integers(1, 3), precision=st.sampled_from(PRECISIONS))
def test_more_work_takes_longer_and_a_slower_card_too(width, height, batch, precision):
    request = RunRequest(width=width, height=height, batch=batch)
    seconds = forward_seconds(request, precision, H200)
    for other in (
        replace(request, width=width + 512),
        replace(request, batch=batch + 1),
        replace(request, text_tokens=800),
        replace(request, family="qwen-image-edit-2511", references=1),
        replace(request, loras=Loras(1, 32, "bypass")),
        replace(request, controlnet_bytes=3 * 10**9),
    ):
        assert forward_seconds(other, precision, H200) >= seconds
    assert seconds <= forward_seconds(request, precision, slower(H200, 2)) <= 2.01 * seconds


def test_a_small_image_waits_for_the_processor_until_its_blocks_replay_a_graph():
    tiny = RunRequest(width=256, height=256)
    assert forward_seconds(tiny, "bf16", FREE) == forward_seconds(tiny, "bf16", H200)
    assert forward_seconds(tiny, "fp8", H200) > forward_seconds(tiny, "bf16", H200)
    eager, replayed = (forward_times(tiny, "int8", H200, graph=graph) for graph in (False, True))
    assert (eager.bound, replayed.bound) == ("processor", "card")
    assert eager.card == replayed.card == replayed.seconds < eager.seconds


@given(
    width=sizes,
    precision=st.sampled_from(PRECISIONS),
    graph=st.booleans(),
    moved=st.integers(0, 10**10),
    block=st.floats(1e-5, 1e-2),
    others=st.tuples(st.floats(0, 0.1), st.floats(0, 0.1)),
)
def test_a_pass_takes_as_long_as_the_longer_of_card_and_processor(
    width, precision, graph, moved, block, others
):
    launches = Launches(dict.fromkeys(PRECISIONS, block), *others)
    rates = replace(H200, launches=launches)
    how = {"moved_bytes": moved, "graph": graph}
    found = forward_times(RunRequest(width=width), precision, rates, **how)
    replay, host = others
    assert found.processor == pytest.approx(host + (replay if graph else 60 * block))
    assert found.card == forward_times(RunRequest(width=width), precision, H200, **how).card
    assert forward_seconds(RunRequest(width=width), precision, rates, **how) == max(found)
    assert getattr(found, found.bound) == found.seconds


def test_eight_bits_are_faster_where_the_card_multiplies_them_and_slower_where_not():
    request = RunRequest()
    bf16 = forward_seconds(request, "bf16", AMPERE)
    assert forward_seconds(request, "int8", AMPERE) < bf16
    expanded = forward_seconds(request, "fp8", AMPERE)
    # Weights are read once and written twice more, 13.6e9 of them.
    assert expanded > bf16 + 13.5e9 * 7 / AMPERE.bandwidth


def test_merged_loras_cost_nothing_and_others_each():
    merged, one, two = (
        forward_seconds(RunRequest(loras=Loras(count, 32, mode)), "bf16", H200)
        for count, mode in ((2, "merge"), (1, "bypass"), (2, "bypass"))
    )
    assert merged == forward_seconds(RunRequest(), "bf16", H200)
    assert 0 < two - one < one - merged  # what is read and written once serves all


def test_weights_that_move_in_each_step_take_the_link():
    """0.2 s, which a host that can pin memory hides as long as the card computes."""
    request = RunRequest()
    for hides, moved, added in ((0, 11, 0.2), (1, 11, 0.0), (1, 110, 2.0)):
        rates = replace(H200, hides=hides)
        alone = forward_seconds(request, "bf16", rates)
        more = forward_seconds(request, "bf16", rates, moved_bytes=moved * 10**9)
        assert more - alone == pytest.approx(max(0, added - (alone if moved == 110 else 0)))


def test_a_step_has_as_many_passes_as_guidance_takes():
    guided, single = RunRequest(steps=10), RunRequest(steps=10, cfg="off")
    assert sampling_seconds(guided, "bf16", H200) == pytest.approx(
        20 * forward_seconds(guided, "bf16", H200)
    )
    assert sampling_seconds(single, "bf16", H200) == pytest.approx(
        10 * forward_seconds(single, "bf16", H200)
    )
    together = replace(guided, cfg="one pass")
    assert Pass.of(together).tokens.items == 2


def test_tokens_are_those_of_image_layers_references_and_prompt():
    edit = RunRequest(family="qwen-image-edit-2511", width=1024, height=512, references=3)
    assert Pass.of(edit) == Pass(FULL_SIZE, StepTokens(200 + 3 * 196, 2048 + 3 * 4096))
    layered = RunRequest(family="qwen-image-layered", width=640, height=640, layers=4)
    assert Pass.of(layered).tokens.image == 5 * 1600


def test_a_product_is_bound_by_its_arithmetic_or_by_its_weights():
    large = product_seconds(4096, 12288, 3072, "bf16", H200)
    assert large == pytest.approx(2 * 4096 * 12288 * 3072 / 600e12)
    thin = product_seconds(1, 12288, 3072, "bf16", H200)
    assert thin == pytest.approx(2 * 12288 * 3072 / H200.bandwidth, rel=0.01)
    assert product_seconds(7, 8, 9, "fp8", H200, 3) == 3 * product_seconds(7, 8, 9, "fp8", H200)


# --- the modulation's table


def test_a_table_takes_the_link_where_its_weights_are_off_the_card():
    off, on = (table_seconds(RunRequest(), H200, place) for place in ("off card", "on card"))
    assert off == pytest.approx(0.26, rel=0.05)  # an H200, from the page cache
    assert on == pytest.approx(20 * 0.004, rel=0.05)  # the card's memory, once a timestep
    request = RunRequest(parts=replace(RunRequest().parts, modulation_bytes=55 * 10**9))
    assert table_seconds(request, H200, "off card") == pytest.approx(1.05)


# --- the VAE


@pytest.mark.parametrize(("direction", "ms"), [("decode", 37.3), ("encode", 22.6)])
def test_the_vae_takes_what_an_h200_measured(direction, ms):
    """At 1024x1024, on the card alone; the nodes bring 12.6 MB from or to host memory too."""
    seconds = vae_seconds(direction, VaeShape(), (128, 128), 1, H200)
    copied = 4 * 3 * 1024**2 / 5.3e9
    assert (seconds - copied) * 1e3 == pytest.approx(ms, rel=0.1)


@given(tiles=st.tuples(st.integers(1, 4), st.integers(1, 4)), sides=st.tuples(sizes, sizes))
def test_tiles_cost_their_margins(tiles, sides):
    shape, latent = VaeShape(), tuple(max(4, side // 8) for side in sides)
    for direction in ("decode", "encode"):
        whole = vae_seconds(direction, shape, latent, 1, H200)
        tiled = vae_seconds(direction, shape, latent, tiles, H200)
        assert tiled >= whole
        assert vae_seconds(direction, shape, latent, (1, 1), H200) == whole


def test_few_tiles_of_a_usual_size_cost_little():
    """Of 1328x1328 in two tiles an H200 took 1.07 times the whole's time, in four 1.15."""
    whole, two, four = (
        vae_seconds("decode", VaeShape(), (166, 166), tiles, H200) for tiles in (1, 2, 4)
    )
    assert 1.02 < two / whole < 1.12
    assert two < four < 1.25 * whole


def test_images_decode_one_after_another_and_references_are_encoded():
    assert decode_seconds(RunRequest(batch=3), 1, H200) == pytest.approx(
        3 * decode_seconds(RunRequest(), 1, H200)
    )
    edit = RunRequest(family="qwen-image-edit-2511", references=2)
    one = vae_seconds("encode", VaeShape(), (128, 128), 1, H200)
    assert encode_image_seconds(edit, H200) == pytest.approx(2 * one)
    assert encode_image_seconds(RunRequest(), H200) == 0


@pytest.mark.parametrize("direction", ["decode", "encode"])
def test_operations_are_counted_as_torch_counts_them(direction):
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    shape, rows, columns = VaeShape(), 16, 12
    width = shape.middle_channels(direction)
    attention = VaeLayer("attention", width, width)
    middle = *before_middle(shape, direction), attention, *after_middle(shape, direction)
    steps = (*middle, *up_steps(shape)) if direction == "decode" else (*down_steps(shape), *middle)
    side = 1 if direction == "decode" else shape.pixels
    sizes = side * rows, side * columns
    with FlopCounterMode(display=False) as counter:
        for step in steps:
            _run(torch, step, torch.empty(1, step.channels_in, *sizes, device="meta"))
            sizes = tuple(step.gives(0, size)[1] for size in sizes)
    pixels, channels = shape.pixels**2 * rows * columns, shape.middle_channels(direction)
    counted = WORK[direction][0] * shape.dim**2 * pixels + 4 * channels * (rows * columns) ** 2
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.005)


def _run(torch, step, x):
    functional = torch.nn.functional
    given, made = step.channels_in, step.channels_out

    def convolve(x, channels, side=3, stride=1):
        weight = torch.empty(channels, x.shape[1], side, side, device="meta")
        return functional.conv2d(x, weight, stride=stride, padding=side // 2)

    if step.kind == "attention":
        q, k, v = convolve(x, 3 * given, 1).flatten(2).chunk(3, 1)
        scores = q.transpose(1, 2) @ k
        convolve((v @ scores).view_as(x), given, 1)
    elif step.kind == "residual":
        convolve(convolve(x, made), made)
        if given != made:
            convolve(x, made, 1)
    elif step.kind == "up":
        convolve(functional.interpolate(x, scale_factor=2), made)
    elif step.kind == "down":
        convolve(x, made, stride=2)
    else:
        convolve(x, made)


# --- the text encoder


def test_prompts_are_encoded_in_fp32_each_by_itself():
    one, two = (encode_text_seconds(RunRequest(cfg=cfg), H200) for cfg in ("off", "two passes"))
    assert two == pytest.approx(2 * one)
    flops = 2 * 6.53e9 * (200 + 64)
    assert one > flops / H200.encoder
    edit = RunRequest(family="qwen-image-edit", references=1, cfg="off")
    assert encode_text_seconds(edit, H200) > 5 * one
    assert encode_text_seconds(RunRequest(), H200, "cpu") > encode_text_seconds(RunRequest(), H200)
    assert prompt_seconds(100, H200) < prompt_seconds(200, H200)


# --- loading


@given(count=st.integers(MIB, 2**37))
def test_a_disk_takes_longer_than_memory(count):
    load = Load(read=count, brought=count, to_card=count)
    memory, disk = (load_seconds(load, H200, cold=cold) for cold in (False, True))
    assert 0 < memory.low <= memory.high < disk.high
    assert memory.low <= disk.low >= count / files.DISK


@pytest.mark.parametrize("load", measured()["loads"], ids=lambda load: f"{load['what']}")
def test_measured_loads_are_within_the_range(load, monkeypatch):
    cold = load["source"] == "disk"
    monkeypatch.setattr(files, "DISK", load.get("disk_bytes_per_second"))
    read = "read" if load["what"] == "bf16" else "read_quantized"
    work = Load(**{"read": 0, read: load["bytes"]}, to_card=load["bytes"])
    low, high = load_seconds(work, H200, cold=cold)
    assert 0.95 * low <= load["load_seconds"] + load["to_card_seconds"] <= 1.05 * high


@pytest.mark.parametrize(
    ("load", "seconds"),
    [
        (Load(read=WHOLE, to_card=WHOLE), 2.0 + 5.2),
        (Load(read=0, read_quantized=EIGHT_BITS, to_card=EIGHT_BITS), 0.3 + 4.2),
    ],
)
def test_whole_files_are_within_the_range(load, seconds):
    low, high = load_seconds(load, H200)
    assert 0.9 * low <= seconds <= high


@pytest.mark.parametrize(
    "run", measured()["first_prompts"], ids=lambda run: f"{run['what']} of {run['file']}"
)
def test_the_parts_of_first_prompts_are_within_the_range(run):
    ready = EIGHT_BITS if run["file"] == "int8" else 0
    made = LAYERS if run["file"] != run["what"] else 0
    read = load_seconds(Load(OTHERS if ready else WHOLE + OTHERS, ready, made), H200)
    assert 0.95 * read.low <= run["load_seconds"] <= read.high
    text = load_seconds(Load(read=0, to_card=TEXT_ENCODER), H200)
    assert text.low <= run["text_seconds"] <= 1.05 * text.high
    bf16, eight_bits = (WHOLE, 0) if run["what"] == "bf16" else (0, EIGHT_BITS)
    brought = load_seconds(Load(read=0, brought=bf16, brought_8_bits=eight_bits), H200)
    assert brought.low <= run["sampling_seconds"] <= brought.high + 1.1  # and the four steps


def test_quantizing_takes_time_and_what_stays_off_the_card_none():
    plain = Load(read=WHOLE, brought_8_bits=EIGHT_BITS, to_card=TEXT_ENCODER)
    for cold in (False, True):
        seconds = load_seconds(plain, H200, cold=cold)
        made = load_seconds(plain._replace(quantized=LAYERS), H200, cold=cold)
        assert made.high - seconds.high == pytest.approx(QUANTIZING.high * LAYERS)
        for left in ("brought_8_bits", "to_card"):
            here = load_seconds(plain._replace(**{left: 0}), H200, cold=cold)
            assert here.high < seconds.high
    slow_link = replace(H200, pcie=1e9)
    for way in ("brought", "brought_8_bits", "to_card"):
        assert load_seconds(Load(read=0, **{way: WHOLE}), slow_link).low >= WHOLE / 1e9
