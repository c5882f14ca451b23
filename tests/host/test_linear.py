"""Linear layers, with what newer ComfyUI asks of them beside the product, against ComfyUI's own."""

import json
import logging
from functools import partial

import comfy.ops
import narrow_transformer as narrow
import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from comfy_kitchen.backends.eager import quantization as kitchen
from comfyui_boot import folder, refused
from safetensors.torch import load_file

from qwen_l40s.cli import main
from qwen_l40s.errors import UnavailableError
from qwen_l40s.hosts.comfyui.linear import quantized_operations
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.lora.bypass import BesideLayer, BypassForward
from qwen_l40s.loaders.quantize import dequantize_rows, layers_to_quantize, quantize_rows
from qwen_l40s.loaders.stored import rotate
from qwen_l40s.spec import formats

pytestmark = pytest.mark.usefixtures("inference_mode")
K, N = 64, 32
FORMATS = ("int8", "fp8", None)
newer = pytest.mark.host_has("comfy.ops._eager_input_act")


def random(*shape, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * scale).to(
        torch.bfloat16
    )


def layers(format):
    weight, bias = random(N, K, scale=K**-0.5), random(N)
    state = {"weight": weight, "bias": bias}
    if format:
        values, scale = quantize_rows(weight, format)
        marker = torch.tensor(list(json.dumps({"format": formats.FORMATS[format].marker}).encode()))
        state = {
            "weight": values,
            "weight_scale": scale,
            "comfy_quant": marker.to(torch.uint8),
            "bias": bias,
        }
        weight = dequantize_rows(values, scale, torch.bfloat16)
    ours = quantized_operations(torch.bfloat16).Linear(K, N, dtype=torch.bfloat16)
    ours.load_state_dict(state)
    core = comfy.ops.manual_cast.Linear(K, N, dtype=torch.bfloat16)
    core.load_state_dict({"weight": weight, "bias": bias})
    return ours, core


def calls():
    """{name: arguments beside x} that a block can make, each with the width of x."""
    residual, gate = random(2, 3, N), random(1, 1, N)
    norm = comfy.ops.manual_cast.RMSNorm(K, dtype=torch.bfloat16)
    norm.weight = torch.nn.Parameter(1 + random(K, scale=0.1), requires_grad=False)
    gated = {"residual": residual, "residual_scale": gate}
    return {
        "gelu": (K, {"input_act": "gelu_tanh"}),
        "swiglu": (2 * K, {"input_act": "swiglu"}),
        "norm": (K, {"input_act": "rms_norm", "act_weight": norm}),
        "gated residual": (K, gated),
        "both": (2 * K, {"input_act": "swiglu", **gated}),
    }


def close(ours, core, format):
    """Within what rounding activations to 8 bits costs, a hundredth of the largest value."""
    error = (ours.float() - core.float()).abs().max() / core.float().abs().max()
    return error < {None: 1e-6, "int8": 0.02, "fp8": 0.06}[format]


@newer
def test_what_is_around_the_product_is_computed():
    for format in FORMATS:
        ours, core = layers(format)
        for name, (width, arguments) in calls().items():
            x = random(2, 3, width)
            expected = core(x, **arguments)
            assert close(ours(x, **arguments), expected, format), (format, name)
            assert close(ours(x, *_in_order(arguments)), expected, format), (format, name)


def _in_order(arguments):
    names = ("input_act", "act_weight", "residual", "residual_scale")
    return [arguments.get(name) for name in names]


def low_rank(up, down):
    layer = comfy.ops.manual_cast.Linear(K, len(down), bias=False)
    layer.weight = torch.nn.Parameter(down, requires_grad=False)
    return BesideLayer(up, layer, 0)


