"""Loads a Qwen-Image transformer into a ComfyUI MODEL: ComfyUI's own module, built from the sizes
in the file. Without quantized layers it runs with ComfyUI's own operations and gives bit for bit
what ComfyUI's own loader gives.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import comfy.memory_management
import comfy.model_detection
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrappersMP

from ....errors import CheckpointError
from ....families.comfyui import kind_of_family
from ....families.registry import marker_titled
from ....loaders.quantize import row_format
from ....loaders.rounding import compile_rounding
from ....loaders.source import (
    Source,
    joined_bytes,
    open_source,
)
from ....optimizations import fused, linear
from ....optimizations.patches import put
from ....spec.formats import QUANTIZED
from ..linear import quantized_operations
from ..lora.bypass import compute_loras
from ..prepared import PreparedPatcher
from ..sample.measure import SAMPLING_KEY, measure_sampling
from ..sample.modulation import MODULATION_KEY, ModelModulation
from ..sample.off_card import (
    OffCardDynamicPatcher,
    OffCardPatcher,
    off_card_layers,
    require_less_memory,
    take_off_card,
)
from ..sample.run import FINITE_KEY, PARTS_KEY, FirstRun, check_parts
from .plan import LoadPlan, plan_load
from .report import LoadReport, transformer_report, what_is_not_quantized
from .weights import transformer_tensors

NOT_KEPT = "cache_quantized_file would save the quantized weights for the next load."
KEEP_DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32}


def load_model(
    path: str | os.PathLike[str] | Source,
    precision: str = "auto",
    keep: Sequence[str] = (),
    modulation: str = "auto",
    keep_quantized: bool = False,
) -> tuple[ModelPatcher, LoadReport]:
    """Loads the transformer behind `path`, with a report of what was done and why.

    Args:
        path: a safetensors file, a sharded or component folder, a diffusers folder, or one of them
            as `open_source` read it.
        precision: auto, bf16, fp8, int8 or "as stored".
        keep: shell patterns of layers that stay in bf16 when the others are quantized.
        modulation: where a third of the weights waits, one of `spec.transformer.PLACES`.
        keep_quantized: whether what is rounded on load is kept in a file, and taken from there.

    Raises:
        CheckpointError: the file is not a Qwen-Image transformer, or is damaged.
        SettingError: the precision or the place is unknown, or a pattern matches no layer.
        UnavailableError: the precision cannot be had on this card, memory does not suffice, or
            this ComfyUI is older than the model.
    """
    source = open_source(path, "transformer")
    plan = plan_load(source, precision, keep, modulation, keep_quantized)
    compile_trials(plan, comfy.model_management.get_torch_device())
    patcher, notes = _build(plan)
    return patcher, transformer_report(plan, patcher, notes)


def compile_trials(plan: LoadPlan, device: torch.device) -> None:
    """Begins to compile what loading a transformer launches, then what its kernels' trials do."""
    columns = {columns for _, columns in plan.shape.quantizable_layers().values()}
    forms = [(row_format(plan.precision, it), it) for it in columns if plan.rounded]
    quantized = plan.precision in QUANTIZED
    trials = [partial(linear.prepare_trial, plan.precision)] if quantized else []
    compile_rounding(device, torch.bfloat16, forms, *trials, fused.prepare_trial)


def load_patcher(plan: LoadPlan, disable_dynamic: bool = False) -> ModelPatcher:
    """Loads the same model once more: ComfyUI calls it for MultiGPU clones, and without dynamic
    VRAM for torch.compile and hooks.
    """
    return _build(plan, disable_dynamic)[0]


def _read(
    plan: LoadPlan, source: Source, device: torch.device
) -> tuple[dict[str, torch.Tensor], list[str]]:
    try:
        return transformer_tensors(replace(plan, source=source), device)
    except CheckpointError as error:
        raise CheckpointError(error, source.path) from error


