"""A diffusers transformer with fp8 or int8 layers: what is replaced, painted and lost."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from micro_models import build_21, velocity

from qwen_l40s.errors import SettingError
from qwen_l40s.families.qwen_image_21 import single_stream
from qwen_l40s.hosts.diffusers.load import load_pipeline
from qwen_l40s.hosts.diffusers.quantized import (
    PlainProduct,
    QuantizedLinear,
    quantizable,
    quantize_transformer,
)
from qwen_l40s.hosts.diffusers.sample import generate
from qwen_l40s.hosts.diffusers.settings import GenerateSettings
from qwen_l40s.loaders.quantize import layers_to_quantize, quantize_rows, row_format
from qwen_l40s.loaders.source import bundled_micro_folder
from qwen_l40s.measure.fidelity import measured_layers, relative_error
from qwen_l40s.micro.scene import parse_prompt
from qwen_l40s.optimizations import reference
from qwen_l40s.optimizations.linear import choose_gemm
from qwen_l40s.spec.formats import QUANTIZED
from qwen_l40s.tools import micro_quality as quality

pytestmark = pytest.mark.usefixtures("one_thread")

MICRO = bundled_micro_folder()
LAYER = "transformer_blocks.3.img_mlp.net.2"
PROMPT = "a large green circle at the bottom right on a white background"
OTHER = "a small red star at the top left on a blue background"
QUICK = GenerateSettings(prompt=PROMPT, width=64, height=64, steps=3, cfg=4.0, seed=1)
PRODUCT = "qwen_l40s.hosts.diffusers.quantized.tensor_core_product"
in_each = pytest.mark.parametrize("format", QUANTIZED)


@pytest.fixture(scope="module")
def bf16():
    """The micro model in bf16; whoever changes its transformer works on a copy."""
    return load_pipeline(MICRO, precision="bf16", device="cpu")


@pytest.fixture
def transformer(bf16):
    return copy.deepcopy(bf16.transformer)


def linear_layers(transformer):
    modules = transformer.named_modules()
    return {name: layer for name, layer in modules if isinstance(layer, torch.nn.Linear)}


# --- the layer


@in_each
def test_a_layer_multiplies_rounded_activations_with_rounded_weights(format):
    layer = torch.nn.Linear(64, 48)
    quantized = QuantizedLinear(layer, PlainProduct(format))
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(0))
    form = row_format(format, 64)
    assert quantized.form == form
    values, scale = quantize_rows(layer.weight.detach(), format, rotation=form.rotation)
    rows, x_scale = reference.row_quantize(x.reshape(-1, 64), form)
    exact = (rows.double() * x_scale) @ (values.double() * scale).t() + layer.bias.double()
    out = quantized(x)
    assert (out.shape, out.dtype) == ((2, 9, 48), torch.float32)
    assert relative_error(out.view(-1, 48), exact.detach()) < 1e-6
    assert quantized(x.bfloat16()).dtype == torch.bfloat16
    assert (quantized.in_features, quantized.out_features) == (64, 48)


@in_each
def test_casting_a_model_leaves_values_and_scales_as_they_are(format):
    quantized = QuantizedLinear(torch.nn.Linear(32, 16), PlainProduct(format))
    values, scale = quantized.weight, quantized.weight_scale
    model = torch.nn.Sequential(quantized).to(torch.bfloat16)
    assert (quantized.weight.dtype, quantized.weight_scale.dtype) == (values.dtype, torch.float32)
    assert torch.equal(quantized.weight.float(), values.float())
    assert torch.equal(quantized.weight_scale, scale)
    assert quantized.bias.dtype == torch.bfloat16
    assert model(torch.ones(3, 32).bfloat16()).shape == (3, 16)
    model.to("meta")
    assert quantized.weight.is_meta and quantized.weight.dtype == values.dtype


# --- the transformer


@in_each
def test_attention_and_mlp_of_the_blocks_are_replaced_and_nothing_else(transformer, format):
    before = linear_layers(transformer)
    weights = {name: tensor.clone() for name, tensor in transformer.state_dict().items()}
    layers = quantize_transformer(transformer, format)
    assert set(layers) == layers_to_quantize(before)
    assert len(layers) == 72
    assert set(linear_layers(transformer)) == set(before) - set(layers)
    for name in layers:
        layer = transformer.get_submodule(name)
        weight = weights[f"{name}.weight"]
        rotation = row_format(format, weight.shape[1]).rotation
        values, scale = quantize_rows(weight, format, rotation=rotation)
        assert torch.equal(layer.weight.float(), values.float())
        assert torch.equal(layer.weight_scale, scale)
    for name, tensor in transformer.state_dict().items():
        if name in weights and name.removesuffix(".weight") not in layers:
            assert torch.equal(tensor, weights[name]), name
    held = sum(tensor.nbytes for tensor in transformer.state_dict().values())
    assert held < 0.75 * sum(tensor.nbytes for tensor in weights.values())


@in_each
def test_the_prediction_is_off_by_what_the_format_loses(transformer, format, monkeypatch):
    """In fp32, so that nothing else differs; with the weights alone rounded it is less."""
    exact = transformer.float()
    found = copy.deepcopy(exact)
    quantize_transformer(found, format)
    weights_only = copy.deepcopy(exact)
    dequantize = choose_gemm(format, torch.device("cpu"), backend="dequantize")
    monkeypatch.setattr(PRODUCT, lambda *_: dequantize)
    quantize_transformer(weights_only, format)
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(1, 64, 64, generator=generator),
        "encoder_hidden_states": torch.randn(1, 20, 512, generator=generator),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 8, 8)]],
        "return_dict": False,
    }
    with torch.inference_mode():
        plain, lossy, half = (m(**inputs)[0] for m in (exact, found, weights_only))
    error = relative_error(lossy, plain)
    low, high = {"fp8": (0.01, 0.2), "int8": (0.003, 0.06)}[format]
    assert low < error < high
    assert relative_error(half, plain) < 0.9 * error


@pytest.mark.parametrize(("format", "most"), [("int8", 0.03), ("fp8", 0.15)])
def test_the_transformer_of_qwen_image_21(format, most):
    exact = build_21().transformer
    torch.manual_seed(0)
    for weight in exact.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.08)
    quantized = copy.deepcopy(exact)
    layers = quantize_transformer(quantized, format)
    block = single_stream(fused_mlp=False).gemms
    assert set(layers) == {f"transformer_blocks.{it}.{name}" for it in range(4) for name in block}
    text, mask = torch.randn(1, 9, 128), torch.ones(1, 9, dtype=torch.bool)
    inputs = torch.randn(1, 64, 64), torch.tensor([0.7]), text, mask
    found, known = (velocity(it, *inputs) for it in (quantized, exact))
    assert 0 < (found - known).norm() / known.norm() < most


def test_what_cannot_be_quantized_is_refused_and_left_alone(transformer):
    before = linear_layers(transformer)
    for arguments, rule in (
        (("bf16",), "precision 'bf16' is unknown: choose fp8 or int8"),
        (("fp8", ["blocks.*"]), "'blocks.*' matches no"),
        (("fp8", ["*"]), "leaves no layer to quantize"),
    ):
        with pytest.raises(SettingError) as error:
            quantize_transformer(transformer, *arguments)
        assert rule in str(error.value)
    assert linear_layers(transformer) == before
    quantize_transformer(transformer, "fp8", ["transformer_blocks.0.*"])
    with pytest.raises(SettingError, match="is a QuantizedLinear, but only linear layers with"):
        quantize_transformer(transformer, "int8", ["transformer_blocks.0.*"])


# --- images


@pytest.mark.slow
def test_the_micro_model_paints_the_same_in_fp8_and_int8(bf16):
    """`make micro-quality ARGS="--precision fp8"` does so with 200 prompts and 20 steps."""
    prompts = [(prompt, parse_prompt(prompt)) for prompt in (PROMPT, OTHER)]
    least = {}
    for format in QUANTIZED:
        pipeline = replace(bf16, transformer=copy.deepcopy(bf16.transformer))
        found = quality.compare(pipeline, prompts, format)
        least[format] = found["psnr"]["least"]
        assert found["all"] == found["bf16"]["all"] == 1
        assert quality.passes(found)
    assert 20 < least["fp8"] < 60
    assert least["fp8"] < least["int8"] < 80


def test_a_drop_of_more_than_two_points_does_not_pass():
    shares = {"colours_and_position": 0.98, "shape": 0.97, "all": 0.96, "size": 0.99}
    assert quality.passes({**shares, "bf16": shares})
    assert quality.passes({**shares, "bf16": {**shares, "shape": 0.99}})
    assert not quality.passes({**shares, "bf16": {**shares, "all": 0.985}})
    assert not quality.passes({**shares, "shape": 0.89})


# --- errors of layers


def test_measuring_changes_no_image_and_finds_the_error_of_every_activation(bf16):
    plain = generate(bf16, **vars(QUICK), progress=False).images[0]
    seen = []
    layer = bf16.transformer.get_submodule(LAYER)
    record = layer.register_forward_hook(lambda _, x, y: seen.append((x[0], y)))
    with measured_layers(bf16.transformer, "fp8", ["transformer_blocks.0.*"]) as found:
        measured = generate(bf16, **vars(QUICK), progress=False).images[0]
    record.remove()
    assert np.array_equal(np.asarray(plain), np.asarray(measured))
    assert len(seen) == 2 * QUICK.steps
    assert not any(module._forward_hooks for module in bf16.transformer.modules())
    assert [each.layer for each in found] == quantizable(
        bf16.transformer, ["transformer_blocks.0.*"]
    )
    assert all(0.015 < each.error < 0.1 and 1 < each.outlier < 100 for each in found)
    x, exact = (torch.cat([pair[i] for pair in seen]) for i in (0, 1))
    out = QuantizedLinear(layer, PlainProduct("fp8"))(x)
    (entry,) = [each for each in found if each.layer == LAYER]
    assert entry.error == pytest.approx(relative_error(out, exact), rel=1e-3)
    outliers = [part.abs().max() / part.float().square().mean().sqrt() for part, _ in seen]
    assert entry.outlier == pytest.approx(float(max(outliers)), rel=1e-2)
    # Two bytes for each value, against one and four for each row.
    assert entry.bytes == layer.weight.numel() - 4 * len(layer.weight)


@in_each
def test_each_device_loses_what_the_reference_says(transformer, format, device, monkeypatch):
    model = transformer.to(device)
    plain = copy.deepcopy(model)
    quantize_transformer(model, format)
    monkeypatch.setattr(PRODUCT, lambda *_: PlainProduct(format))
    quantize_transformer(plain, format)
    layer, twin = model.get_submodule(LAYER), plain.get_submodule(LAYER)
    assert layer.weight.device.type == device.type
    assert device.type == "cpu" or not isinstance(layer.product, PlainProduct)
    x = torch.randn(300, layer.in_features, device=device).bfloat16()
    exact = F.linear(x.float(), twin.weight.float() * twin.weight_scale, twin.bias.float())
    errors = [relative_error(m(x), exact) for m in (layer, twin)]
    assert errors[0] == pytest.approx(errors[1], rel=0.1)
