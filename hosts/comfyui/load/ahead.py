"""Compiles what a transformer launches from the moment when a prompt names its file: ComfyUI may
load and run the text encoder before it loads that.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import comfy.model_management
import torch

from ....caches import remembered
from ....families.comfyui import kind_of_family
from ....loaders.quantize import row_format
from ....loaders.source import Source, joined_bytes
from ....loaders.stored import stored_format
from ....optimizations.blocks.block_form import DENSE, BlockForm, LayerForm, quantized_form
from ....optimizations.linear import known_gemm
from ....optimizations.warm_up import rehearse_forms, warm_up
from ....spec.formats import QUANTIZED
from .plan import LoadPlan, plan_load
from .transformer import KEEP_DTYPE, compile_trials

EPS = 1e-6  # of all norms in the blocks of both families
_asked: set[tuple] = remembered(set())


def compile_early(source: Source, requested: str, keep: Sequence[str]) -> None:
    """Begins to compile what a file loaded with these settings launches, once: the same nodes are
    checked with each prompt. A model that comes out otherwise is rehearsed when it is there.
    """
    device = comfy.model_management.get_torch_device()
    asked = device, source.state, requested, tuple(keep)
    if asked in _asked:
        return
    _asked.add(asked)

    def work() -> None:
        plan = plan_load(source, requested, keep)
        compile_trials(plan, device)
        warm_up(device, lambda: rehearse_plan(plan, device))

    warm_up(device, work)


def rehearse_plan(plan: LoadPlan, device: torch.device) -> None:
    """Rehearses a model that is not loaded; nothing where headers do not tell its layers."""
    quantization, shape = plan.source.part.quantization, plan.shape
    slow = any(it.get("full_precision_matrix_mult") for it in quantization.settings.values())
    if plan.packed or slow or (quantization.layers and joined_bytes(plan.source)):
        return
    sizes, like = shape.quantizable_layers(), shape.block
    spec = next(it for it in shape.family.blocks if it.told_by == like.told_by)  # as `spec_of`
    # GGUF's blocks are rounded anew.
    names = () if quantization.gguf else sizes
    found = {it: stored_format(quantization, it, sizes[it][1]) for it in names}
    stored = {layer: form for layer, form in found.items() if form}
    gemm = functools.cache(lambda storage: known_gemm(storage, device))

    def layer_form(layer: str, part: int | None) -> LayerForm:
        n, k = sizes[layer]
        # What the author of a quantized file left in bf16 stays so.
        dense = layer in plan.left or (stored and layer not in stored)
        if plan.precision not in QUANTIZED or dense:
            return LayerForm(DENSE)
        kind = row_format(plan.precision, k) if plan.rounded else stored[layer]
        return quantized_form(kind, gemm(kind.storage), n if part is None else n // 3, k)

    places = [*zip(spec.places, spec.thirds, strict=True)]
    forms = [
        BlockForm(
            spec,
            tuple(layer_form(f"{shape.family.stack}.{block}.{name}", it) for name, it in places),
            shape.heads,
            like.inner * shape.dim,
            eps=EPS,
            head_eps=EPS,
        )
        for block in range(shape.blocks)
    ]
    rehearse_forms(forms, shape.dim, _dtype(plan, device), device)


def _dtype(plan: LoadPlan, device: torch.device) -> torch.dtype:
    # As `transformer._model_config`, without the weights.
    config: Any = kind_of_family(plan.shape.family, plan.source.path).config
    supported, dtype = config.supported_inference_dtypes, None
    if plan.precision not in QUANTIZED:
        dtype = KEEP_DTYPE.get(plan.precision)
        dtype = dtype or comfy.model_management.unet_dtype(supported_dtypes=supported)
    return comfy.model_management.unet_manual_cast(dtype, device, supported) or dtype