def _build(plan: LoadPlan, disable_dynamic: bool = False) -> tuple[ModelPatcher, list[str]]:
    load_device = comfy.model_management.get_torch_device()
    offload_device = comfy.model_management.unet_offload_device()
    source, quantized = plan.source, plan.precision in QUANTIZED
    taken = plan.kept and plan.kept.open()
    try:
        tensors, notes = _read(plan, taken or source, load_device)
    except CheckpointError:
        if not taken:
            raise
        plan.kept.damaged, taken = True, None
        tensors, notes = _read(plan, source, load_device)
    if taken:
        notes.append(
            f"cache_quantized_file: weights from the cached quantized file {taken.path.name}."
        )
    elif plan.rounded:
        notes.append(plan.kept.write(tensors) if plan.kept else NOT_KEPT)
    if marker := marker_titled(source.part.family):
        tensors.setdefault(marker, torch.empty(0))
    model = _model_config(plan, tensors, load_device).get_model(tensors, "")
    if quantized:
        left = [tensors[f"{layer}.weight"] for layer in plan.left]
        notes += what_is_not_quantized(model.get_dtype(), left)
    dynamic = not disable_dynamic and comfy.memory_management.aimdo_enabled
    if plan.off_card:
        take_off_card(model)
        patcher_class = OffCardDynamicPatcher if dynamic else OffCardPatcher
    else:
        patcher_class = PreparedPatcher if dynamic else ModelPatcher
    patcher = patcher_class(
        model,
        load_device=load_device,
        offload_device=offload_device,
        **_fast_disk(patcher_class, tensors),
    )
    if not comfy.model_management.is_device_cpu(offload_device):
        model.to(offload_device)
    assign = patcher.is_dynamic()
    if not assign and not quantized and (source.part.quantization.layers or joined_bytes(source)):
        # What was converted is taken over; copied, as mapped tensors are, it would exist twice.
        dtype = model.get_dtype()
        tensors = {
            name: it.to(dtype) if it.is_floating_point() else it for name, it in tensors.items()
        }
        assign = True
    model.load_model_weights(tensors, "", assign=assign)
    patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, SAMPLING_KEY, measure_sampling)
    patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, PARTS_KEY, check_parts)
    compute_loras(patcher)
    if plan.off_card:
        _keep_off_card(patcher, quantized)
    first = FirstRun((taken or source).path)
    patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, FINITE_KEY, first.apply_model)
    patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, FINITE_KEY, first.outer_sample)
    # By it ComfyUI loads a model again: for another GPU, and without dynamic VRAM.
    put(patcher, cached_patcher_init=(load_patcher, (plan,)))
    return patcher, notes


def _fast_disk(
    patcher_class: type[ModelPatcher], tensors: dict[str, torch.Tensor]
) -> dict[str, bool]:
    # From a fast disk dynamic VRAM reads weights again rather than hold a pinned copy of them.
    find = getattr(getattr(comfy, "storage", None), "state_dict_fast_disk", None)
    if find is None or "fast_disk" not in inspect.signature(patcher_class.__init__).parameters:
        return {}
    # Weights made at load have no file behind them, although norms and biases beside them do.
    made = any(
        name.endswith(".weight")
        and tensor.dim() == 2
        and not hasattr(tensor.untyped_storage(), "_comfy_source_path")
        for name, tensor in tensors.items()
    )
    return {"fast_disk": not made and find(tensors)}


def _keep_off_card(patcher: ModelPatcher, quantized: bool) -> None:
    model, device = patcher.model, patcher.load_device
    off_card = sum(layer.nbytes for layer in off_card_layers(model))
    # ComfyUI would count what stays in system RAM.
    put(patcher, size=comfy.model_management.module_size(model) - off_card)
    if not patcher.is_dynamic() and not quantized:
        require_less_memory(model, patcher.size, device)
    for wrapper, function in (
        (WrappersMP.APPLY_MODEL, ModelModulation.apply_model),
        (WrappersMP.OUTER_SAMPLE, ModelModulation.outer_sample),
    ):
        patcher.add_wrapper_with_key(wrapper, MODULATION_KEY, function)
    patcher.add_callback_with_key(CallbacksMP.ON_DETACH, MODULATION_KEY, ModelModulation.on_detach)


def _model_config(
    plan: LoadPlan, tensors: dict[str, torch.Tensor], device: torch.device
) -> comfy.supported_models.BASE:
    """Returns ComfyUI's configuration of the model, with the dtypes that its loader chooses."""
    kind = kind_of_family(plan.shape.family, plan.source.path)
    sizes: dict[str, Any] = comfy.model_detection.detect_unet_config(tensors, "")
    try:
        sizes.update(plan.shape.comfyui_config(plan.source.config))
    except CheckpointError as error:
        raise CheckpointError(error, plan.source.path) from error
    config = kind.config(sizes)
    supported = config.supported_inference_dtypes
    quantized = any(name.endswith(".comfy_quant") for name in tensors)
    dtype = KEEP_DTYPE.get(plan.precision)
    if dtype is None or quantized:
        parameters = comfy.utils.calculate_parameters(tensors)
        stored = None if quantized else comfy.utils.weight_dtype(tensors)
        dtype = comfy.model_management.unet_dtype(
            model_params=parameters, supported_dtypes=supported, weight_dtype=stored
        )
    cast = comfy.model_management.unet_manual_cast(None if quantized else dtype, device, supported)
    config.set_inference_dtype(dtype, cast, device=device)
    if quantized:
        put(config, custom_operations=quantized_operations(cast or dtype))
    return config
