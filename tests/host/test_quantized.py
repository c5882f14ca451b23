"""ComfyUI's official loading of files that `qwen-l40s quantize` wrote: it reads int8 as we do, and
refuses our fp8.
"""

import json
import logging
from pathlib import Path

import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import comfy.utils
import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from comfy_kitchen.backends.eager import quantization as kitchen
from comfyui_boot import ROOT, folder
from safetensors.torch import load_file

from qwen_l40s.cli import main
from qwen_l40s.loaders.quantize import layers_to_quantize, quantize_rows, row_format
from qwen_l40s.loaders.stored import StoredLayer, rotate

pytestmark = pytest.mark.usefixtures("inference_mode")
FOLDER = folder("quantized")
MICRO = ROOT / "models" / "micro"
CONFIG = MICRO / "transformer" / "config.json"
GROUP = 16


def load(path: Path) -> tuple[torch.nn.Module, list[str]]:
    """The steps of `comfy.sd.load_diffusion_model_state_dict`, with sizes from CONFIG: it detects
    only the real model's.
    """
    sd, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
    sd, metadata = comfy.utils.convert_old_quants(sd, "", metadata=metadata)
    sizes = json.loads(CONFIG.read_text(encoding="utf-8"))
    names = "in_channels num_layers attention_head_dim num_attention_heads joint_attention_dim"
    config = comfy.supported_models.QwenImage(
        {
            "image_model": "qwen_image",
            **{name: sizes[name] for name in (*names.split(), "axes_dims_rope")},
        }
    )
    config.quant_config = comfy.utils.detect_layer_quantization(sd, "")
    device = torch.device("cpu")
    cast = comfy.model_management.unet_manual_cast(None, device, config.supported_inference_dtypes)
    config.set_inference_dtype(torch.bfloat16, cast)
    model = config.get_model(sd, "")
    patcher = comfy.model_patcher.CoreModelPatcher(model, load_device=device, offload_device=device)
    model.load_model_weights(sd, "", assign=patcher.is_dynamic())
    return model.diffusion_model, list(sd)


def written(precision: str) -> Path:
    path = FOLDER / f"{precision}.safetensors"
    command = ["quantize", str(MICRO), str(path), "--precision", precision, "--device", "cpu"]
    assert main(command) == 0
    return path


def test_comfyui_reads_int8_as_we_do(caplog):
    """It only logs a tensor that it lacks."""
    path = written("int8")
    caplog.clear()
    model, left_over = load(path)
    warnings = [it.getMessage() for it in caplog.records if it.levelno >= logging.WARNING]
    assert (warnings, left_over) == ([], [])
    found = {
        name: module.weight.dequantize()
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), QuantizedTensor)
    }
    stored = load_file(path)
    layers = [name.removesuffix(".weight") for name in stored if name.endswith(".weight")]
    assert set(found) == layers_to_quantize(layers)
    for layer, theirs in found.items():  # in the dtype that ComfyUI computes in on a CPU
        values, scale = stored[f"{layer}.weight"], stored[f"{layer}.weight_scale"]
        form = row_format("int8", values.shape[1])
        assert form.rotation in (64, 256)
        ours = StoredLayer.rounded(values, scale, form).dequantized(theirs.dtype)
        torch.testing.assert_close(theirs, ours)


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
        load(written("fp8"))
