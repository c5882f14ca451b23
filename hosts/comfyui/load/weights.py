"""Brings a transformer's tensors into the chosen precision, under the names that ComfyUI reads.
`comfy.utils.load_torch_file` maps files; under dynamic VRAM its tensors also carry their place in
the file, from which the host reads straight to the card.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import comfy.memory_management
import comfy.model_management
import comfy.utils
import comfy_kitchen
import torch
from safetensors.torch import load_file

from ....loaders.gguf_blocks import BlockRows, map_gguf
from ....loaders.quantization import W4A8_GROUP, W4A8_ROTATION
from ....loaders.quantize import cast_fp8, expected_squares, not_finite
from ....loaders.slabs import IN_BF16, RoundedLayer, quantize_layers
from ....loaders.source import Source, check_unchanged
from ....loaders.stored import PackedLayer, StoredLayer, canonical_tensors
from ....loaders.writer import SUFFIX
from ....machine.memory import MappedPages
from ....spec.formats import QUANTIZED
from ....spec.sizes import STAGING_BYTES
from .plan import LoadPlan
from .report import FLOAT_NAMES, MOST_ERROR, what_stays, what_was_rounded, what_was_stored


def map_tensors(source: Source) -> dict[str, torch.Tensor | BlockRows]:
    """Returns {name without the part's prefix: tensor on the CPU}; file pages are read on use."""
    check_unchanged(source)
    tensors: dict[str, torch.Tensor | BlockRows] = {}
    prefix = source.part.prefix
    for header in source.shards.headers:
        found: Mapping[str, torch.Tensor | BlockRows]
        if header.gguf:
            found = map_gguf(header)
        elif header.path.suffix == SUFFIX:
            found = _load_kept(str(header.path))
        else:
            found = comfy.utils.load_torch_file(str(header.path))
        for name, tensor in found.items():
            if name.startswith(prefix):
                tensors[name.removeprefix(prefix)] = tensor
    return tensors


def _load_kept(path: str) -> dict[str, torch.Tensor]:
    # Not `load_torch_file`, which takes a file of this name for a pickle.
    dynamic = comfy.memory_management.aimdo_enabled
    tensors = comfy.utils.load_safetensors(path)[0] if dynamic else load_file(path)
    annotate = getattr(getattr(comfy, "storage", None), "annotate_state_dict", None)
    if annotate is not None:  # newer ComfyUI: by this it knows a fast disk
        annotate(tensors, path)
    return tensors


def transformer_tensors(
    plan: LoadPlan, device: torch.device
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Returns the state dict to load, and notes; reads only what it has to convert."""
    source, precision, quantization = plan.source, plan.precision, plan.source.part.quantization
    notes = what_was_stored(source, plan.packed)
    read = map_tensors(source), quantization, device
    weights: dict[str, Any] = dict(canonical_tensors(*read, packed=bool(plan.packed)))
    _join(plan.shape.family.joined, weights)
    to_round = _layers_to_round(plan, weights)
    ready: dict[str, torch.Tensor] = {}
    rounded, expanded = {*to_round}, []
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        if layer in rounded:
            continue
        stays = precision in QUANTIZED and layer not in plan.left
        if isinstance(weight, BlockRows):
            expanded.append(layer)
        elif stays and isinstance(weight, (StoredLayer, PackedLayer)):
            ready |= weight.tensors(layer)
        else:
            ready[name] = _plain(weight)

    def weight_of(layer: str) -> Any:
        weight = weights[f"{layer}.weight"]
        if quantization.layers.get(layer) == "fp8 e4m3, unscaled":
            return weight.weight
        return weight if isinstance(weight, BlockRows) else _plain(weight)

    if expanded:
        ready |= quantize_shown(source, sorted(expanded), weight_of, IN_BF16, device)
    if quantization.gguf and plan.packed:
        packed = [it for it in to_round if quantization.in_w4a8(it, weight_of(it).shape[1])]
        ready |= _in_w4a8(source, packed, weight_of, device)
        to_round = sorted({*to_round} - {*packed})
        notes.append(what_stays(len(packed), "w4a8", plan.packed))
    if to_round:
        most = MOST_ERROR if plan.automatic and precision == "int8" else math.inf
        ready |= quantize_shown(source, to_round, weight_of, precision, device, most=most)
        left = [layer for layer in to_round if f"{layer}.comfy_quant" not in ready]
        notes += what_was_rounded(precision, to_round, left)
    return ready, notes


def _layers_to_round(plan: LoadPlan, weights: Mapping[str, Any]) -> list[str]:
    if plan.precision not in QUANTIZED:
        return []
    layers = {it: weights[f"{it}.weight"] for it in sorted(plan.shape.quantizable_layers())}
    # What the author of a quantized file left in bf16 stays so.
    quantized = plan.packed or any(isinstance(it, StoredLayer) for it in layers.values())
    plain = plan.source.part.quantization.gguf or not quantized

    def is_rounded(weight: Any) -> bool:
        if isinstance(weight, StoredLayer):
            return plan.named and weight.format.split()[0] != plan.precision
        return plain and (not isinstance(weight, torch.Tensor) or weight.dtype in FLOAT_NAMES)

    return [it for it, weight in layers.items() if it not in plan.left and is_rounded(weight)]


def _in_w4a8(
    source: Source,
    layers: Sequence[str],
    weight_of: Callable[[str], BlockRows],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    comfy.model_management.free_memory(STAGING_BYTES, device)
    progress = comfy.utils.ProgressBar(len(layers))
    tensors: dict[str, torch.Tensor] = {}
    for layer in layers:
        entry = weight_of(layer)
        codes, groups, scale, _, codebook = comfy_kitchen.quantize_w4a8_int8_weight(
            entry.expand(entry.values.to(device)), W4A8_GROUP, W4A8_ROTATION
        )
        check_unchanged(source)
        if not scale.isfinite().all():
            raise not_finite(source.path, f"{layer}.weight")
        codes, groups, codebook = (it.cpu() for it in (codes, groups, codebook))
        packed = PackedLayer(codes, groups, codebook, 4, scale.cpu().reshape(-1, 1), W4A8_ROTATION)
        tensors |= packed.tensors(layer)
        progress.update(1)
    return tensors


def quantize_shown(
    source: Source,
    layers: Sequence[str],
    weight_of: Callable[[str], torch.Tensor | BlockRows],
    precision: str,
    device: torch.device,
    *,
    per_row: bool = True,
    most: float = math.inf,
) -> dict[str, torch.Tensor]:
    """Returns the tensors of rounded layers; makes room on the card, shows progress.

    Args:
        most: The relative error of int8 above which a layer becomes bf16.
    """
    comfy.model_management.free_memory(STAGING_BYTES, device)
    progress = comfy.utils.ProgressBar(len(layers))
    tensors: dict[str, torch.Tensor] = {}
    pages = MappedPages(source.files)

    def forget(weight: torch.Tensor) -> None:
        # Until then pages of the file count as this process's memory, beside what it makes of them.
        if weight.is_cpu:
            pages.give_back(weight.data_ptr(), weight.nbytes)

    def take(rounded: RoundedLayer) -> None:
        nonlocal tensors
        check_unchanged(source)
        layer, values, scale, form, error = rounded
        if precision == IN_BF16:
            tensors[f"{layer}.weight"] = values
        elif error is not None and error > most:
            plain = _plain(weight_of(layer))
            plain = cast_fp8(plain) if plain.itemsize == 1 else plain.to(torch.bfloat16)
            tensors[f"{layer}.weight"] = plain
        else:
            tensors |= StoredLayer.rounded(values, scale, form).tensors(layer)
        progress.update(1)  # raises when the user cancels the prompt

    refuse = functools.partial(not_finite, source.path)
    how: dict[str, Any] = {"per_row": per_row, "forget": forget}
    how["squares"] = expected_squares if most < math.inf else None
    quantize_layers(layers, weight_of, precision, device, take, refuse, **how)
    return tensors


def _join(joined: Mapping[str, tuple[str, ...]], weights: dict[str, Any]) -> None:
    """Puts layers that diffusers has apart into one, as ComfyUI's own files have them: a tuple of
    its parts where they are in a dtype to compute with.
    """
    found = [
        (name.removesuffix(f"{apart[0]}.weight"), whole, apart)
        for whole, apart in joined.items()
        for name in weights
        if name.endswith(f"{apart[0]}.weight")
    ]
    made: Any
    for block, whole, apart in found:
        parts = [weights.pop(f"{block}{it}.weight") for it in apart]
        form, *others = (
            isinstance(it, StoredLayer) and replace(it, weight=None, scale=None) for it in parts
        )
        if form and all(form == other for other in others):
            weight = torch.cat([it.weight for it in parts])
            scale = torch.cat([it.scale for it in parts])
            made = replace(form, weight=weight, scale=scale)
        elif all(isinstance(it, BlockRows) and it.dtype == parts[0].dtype for it in parts):
            made = replace(parts[0], values=torch.cat([it.values for it in parts]))
        else:
            made = tuple(map(_plain, parts))
        weights[f"{block}{whole}.weight"] = made


def _plain(weight: Any) -> torch.Tensor:
    if isinstance(weight, tuple):
        return torch.cat(weight)
    return weight if isinstance(weight, torch.Tensor) else weight.dequantized()
