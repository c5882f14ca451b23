"""Weights in 4 and 6 bits: what they decode to, and what is wrong with those that do not."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_checkpoint import micro_transformer, write

from qwen_l40s.charts.text import reasons
from qwen_l40s.cli import main
from qwen_l40s.errors import CheckpointError
from qwen_l40s.loaders.checkpoint import inspect_checkpoint
from qwen_l40s.loaders.sizes import loaded_bytes
from qwen_l40s.loaders.source import open_source
from qwen_l40s.loaders.stored import StoredLayer, canonical_tensors, rotate
from qwen_l40s.machine.store import known_cards
from qwen_l40s.optimizations.reference import decode_weight
from qwen_l40s.planning.bytes import TransformerBytes, buffer_bytes
from qwen_l40s.planning.plan import plan
from qwen_l40s.planning.rates import constants, rates_by
from qwen_l40s.planning.request import Parts, RunRequest, Setting
from qwen_l40s.planning.times import forward_seconds
from qwen_l40s.spec.formats import GIB, CardFacts

pytestmark = pytest.mark.usefixtures("one_thread")

FORMATS = {4: "asym_w4a8_int8", 6: "w6a8_int8"}
BLOCK = "transformer_blocks.0"
LAYER, MODULATION, OUTSIDE = f"{BLOCK}.attn.to_q", f"{BLOCK}.img_mod.1", "norm_out.linear"
ROWS, COLUMNS, GROUP, ROTATED = 6, 64, 16, 16


def packed_bytes(code, bits):
    """Codes [N, K] as a file holds them, int8 [N, K * bits / 8]."""
    pairs = code[:, 0::2] & 15 | (code[:, 1::2] & 15) << 4
    upper = code >> 4
    fours = upper[:, 0::4] | upper[:, 1::4] << 2 | upper[:, 2::4] << 4 | upper[:, 3::4] << 6
    whole = torch.cat((pairs, fours), dim=1) if bits == 6 else pairs
    return whole.to(torch.uint8).view(torch.int8)


def marker(bits, **entries):
    entries = {"format": FORMATS[bits], "convrot_groupsize": ROTATED, "group_size": GROUP} | entries
    return torch.tensor(list(json.dumps(entries).encode()), dtype=torch.uint8)


def layer(bits, seed=0, codebook=True):
    """{suffix: tensor} of a layer, and the int8 values that it stands for."""
    random = torch.Generator().manual_seed(seed)
    code = torch.randint(0, 2**bits, (ROWS, COLUMNS), generator=random)
    scale = (torch.rand(ROWS, COLUMNS // GROUP, generator=random) * 40 + 1).to(torch.float8_e4m3fn)
    levels = torch.arange(2.0**bits) - 2 ** (bits - 1)
    tensors = {"weight": packed_bytes(code, bits), "weight_s_rel": scale}
    if bits == 4 and codebook:
        levels = torch.randn(16, generator=random).sort().values * 4
        tensors["weight_codebook"] = levels
    tensors["weight_s_channel"] = torch.rand(ROWS, generator=random) + 0.1
    tensors["comfy_quant"] = marker(bits)
    level = levels.double()[code] * scale.double().repeat_interleave(GROUP, dim=1)
    return tensors, level.float().double().clamp(-127, 127).round().to(torch.int8)


def model(bits, layers=(LAYER, MODULATION, OUTSIDE)):
    tensors = {"txt_norm.weight": torch.ones(8), f"{BLOCK}.attn.norm_added_q.weight": torch.ones(8)}
    values = {}
    for seed, name in enumerate(layers):
        parts, values[name] = layer(bits, seed)
        tensors |= {f"{name}.{suffix}": part for suffix, part in parts.items()}
    return tensors, values


def read(tmp_path, tensors):
    path = tmp_path / "packed.safetensors"
    save_file(tensors, path)
    quantization = inspect_checkpoint(path).parts[0].quantization
    return dict(canonical_tensors(load_file(path), quantization))


@pytest.mark.parametrize("bits", FORMATS)
def test_what_is_decoded_is_a_rotated_int8_weight(tmp_path, bits):
    tensors, values = model(bits)
    found = read(tmp_path, tensors)
    for name in (LAYER, MODULATION):
        entry, scale = found[f"{name}.weight"], tensors[f"{name}.weight_s_channel"]
        assert torch.equal(entry.weight, values[name])
        assert torch.equal(entry.scale, scale[:, None])
        assert (entry.format, entry.convrot_groupsize) == ("int8 ConvRot", ROTATED)
        assert entry.full_precision == (name == MODULATION)
    outside = values[OUTSIDE].float() * tensors[f"{OUTSIDE}.weight_s_channel"][:, None]
    assert torch.equal(found[f"{OUTSIDE}.weight"], rotate(outside, ROTATED).bfloat16())
    layers = LAYER, MODULATION, OUTSIDE, "txt_norm", f"{BLOCK}.attn.norm_added_q"
    assert found.keys() == {f"{layer}.weight" for layer in layers}
    assert not [it for it in found.values() if isinstance(it, StoredLayer) and it.format == "int8"]


@given(bits=st.sampled_from(tuple(FORMATS)), seed=st.integers(0, 99), codebook=st.booleans())
@settings(max_examples=20, deadline=None)
def test_each_code_becomes_its_level(bits, seed, codebook):
    tensors, values = layer(bits, seed, codebook)
    parts = (tensors.get(f"weight{end}") for end in ("", "_s_rel", "_codebook"))
    assert torch.equal(decode_weight(*parts, bits), values)


def changed(bits=4, name="weight", part=None, **entries):
    tensors, _ = model(bits)
    key = f"{LAYER}.{name}"
    if entries:
        tensors[f"{LAYER}.comfy_quant"] = marker(bits, **entries)
    elif part is None:
        del tensors[key]
    else:
        tensors[key] = part(tensors[key]) if callable(part) else part
    return tensors


def spoiled(value):
    def change(tensor):
        tensor = tensor.float()
        tensor.view(-1)[1] = value
        return tensor

    return change


NAN = float("nan")
BAD = {
    "codebook of 15": (changed(name="weight_codebook", part=torch.ones(15)), "4 bits take 16"),
    "codebook of rows": (changed(name="weight_codebook", part=torch.ones(ROWS, 16)), "take 16"),
    "codebook for 6 bits": (changed(6, "weight_codebook", torch.ones(16)), "and 6 bits none"),
    "NaN in codebook": (changed(name="weight_codebook", part=spoiled(NAN)), "must be finite"),
    "no group scales": (changed(name="weight_s_rel"), "has 4 bits and no weight_s_rel"),
    "scales of other groups": (
        changed(name="weight_s_rel", part=lambda it: it[:, 1:].contiguous()),
        "(6, 4) is needed",
    ),
    "scales of other rows": (
        changed(name="weight_s_rel", part=lambda it: it[1:].contiguous()),
        "(6, 4) is needed",
    ),
    "NaN scale": (changed(name="weight_s_rel", part=spoiled(NAN)), "must be finite"),
    "no row scales": (changed(name="weight_s_channel"), "has no scale"),
    "one row scale": (
        changed(name="weight_s_channel", part=torch.ones(1)),
        "one for each row is needed",
    ),
    "zero row scale": (changed(name="weight_s_channel", part=spoiled(0)), "scales are above 0"),
    "odd width": (changed(part=lambda it: it[:, 1:].contiguous()), "a multiple of 8 bytes a row"),
    "other bits": (changed(6, part=lambda it: it[:, :40].contiguous()), "of 12 bytes a row"),
    "no codes": (changed(part=lambda it: it[:, :0].contiguous()), "has 0 bytes a row"),
    "a vector": (changed(part=lambda it: it[0].contiguous()), "weight is a matrix"),
    "another dtype": (changed(part=lambda it: it.float()), "dtype and format must agree"),
    "a correction": (changed(name="weight_correction", part=torch.ones(4, ROWS)), "in an unknown"),
    **{
        f"groups of {size!r}": (
            changed(group_size=size),
            "or a multiple of 16 that divides the width",
        )
        for size in (0, 2, 6, 12, 48, 128, "16", True, None)
    },
    **{
        f"rotated by {size!r}": (changed(convrot_groupsize=size), "a power of 4 that divides")
        for size in (0, 8, 256, "16")
    },
    "without its format": (changed(name="comfy_quant"), "is of no weight in 4 or 6 bits"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused_by_name(tmp_path, case):
    tensors, rule = BAD[case]
    with pytest.raises(CheckpointError) as error:
        read(tmp_path, tensors)
    sentence = str(error.value)
    assert rule in sentence and LAYER in sentence
    assert sentence.endswith("download or save the file again.")


def packed_specs(bits):
    """A transformer's header with its blocks in 4 or 6 bits, and what is in its markers."""
    specs, contents = {}, {}
    for name, (dtype, shape) in micro_transformer().items():
        specs[name] = dtype, shape
        if "transformer_blocks" not in name or len(shape) != 2:
            continue
        part, (rows, columns) = name.removesuffix(".weight"), shape
        text = json.dumps({"format": FORMATS[bits], "convrot_groupsize": 16}).encode()
        specs[name] = "I8", (rows, columns * bits // 8)
        specs[f"{part}.weight_s_rel"] = "F8_E4M3", (rows, columns // 16)
        specs[f"{part}.weight_s_channel"] = "F32", (rows,)
        specs[f"{part}.comfy_quant"] = "U8", (len(text),)
        contents[f"{part}.comfy_quant"] = text
    return specs, contents


@pytest.mark.parametrize("bits", FORMATS)
def test_a_header_is_recognized_and_counted_as_int8(tmp_path, capsys, bits):
    specs, contents = packed_specs(bits)
    path = write(tmp_path / "file.safetensors", specs, contents=contents)
    part = open_source(path, "transformer").part
    assert part.cannot_run == part.errors == ()
    assert (
        part.parameters
        == inspect_checkpoint(write(tmp_path / "plain.safetensors", micro_transformer()))
        .parts[0]
        .parameters
    )
    packed = {name: shape for name, (dtype, shape) in specs.items() if dtype == "I8"}
    decoded = sum(rows * columns * 8 // bits for rows, columns in packed.values())
    stored = sum(rows * columns for rows, columns in packed.values())
    groups = sum(rows * columns * 8 // bits // 16 for rows, columns in packed.values())
    assert main(["inspect", str(path)]) == 0
    assert "loads as      int8 ConvRot, decoded" in capsys.readouterr().out
    found = loaded_bytes(open_source(path, "transformer"))
    assert found.total == part.bytes + decoded - stored - groups
    assert 0 < found.modulation < found.total


def test_an_estimate_keeps_four_bits_where_int8_does_not_stay():
    int8 = TransformerBytes(19 * GIB, 7 * GIB)
    small = (11 * GIB, 4 * GIB)
    parts = Parts(transformer_bytes=int8.total, modulation_bytes=int8.modulation, packed=small)
    request = RunRequest(precision="int8", parts=parts)
    for gib, packed, weights in ((12, True, 7), (16, False, 12), (48, False, 19)):
        option = plan(CardFacts("card", gib * GIB, (8, 9)), request, "int8")[0]
        assert (option.setting.packed, option.resident) == (packed, True)
        assert option.weights_bytes == weights * GIB
        sentence = "stay in the file's 4 or 6 bits and are decoded one by one, because 12.0 GiB"
        assert (sentence in reasons(option).get("packed", "")) == packed
    whole = buffer_bytes(request, Setting("int8"))
    scratch = buffer_bytes(request, Setting("int8", packed=True)) - whole
    assert scratch == 2 * 3072 * 12288
    bf16 = plan(CardFacts("card", 12 * GIB, (8, 9)), replace(request, precision="bf16"), "int8")[0]
    assert not bf16.setting.packed


def test_decoding_takes_its_time_in_an_estimate():
    """As measured on an H200: 25 us for the widest layer, and those of a pass in 9 ms."""
    rates, request = rates_by(constants(), known_cards()["H200"]), RunRequest(precision="int8")
    added = [forward_seconds(request, "int8", rates, packed=it) for it in (False, True)]
    layers = 2 * 60 * (4 * 3072**2 + 2 * 3072 * 12288)
    assert added[1] - added[0] == pytest.approx(0.0247e-3 * layers / (3072 * 12288), rel=0.02)
