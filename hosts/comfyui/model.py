"""Loads a Qwen-Image transformer into a ComfyUI MODEL.

The module is ComfyUI's own, built from the sizes in the file instead of from constants, so that
models of other widths load too. Without quantized layers it runs with ComfyUI's own operations and
gives bit for bit what ComfyUI's own loader gives.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import comfy.memory_management
import comfy.model_detection
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import comfy.utils
import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP

from ...errors import CheckpointError
from ...loaders.quantized_plan import MARKER_2511
from ...loaders.source import Source, open_source
from ...loaders.transformer_tensors import check_complete
from ...optimizations.linear import choose_gemm
from ...optimizations.weight_stream import reserve_ring
from ...planning.memory import QUANTIZED, TransformerShape
from .booking import book_what_is_needed
from .finite import check_first_step
from .modulation import KEY, ModelModulation
from .off_card import OffCardDynamicPatcher, OffCardPatcher, off_card_layers, take_off_card
from .operations import quantized_operations
from .precision import choose
from .report import LoadReport
from .sampling_record import record_runs
from .tensors import map_tensors
from .weights import prepare

KEEP_DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32}


def load_model(
    path: str | os.PathLike[str],
    precision: str = "auto",
    keep: Sequence[str] = (),
    modulation: str = "auto",
) -> tuple[comfy.model_patcher.ModelPatcher, LoadReport]:
    """Loads the transformer behind `path`, with a report of what was done and why.

    Args:
        path: a safetensors file, a sharded or component folder, or a diffusers folder.
        precision: auto, bf16, fp8, int8 or "as stored".
        keep: shell patterns of layers that stay in bf16 when the others are quantized.
        modulation: where a third of the weights waits, one of `planning.placement.PLACES`.

    Raises:
        CheckpointError: the file is not a Qwen-Image transformer, or is damaged.
        SettingError: the precision or the place is unknown, or a pattern matches no layer.
        UnavailableError: the precision cannot be had on this card, or memory does not suffice.
    """
    source = open_source(path, "transformer")
    shape = check_complete(source)
    choice, place = choose(source, shape, precision, keep, modulation)
    settings = (choice.name, tuple(keep), precision in QUANTIZED, place.off_card)
    patcher, notes = _load(path, source, shape, *settings)
    if place.reason:
        notes.append(f"{place.reason[0].upper()}{place.reason[1:]}.")
    if choice.name in QUANTIZED:
        notes.append(f"{choose_gemm(choice.name, patcher.load_device)}.")
    report = LoadReport(
        what="transformer",
        path=source.path,
        family=source.part.family,
        precision=_held_in(patcher, choice.name),
        reason=choice.reason,
        bytes=patcher.model_size(),
        notes=tuple(notes),
    )
    return patcher, report


def load_patcher(
    path: str,
    precision: str,
    keep: Sequence[str],
    named: bool,
    off_card: bool,
    disable_dynamic: bool = False,
) -> comfy.model_patcher.ModelPatcher:
    """Loads the same model once more: ComfyUI calls it for MultiGPU clones, and without dynamic
    VRAM for torch.compile and hooks.
    """
    source = open_source(path, "transformer")
    shape = check_complete(source)
    settings = (precision, tuple(keep), named, off_card, disable_dynamic)
    return _load(path, source, shape, *settings)[0]


def _load(
    path: str | os.PathLike[str],
    source: Source,
    shape: TransformerShape,
    precision: str,
    keep: tuple[str, ...],
    named: bool,
    off_card: bool,
    disable_dynamic: bool = False,
) -> tuple[comfy.model_patcher.ModelPatcher, list[str]]:
    load_device = comfy.model_management.get_torch_device()
    offload_device = comfy.model_management.unet_offload_device()
    mapped = map_tensors(source)
    try:
        tensors, notes = prepare(source, mapped, precision, keep, load_device, named=named)
    except CheckpointError as error:
        raise CheckpointError(f"{source.path}: {error}") from error
    if source.config.get("zero_cond_t") is True:  # as ComfyUI's own files say it
        tensors.setdefault(MARKER_2511, torch.empty(0))
    config = _model_config(source, shape, tensors, precision, load_device)
    model = config.get_model(tensors, "")
    dynamic = not disable_dynamic and comfy.memory_management.aimdo_enabled
    if off_card:
        take_off_card(model)
        patcher_class = OffCardDynamicPatcher if dynamic else OffCardPatcher
    elif dynamic:
        patcher_class = comfy.model_patcher.CoreModelPatcher
    else:
        patcher_class = comfy.model_patcher.ModelPatcher
    patcher = patcher_class(model, load_device=load_device, offload_device=offload_device)
    if not comfy.model_management.is_device_cpu(offload_device):
        model.to(offload_device)
    assign = patcher.is_dynamic()
    if not assign and precision not in QUANTIZED and source.part.quantization.layers:
        # What was dequantized is taken over; copied, as mapped tensors are, it would be held twice.
        tensors = {name: _in_dtype_of(model, tensor) for name, tensor in tensors.items()}
        assign = True
    model.load_model_weights(tensors, "", assign=assign)
    record_runs(patcher)
    if off_card:
        if load_device.type == "cuda":
            reserve_ring()
        patcher.size = _bytes_on_card(model)
        if not patcher.is_dynamic() and precision not in QUANTIZED:
            book_what_is_needed(model, patcher.size, load_device)
        patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, ModelModulation.apply_model)
        patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, ModelModulation.outer_sample)
        patcher.add_callback_with_key(CallbacksMP.ON_DETACH, KEY, ModelModulation.on_detach)
    check_first_step(patcher, source.path)
    settings = (os.fspath(path), precision, keep, named, off_card)
    patcher.cached_patcher_init = (load_patcher, settings)
    return patcher, notes


def _bytes_on_card(model: torch.nn.Module) -> int:
    off_card = sum(layer.nbytes for layer in off_card_layers(model))
    return comfy.model_management.module_size(model) - off_card


def _in_dtype_of(model: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(model.get_dtype()) if tensor.is_floating_point() else tensor


def _held_in(patcher: comfy.model_patcher.ModelPatcher, precision: str) -> str:
    """The precision that the weights ended up in: ComfyUI has none of fp16 for this model."""
    if precision in QUANTIZED:
        return precision
    names = {dtype: name for name, dtype in KEEP_DTYPE.items()}
    return names.get(patcher.model.get_dtype(), precision)


def _model_config(
    source: Source,
    shape: TransformerShape,
    tensors: dict[str, torch.Tensor],
    precision: str,
    device: torch.device,
) -> comfy.supported_models.QwenImage:
    """ComfyUI's configuration of the model, with the dtypes that its own loader would choose."""
    config = comfy.supported_models.QwenImage(_unet_config(source, shape, tensors))
    supported = config.supported_inference_dtypes
    quantized = any(name.endswith(".comfy_quant") for name in tensors)
    dtype = KEEP_DTYPE.get(precision)
    if dtype is None or quantized:
        parameters = comfy.utils.calculate_parameters(tensors)
        stored = None if quantized else comfy.utils.weight_dtype(tensors)
        dtype = comfy.model_management.unet_dtype(
            model_params=parameters, supported_dtypes=supported, weight_dtype=stored
        )
    cast = comfy.model_management.unet_manual_cast(None if quantized else dtype, device, supported)
    config.set_inference_dtype(dtype, cast, device=device)
    if quantized:
        config.custom_operations = quantized_operations(cast or dtype)
    return config


def _unet_config(
    source: Source, shape: TransformerShape, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """What ComfyUI detects itself, completed by the sizes that it takes for granted."""
    config = comfy.model_detection.detect_unet_config(tensors, "")
    config.update(
        num_attention_heads=shape.heads,
        attention_head_dim=shape.head_dim,
        joint_attention_dim=shape.joint_dim,
        out_channels=shape.packed_out_channels // 4,
        **_rope_axes(source, shape.head_dim),
    )
    return config


def _rope_axes(source: Source, head_dim: int) -> dict[str, tuple[int, ...]]:
    """The split of a head over time, height and width, which no tensor tells."""
    axes = source.config.get("axes_dims_rope")
    if axes is None and head_dim == 128:
        return {}  # the published models: ComfyUI's default
    if not isinstance(axes, list) or len(axes) != 3 or sum(axes) != head_dim:
        raise CheckpointError(
            f"{source.path} has heads of {head_dim} and its config.json says axes_dims_rope "
            f"{axes}: three numbers that add up to {head_dim} are needed, so put the config.json "
            "of the model beside its weights."
        )
    return {"axes_dims_rope": tuple(axes)}
