"""Qwen-Image transformers of random weights as ComfyUI models, built on the device they run on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.quant_ops
import comfy.supported_models
import comfy.utils
import torch

from ...loaders.quantize import comfy_quant_tensor, quantize_rows
from ...loaders.quantized_plan import MARKER_2511
from ...loaders.random_weights import quantizable_weights, random_tensors
from ...planning.formats import LARGEST
from ...planning.memory import TransformerShape
from ...planning.work import rope_axes
from .operations import quantized_operations

CORE_FORMATS = {"fp8": "float8_e4m3fn", "int8": "int8_tensorwise"}
Tensors = dict[str, torch.Tensor]


def bf16_model(
    shape: TransformerShape, weights: Mapping[str, torch.Tensor], device: torch.device, edit: bool
) -> comfy.model_patcher.ModelPatcher:
    """ComfyUI's own model over tensors that are on the device already and are not copied.

    Args:
        edit: Whether it is an Edit-2511, which modulates references as at timestep zero.
    """
    return _patcher(shape, dict(weights), device, edit, build_on="meta")


@torch.inference_mode()  # as loader nodes run: quantized tensors cannot enter it later
def quantized_model(
    shape: TransformerShape, precision: str, device: torch.device, edit: bool, *, stock: bool
) -> comfy.model_patcher.ModelPatcher:
    """The same weights in fp8 or int8, made tensor by tensor.

    Args:
        stock: As ComfyUI's own files and operations have it (fp8 and int8 with one scale a tensor);
            else as this package's loader does (one scale a row).
    """
    chosen = quantizable_weights(shape)
    tensors: Tensors = {}
    for name, tensor in random_tensors(shape, device):
        if name not in chosen:
            tensors[name] = tensor
            continue
        layer = name.removesuffix(".weight")
        quantize = _core_quantized if stock else _quantized
        values, scale, marker = quantize(tensor, precision)
        tensors[name] = values
        tensors[f"{layer}.weight_scale"] = scale
        tensors[f"{layer}.comfy_quant"] = marker
    operations = None if stock else quantized_operations(torch.bfloat16)
    return _patcher(shape, tensors, device, edit, build_on=device, operations=operations)


def forget_models() -> None:
    """Makes ComfyUI forget its models; without references of the caller's their memory is free."""
    comfy.model_management.unload_all_models()


def _quantized(weight: torch.Tensor, precision: str) -> tuple[torch.Tensor, ...]:
    return (*quantize_rows(weight, precision), comfy_quant_tensor(precision))


def _core_quantized(weight: torch.Tensor, precision: str) -> tuple[torch.Tensor, ...]:
    name = CORE_FORMATS[precision]
    marker = torch.tensor(list(json.dumps({"format": name}).encode()), dtype=torch.uint8)
    if precision == "fp8":  # what the published scaled files hold
        scale = weight.abs().amax().float() / LARGEST["fp8"]
        return (weight.float() / scale).to(torch.float8_e4m3fn), scale, marker
    layout = comfy.quant_ops.QUANT_ALGOS[name]["comfy_tensor_layout"]
    stored = comfy.quant_ops.QuantizedTensor.from_float(weight, layout)
    return stored._qdata, stored._params.scale, marker


def _patcher(
    shape: TransformerShape,
    tensors: Tensors,
    device: torch.device,
    edit: bool,
    *,
    build_on: torch.device | str,
    operations: type | None = None,
) -> comfy.model_patcher.ModelPatcher:
    """As `load_diffusion_model_state_dict` in comfy/sd.py, without its way over host memory."""
    if edit:
        tensors[MARKER_2511] = torch.empty(0)
    config = comfy.supported_models.QwenImage(_unet_config(shape, edit))
    config.quant_config = comfy.utils.detect_layer_quantization(tensors, "")
    config.set_inference_dtype(torch.bfloat16, torch.bfloat16 if config.quant_config else None)
    config.custom_operations = operations
    model = config.get_model(tensors, "", device=build_on)
    model.device = device
    model.load_model_weights(tensors, "", assign=build_on == "meta")
    return comfy.model_patcher.CoreModelPatcher(model, load_device=device, offload_device=device)


def _unet_config(shape: TransformerShape, edit: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "image_model": "qwen_image",
        "in_channels": shape.in_channels,
        "out_channels": shape.packed_out_channels // 4,
        "num_layers": shape.blocks,
        "num_attention_heads": shape.heads,
        "attention_head_dim": shape.head_dim,
        "joint_attention_dim": shape.joint_dim,
        "axes_dims_rope": rope_axes(shape.head_dim),
    }
    if edit:
        config["default_ref_method"] = "index_timestep_zero"
    return config
