"""Every form in which people store a quantized transformer, brought into one, value for value."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qwen_l40s.errors import CheckpointError
from qwen_l40s.loaders.checkpoint import inspect_checkpoint
from qwen_l40s.loaders.quantize import dequantize_rows, quantize_rows
from qwen_l40s.loaders.stored import StoredLayer, canonical_tensors, rotate, stored_layers

pytestmark = pytest.mark.usefixtures("one_thread")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = "transformer_blocks.0"
COMPUTED = (f"{BLOCK}.attn.to_q", f"{BLOCK}.img_mlp.net.2")
MODULATION = f"{BLOCK}.img_mod.1"
OTHERS = ("img_in", "norm_out.linear")
ROWS, COLUMNS = 6, 32


def model():
    """A few layers of a transformer, {name: float32}, with what stands around them."""
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in (*COMPUTED, MODULATION, *OTHERS):
        tensors[f"{layer}.weight"] = torch.randn(ROWS, COLUMNS, generator=random) * 0.02
        tensors[f"{layer}.bias"] = torch.randn(ROWS, generator=random)
    tensors["txt_norm.weight"] = torch.rand(COLUMNS, generator=random)
    tensors[f"{BLOCK}.attn.norm_added_q.weight"] = torch.rand(16, generator=random)
    tensors["__index_timestep_zero__"] = torch.empty(0)
    return tensors


def settings(**entries):
    return torch.tensor(list(json.dumps(entries).encode()), dtype=torch.uint8)


def read(path):
    quantization = inspect_checkpoint(path).parts[0].quantization
    return dict(canonical_tensors(load_file(path), quantization))


def store(tmp_path, tensors, metadata=None):
    path = tmp_path / "stored.safetensors"
    save_file(tensors, path, metadata)
    return path


def canonical(tmp_path, tensors, metadata=None):
    found = read(store(tmp_path, tensors, metadata))
    assert not [name for name in found if name.rpartition(".")[2] in AUXILIARY]
    for entry in found.values():
        if isinstance(entry, StoredLayer):
            scale = entry.tensors("layer")["layer.weight_scale"]
            assert scale.dtype == torch.float32
            assert scale.shape == (len(entry.weight), 1)
            assert scale.is_contiguous()
    return found


AUXILIARY = ("weight_scale", "scale_weight", "scale_input", "input_scale", "comfy_quant")
AUXILIARY += ("scaled_fp8",)


def value(entry):
    return dequantize_rows(entry.weight, entry.scale, torch.float32)


def quantized(dtype, layers=(*COMPUTED, MODULATION), scale_shape=(), scale_name="weight_scale"):
    """The model in bf16 with some layers in `dtype`, and {layer: the values that this means}."""
    tensors = {name: tensor.bfloat16() for name, tensor in model().items()}
    meant = {}
    for place, layer in enumerate(layers):
        weight = tensors[f"{layer}.weight"].float()
        scale = torch.full(scale_shape, 0.001 * (place + 1))
        if scale.numel() > 1:
            scale *= torch.arange(1, ROWS + 1).reshape(scale_shape)
        rows = scale.reshape(-1, 1)
        scaled = weight / rows
        stored = scaled.round().clamp(-127, 127) if dtype == torch.int8 else scaled
        tensors[f"{layer}.weight"] = stored.to(dtype)
        tensors[f"{layer}.{scale_name}"] = scale
        meant[layer] = tensors[f"{layer}.weight"].float() * rows
    return tensors, meant


def check(found, meant, format, full_precision=(MODULATION,)):
    stored = {name for name in found if isinstance(found[name], StoredLayer)}
    assert stored == {f"{layer}.weight" for layer in meant}
    for layer, expected in meant.items():
        entry = found[f"{layer}.weight"]
        assert entry.format == format
        assert entry.full_precision == (layer in full_precision), layer
        assert torch.equal(value(entry), expected), layer
        assert f"{layer}.bias" in found


# --- fp8


def test_a_file_where_everything_is_e4m3_without_scales(tmp_path):
    """As the published qwen_image_fp8_e4m3fn.safetensors: norms, biases and all."""
    tensors = {name: tensor.to(E4M3) for name, tensor in model().items()}
    found = canonical(tmp_path, tensors)
    meant = {layer: tensors[f"{layer}.weight"].float() for layer in (*COMPUTED, MODULATION)}
    check(found, meant, "fp8")
    for layer in meant:
        assert torch.equal(found[f"{layer}.weight"].scale, torch.ones(ROWS, 1))
    rest = {name for name in tensors if name.removesuffix(".weight") not in meant}
    assert rest == {name for name in found if not isinstance(found[name], StoredLayer)}
    for name in rest:
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name].float(), tensors[name].float()), name


@pytest.mark.parametrize("elements", [1, 2])
def test_scaled_fp8_with_a_marker(tmp_path, elements):
    tensors, meant = quantized(E4M3, scale_name="scale_weight")
    tensors["scaled_fp8"] = torch.zeros(elements).to(E4M3)
    tensors |= {f"{layer}.scale_input": torch.tensor(0.5) for layer in meant}
    slow = meant if elements == 2 else (MODULATION,)
    check(canonical(tmp_path, tensors), meant, "fp8", slow)


@pytest.mark.parametrize("shape", [(), (1,), (ROWS,), (ROWS, 1)])
def test_scaled_fp8_in_the_naming_of_today(tmp_path, shape):
    tensors, meant = quantized(E4M3, scale_shape=shape)
    tensors |= {f"{layer}.input_scale": torch.tensor(0.5) for layer in meant}
    check(canonical(tmp_path, tensors), meant, "fp8")


@pytest.mark.parametrize("place", ["metadata", "comfy_quant"])
def test_scaled_fp8_that_asks_for_full_precision_in_one_layer(tmp_path, place):
    tensors, meant = quantized(E4M3)
    slow = (COMPUTED[1], MODULATION)
    declared = {
        layer: {"format": "float8_e4m3fn"}
        | ({"full_precision_matrix_mult": True} if layer == COMPUTED[1] else {})
        for layer in meant
    }
    metadata = None
    if place == "metadata":
        metadata = {"_quantization_metadata": json.dumps({"layers": declared})}
    else:
        tensors |= {f"{layer}.comfy_quant": settings(**declared[layer]) for layer in meant}
    check(canonical(tmp_path, tensors, metadata), meant, "fp8", slow)


def test_scaled_fp8_beside_unscaled_layers_and_outside_the_blocks(tmp_path):
    tensors, meant = quantized(E4M3, layers=(COMPUTED[0], "img_in"))
    tensors[f"{COMPUTED[1]}.weight"] = tensors[f"{COMPUTED[1]}.weight"].to(E4M3)
    expected = meant.pop("img_in").bfloat16()
    meant[COMPUTED[1]] = tensors[f"{COMPUTED[1]}.weight"].float()
    found = canonical(tmp_path, tensors)
    check(found, meant, "fp8")
    assert torch.equal(found["img_in.weight"], expected)


@pytest.mark.parametrize("scaled", [True, False])
def test_e5m2_becomes_bf16(tmp_path, scaled):
    if scaled:
        tensors, meant = quantized(E5M2)
    else:
        tensors = {name: tensor.to(E5M2) for name, tensor in model().items()}
        meant = {layer: tensors[f"{layer}.weight"].float() for layer in (*COMPUTED, *OTHERS)}
    found = canonical(tmp_path, tensors)
    assert not [entry for entry in found.values() if isinstance(entry, StoredLayer)]
    for layer, expected in meant.items():
        assert torch.equal(found[f"{layer}.weight"], expected.bfloat16())
    assert {entry.dtype for entry in found.values()} <= {torch.bfloat16, torch.float32}


# --- int8


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("shape", [(), (ROWS,), (ROWS, 1)])
def test_int8(tmp_path, shape, declared):
    tensors, meant = quantized(torch.int8, scale_shape=shape)
    if declared:
        for layer in meant:
            tensors[f"{layer}.comfy_quant"] = settings(format="int8_tensorwise")
    check(canonical(tmp_path, tensors), meant, "int8")


@pytest.mark.parametrize("nested", [True, False])
def test_int8_convrot_keeps_its_rotation(tmp_path, nested):
    tensors, meant = quantized(torch.int8, scale_shape=(ROWS, 1))
    entries = {"convrot": True, "convrot_groupsize": 16}
    entries = {"params": entries} if nested else entries
    for layer in (*meant,):
        tensors[f"{layer}.comfy_quant"] = settings(format="int8_tensorwise", **entries)
    found = canonical(tmp_path, tensors)
    check(found, meant, "int8 ConvRot")
    assert {found[f"{layer}.weight"].convrot_groupsize for layer in meant} == {16}


def test_a_rotated_layer_that_is_not_computed_quantized_is_rotated_back(tmp_path):
    tensors = {name: tensor.bfloat16() for name, tensor in model().items()}
    original = tensors["img_in.weight"].float()
    values, scale = quantize_rows(rotate(original, 16), "int8")
    tensors |= {"img_in.weight": values, "img_in.weight_scale": scale}
    tensors["img_in.comfy_quant"] = settings(
        format="int8_tensorwise", convrot=True, convrot_groupsize=16
    )
    found = canonical(tmp_path, tensors)["img_in.weight"]
    assert found.dtype == torch.bfloat16
    assert (found.float() - original).norm() < 0.01 * original.norm()


# --- passing on


def test_a_file_without_quantization_is_passed_on(tmp_path):
    tensors = model()
    quantization = inspect_checkpoint(store(tmp_path, tensors)).parts[0].quantization
    found = dict(canonical_tensors(tensors, quantization))
    assert list(found) == list(tensors)
    assert all(found[name] is tensors[name] for name in tensors)


@pytest.mark.parametrize("scaled", [True, False])
def test_weights_that_need_no_conversion_are_not_read(tmp_path, scaled):
    """The host maps files: what nobody looks at stays on the disk."""
    tensors, meant = quantized(E4M3)
    if not scaled:
        tensors = {n: tensor for n, tensor in tensors.items() if not n.endswith("weight_scale")}
    quantization = inspect_checkpoint(store(tmp_path, tensors)).parts[0].quantization
    unread = {
        name: tensor if tensor.numel() == 1 else tensor.to("meta")
        for name, tensor in tensors.items()
    }
    found = dict(canonical_tensors(unread, quantization))
    names = [f"{layer}.weight" for layer in meant]
    assert all(found[name].weight is unread[name] for name in names)
    assert found["txt_norm.weight"] is unread["txt_norm.weight"]


@pytest.mark.parametrize("format", ["fp8", "int8", "int8 ConvRot"])
def test_what_comes_out_can_be_stored_and_comes_out_again(tmp_path, format):
    entries = {}
    for layer in (*COMPUTED, MODULATION):
        weight = model()[f"{layer}.weight"]
        values, scale = quantize_rows(weight, format.split()[0])
        group = 16 if format == "int8 ConvRot" else None
        entries[layer] = StoredLayer(values, scale, format, group, layer == MODULATION)
    tensors = {name: tensor.bfloat16() for name, tensor in model().items()}
    for layer, entry in entries.items():
        tensors |= entry.tensors(layer)
    path = store(tmp_path, tensors)
    assert inspect_checkpoint(path).parts[0].cannot_run == ()
    found = read(path)
    for layer, entry in entries.items():
        again = found[f"{layer}.weight"]
        assert torch.equal(again.weight.float(), entry.weight.float())
        assert torch.equal(again.scale, entry.scale)
        for name in ("format", "convrot_groupsize", "full_precision"):
            assert getattr(again, name) == getattr(entry, name)
    with safe_open(path, framework="pt") as file:
        text = bytes(file.get_tensor(f"{MODULATION}.comfy_quant").tolist())
    assert json.loads(text)["full_precision_matrix_mult"] is True


def test_an_expanded_scale_is_stored_value_by_value():
    values, scale = torch.ones(ROWS, COLUMNS).to(E4M3), torch.full((1, 1), 0.5)
    stored = StoredLayer(values, scale.expand(ROWS, 1), "fp8").tensors("a")["a.weight_scale"]
    assert stored.is_contiguous()
    assert torch.equal(stored, torch.full((ROWS, 1), 0.5))


# --- one layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(), (ROWS, 1)])
@pytest.mark.parametrize("stored", [E4M3, E5M2, torch.int8])
def test_dequantized_is_rounded_once(stored, shape, dtype):
    random = torch.Generator().manual_seed(1)
    values = (torch.randn(ROWS, COLUMNS, generator=random) * 30).to(stored)
    scale = torch.rand(shape, generator=random) + 0.1
    kind = "int8" if stored == torch.int8 else "fp8"
    plain = StoredLayer(values, scale, kind).dequantized(dtype)
    assert plain.dtype == dtype
    assert torch.equal(plain, (values.float() * scale).to(dtype))
    if kind == "int8":
        rotated = StoredLayer(values, scale, "int8 ConvRot", 16).dequantized(dtype)
        assert torch.equal(rotated, rotate(values.float() * scale, 16).to(dtype))


def test_layers_as_they_are_stored_with_one_scale_in_core_s_own_formats():
    forms = {E4M3: "float8_e4m3fn", E5M2: "float8_e5m2", torch.int8: "int8_tensorwise"}
    for dtype, name in forms.items():
        tensors, meant = quantized(dtype)
        found = stored_layers(tensors, {})
        assert found.keys() == meant.keys()
        for layer, entry in found.items():
            assert entry.weight is tensors[f"{layer}.weight"]
            assert entry.scale.shape == ()
            assert torch.equal(entry.dequantized(torch.float32), meant[layer])
            written = entry.tensors(layer)
            assert bytes(written[f"{layer}.comfy_quant"].tolist()) == (
                json.dumps({"format": name}).encode()
            )


def test_a_scale_of_one_beside_a_plain_weight_is_left_out(tmp_path):
    tensors, meant = quantized(E4M3)
    tensors["img_in.weight_scale"] = torch.ones(())
    found = canonical(tmp_path, tensors)
    check(found, meant, "fp8")
    assert torch.equal(found["img_in.weight"], tensors["img_in.weight"])


# --- bad input

LAYER = COMPUTED[0]


def spoiled(dtype=E4M3, **changes):
    tensors, _ = quantized(dtype)
    for name, tensor in changes.items():
        tensors[f"{LAYER}.{name}"] = tensor
    return tensors


def without_scale(dtype, declared=None):
    tensors = spoiled(dtype)
    del tensors[f"{LAYER}.weight_scale"]
    if declared:
        tensors[f"{LAYER}.comfy_quant"] = settings(format=declared)
    return tensors


def nan_bytes(dtype):
    return torch.full((ROWS, COLUMNS), 0x7F, dtype=torch.uint8).view(dtype)


ROTATED = {"format": "int8_tensorwise", "convrot": True}
BAD = {
    "NaN scale": (spoiled(weight_scale=torch.tensor(float("nan"))), "holds NaN"),
    "infinite scale": (spoiled(weight_scale=torch.tensor(float("inf"))), "holds NaN"),
    "zero scale": (spoiled(weight_scale=torch.zeros(ROWS)), "zero or a negative"),
    "negative scale": (spoiled(weight_scale=torch.tensor(-0.1)), "zero or a negative"),
    "empty scale": (spoiled(weight_scale=torch.empty(0)), "zero or a negative"),
    "scales of groups": (
        spoiled(weight_scale=torch.ones(ROWS, 2)),
        "one value, or one for each row",
    ),
    "two scales": (spoiled(scale_weight=torch.tensor(1.0)), "is a second scale"),
    "smoothing": (spoiled(pre_quant_scale=torch.ones(COLUMNS)), "in an unknown way"),
    "scaled bf16": (spoiled(torch.bfloat16), "is the scale of no quantized weight"),
    "int8 without scale": (without_scale(torch.int8), "is int8 and has no scale"),
    "declared int8": (without_scale(torch.int8, "int8_tensorwise"), "has no scale"),
    "declared fp8": (without_scale(E4M3, "float8_e4m3fn"), "has no scale"),
    "declared rowwise": (without_scale(E4M3, "float8_e4m3fn_rowwise"), "has no scale"),
    "another dtype": (spoiled(comfy_quant=settings(format="int8_tensorwise")), "must agree"),
    "four bits": (spoiled(comfy_quant=settings(format="nvfp4")), "is stored as nvfp4"),
    "future": (spoiled(comfy_quant=settings(format="fp3")), "format from the future: fp3"),
    "a vector": (spoiled(weight=torch.ones(ROWS).to(E4M3)), "weight is a matrix"),
    "NaN in e5m2": (spoiled(weight=nan_bytes(E5M2)), "holds NaN or infinity"),
    "NaN bias": (spoiled(bias=nan_bytes(E4M3)[0, :ROWS]), "holds NaN or infinity"),
    **{
        f"group of {size!r}": (
            spoiled(torch.int8, comfy_quant=settings(**ROTATED, convrot_groupsize=size)),
            "a power of 4 that divides the width",
        )
        for size in (0, 8, 24, 64, "16", 16.0, True, None, [4], 10**30)
    },
    "default group": (spoiled(torch.int8, comfy_quant=settings(**ROTATED)), "groups of 256"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused_by_name(tmp_path, case):
    tensors, rule = BAD[case]
    with pytest.raises(CheckpointError) as error:
        read(store(tmp_path, tensors))
    sentence = str(error.value)
    assert rule in sentence
    assert LAYER in sentence
    assert sentence.endswith(("download or save the file again.", "in one of these."))


def test_scales_and_formats_are_checked_before_any_weight_is_read(tmp_path):
    for case in ("NaN scale", "declared int8", "four bits", "scaled bf16"):
        tensors, rule = BAD[case]
        path = store(tmp_path, tensors)
        quantization = inspect_checkpoint(path).parts[0].quantization
        with pytest.raises(CheckpointError, match=rule):
            canonical_tensors(load_file(path), quantization)