@newer
def test_a_bypass_reads_what_the_layer_reads_and_stands_inside_of_the_gate():
    up, down = random(N, 4, scale=0.1), random(4, K)
    for format in FORMATS:
        ours, core = layers(format)
        forward = BypassForward(ours.forward, low_rank(up * 0.5, down))
        merged = comfy.ops.manual_cast.Linear(K, N, dtype=torch.float32)
        weight = core.weight.float() + 0.5 * up.float() @ down.float()
        merged.load_state_dict({"weight": weight, "bias": core.bias.float()})
        for name, (width, arguments) in calls().items():
            x = random(2, 3, width)
            expected = merged.to(torch.bfloat16)(x, **arguments)
            assert close(forward(x, **arguments), expected, format or "int8"), (format, name)


def test_a_host_whose_layers_do_not_know_them_is_told_so(monkeypatch):
    monkeypatch.delattr(comfy.ops, "_eager_input_act", raising=False)
    for format in FORMATS:
        ours, _ = layers(format)
        bypass = BypassForward(ours.forward, low_rank(random(N, 4), random(4, K)))
        for call in (ours, bypass):
            words = ("input_act", "residual", "update ComfyUI")
            arguments = {"input_act": "gelu_tanh", "residual": random(2, 3, N)}
            refused(UnavailableError, *words, run=partial(call, random(2, 3, K), **arguments))


def test_an_argument_that_nobody_knows_reaches_the_hosts_own_code(monkeypatch):
    ours, _ = layers("int8")
    seen = {}

    def forward(self, input, **arguments):
        seen.update(arguments)
        return "the host's"

    monkeypatch.setattr(type(ours).__mro__[1], "forward", forward)
    assert ours(random(2, 3, K), gate=3) == "the host's" and seen == {"gate": 3}
    bypass = BypassForward(ours.forward, low_rank(random(N, 4), random(4, K)))
    refused(UnavailableError, "gate", "merge", run=lambda: bypass(random(2, 3, K), gate=3))


# --- files that `qwen-l40s quantize` wrote, by ComfyUI's official loading

FOLDER = folder("quantized")
PLAIN = narrow.write(FOLDER / "bf16.safetensors", narrow.weights())
GROUP = 16


def written(precision):
    path = FOLDER / f"{precision}.safetensors"
    command = ["quantize", str(PLAIN), str(path), "--precision", precision, "--device", "cpu"]
    assert main(command) == 0
    return path


def quantized(model):
    return {
        name: module.weight.dequantize()
        for name, module in model.model.diffusion_model.named_modules()
        if isinstance(getattr(module, "weight", None), QuantizedTensor)
    }


def test_comfyui_reads_int8_as_we_do(caplog):
    """It only logs a tensor that it lacks."""
    path = written("int8")
    caplog.clear()
    theirs, ours = quantized(narrow.stock(load_file(path))), quantized(load_model(path)[0])
    assert [it for it in caplog.records if it.levelno >= logging.WARNING] == []
    layers = [name.removesuffix(".weight") for name in narrow.weights()]
    assert theirs.keys() == ours.keys() == layers_to_quantize(layers)
    for layer, weight in theirs.items():
        torch.testing.assert_close(weight, ours[layer].to(weight.dtype))


def test_rows_are_quantized_and_rotated_as_comfy_kitchen_does():
    matrix = torch.randn(50, 192, generator=torch.Generator().manual_seed(0))
    matrix[7] = 0
    their_values, their_scale = kitchen.quantize_int8_rowwise(matrix)
    values, scale = quantize_rows(matrix, "int8")
    assert torch.equal(their_values, values)
    scale[7] = their_scale[7]  # of a row of zeros: any will do
    assert torch.equal(their_scale, scale)
    theirs = kitchen.rotate_int8_convrot_weight(matrix, GROUP)
    assert torch.allclose(theirs, rotate(matrix, GROUP), atol=1e-6)


def test_our_fp8_is_refused():
    with pytest.raises(Exception, match="float8_e4m3fn_rowwise"):
        narrow.stock(load_file(written("fp8")))
