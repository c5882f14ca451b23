"""Brings the weights of a Qwen2.5-VL into a form that ComfyUI's own layers load.

ComfyUI computes this encoder in fp32 and dequantizes each layer for it, so a quantized text encoder
saves memory and reading, and only the error of the weights counts. What ComfyUI has no format for
becomes bf16.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import comfy.model_management
import comfy.utils
import torch

from ...errors import CheckpointError
from ...loaders.quantize_stream import quantize_layers
from ...loaders.source import Source
from ...loaders.stored_weights import KINDS, StoredLayer, accompanies, stored_layers
from ...loaders.tensor_checks import check_finite
from .precision import STAGING_BYTES
from .qwen25 import Layout

LANGUAGE_LINEAR = re.compile(
    r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.weight"
)
PLAIN = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Prepared:
    """What ComfyUI is to load.

    Args:
        tensors: {native name: tensor}; mapped, unless they were converted.
        converted: whether any is a new tensor in plain memory.
        precision: what most of the language model is held in, in words.
        notes: sentences about what was changed.
    """

    tensors: dict[str, torch.Tensor]
    converted: bool
    precision: str
    notes: tuple[str, ...]


def prepare(
    source: Source, layout: Layout, mapped: Mapping[str, torch.Tensor], precision: str
) -> Prepared:
    """Converts what has to be; of the rest nothing is read but vectors and scales.

    Args:
        mapped: {name in the file, less its prefix: tensor}.
        precision: bf16, fp8 or int8, of the language model's linear layers; anything else leaves
            all as stored.

    Raises:
        CheckpointError: a weight or a scale cannot be used; the message names it.
    """
    target = precision if precision in ("bf16", "fp8", "int8") else None
    tensors = {native: mapped[name] for native, name in layout.names.items()}
    stored = _stored(source, layout, tensors)
    ready: dict[str, torch.Tensor] = {}
    to_round: list[str] = []
    converted = False
    for native, tensor in tensors.items():
        if accompanies(native):
            continue
        layer = native.removesuffix(".weight")
        entry = stored.get(layer)
        fits = entry is not None and _fits_core(entry)
        if target in ("fp8", "int8") and LANGUAGE_LINEAR.fullmatch(native):
            if fits and KINDS[tensor.dtype] == target:
                ready |= entry.tensors(layer)
            else:
                to_round.append(layer)
        elif fits and target != "bf16":
            ready |= entry.tensors(layer)
        else:
            plain = entry.dequantized() if entry else _plain(tensor, target)
            if plain is not tensor or tensor.dim() < 2:
                check_finite(source.path, native, plain)
            converted |= plain is not tensor
            ready[native] = plain

    def weight_of(layer: str) -> torch.Tensor:
        entry = stored.get(layer)
        return entry.dequantized(torch.float32) if entry else tensors[f"{layer}.weight"]

    if to_round:
        ready |= _rounded(source.path, to_round, weight_of, target)
    return Prepared(
        tensors=ready,
        converted=converted or bool(to_round),
        precision=_precision(ready),
        notes=tuple(_notes(stored, to_round, target)),
    )


def _stored(
    source: Source, layout: Layout, tensors: Mapping[str, torch.Tensor]
) -> dict[str, StoredLayer]:
    declared = source.part.quantization.settings
    settings = {
        native.removesuffix(".weight"): declared.get(name.removesuffix(".weight"), {})
        for native, name in layout.names.items()
    }
    try:
        return stored_layers(tensors, settings)
    except CheckpointError as error:
        raise CheckpointError(f"{source.path}: {error}") from error


def _fits_core(entry: StoredLayer) -> bool:
    """Whether ComfyUI's own layers take it: their fp8 has one scale for the weight."""
    return entry.weight.dtype == torch.int8 or entry.scale.dim() == 0


def _plain(tensor: torch.Tensor, target: str | None) -> torch.Tensor:
    """As stored, or in bf16 where that was asked for or the dtype is none to compute with."""
    keep = tensor.dtype in PLAIN and target is None
    return tensor if keep else tensor.to(torch.bfloat16)


def _rounded(
    path: Path, layers: list[str], weight_of: Callable[[str], torch.Tensor], target: str
) -> dict[str, torch.Tensor]:
    """Quantizes layers one by one, on the card if there is one."""
    device = comfy.model_management.get_torch_device()
    shapes: dict[str, torch.Size] = {}

    def matrix(layer: str) -> torch.Tensor:
        weight = weight_of(layer)
        shapes[layer] = weight.shape
        # fp8 has one scale for the whole weight, which is then one row.
        return weight.reshape(1, -1) if target == "fp8" else weight

    comfy.model_management.free_memory(STAGING_BYTES, device)
    progress = comfy.utils.ProgressBar(len(layers))
    try:
        # The bar raises when the user cancels the prompt.
        rounded = quantize_layers(layers, matrix, target, device, lambda: progress.update(1))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    ready: dict[str, torch.Tensor] = {}
    for layer, (values, scale) in rounded.items():
        scale = scale.reshape(()) if target == "fp8" else scale
        ready |= StoredLayer(values.reshape(shapes[layer]), scale, target).tensors(layer)
    return ready


def _precision(tensors: Mapping[str, torch.Tensor]) -> str:
    names = {**PLAIN, **KINDS}
    found = {
        names[tensor.dtype] for name, tensor in tensors.items() if LANGUAGE_LINEAR.fullmatch(name)
    }
    return " and ".join(sorted(found))


def _notes(stored: Mapping[str, StoredLayer], rounded: list[str], target: str | None) -> list[str]:
    notes = []
    if rounded:
        scales = "one scale for each " + ("weight" if target == "fp8" else "row")
        notes.append(
            f"{len(rounded)} layers quantized to {target}, {scales}; embedding, norms and vision "
            "tower are not"
        )
    if twice := sum(layer in stored for layer in rounded):
        notes.append(f"{twice} of them were quantized in the file: both errors add up")
    if stored and target == "bf16":
        notes.append("dequantized, which does not bring back what the file's format lost")
    elif odd := sum(not _fits_core(stored[layer]) for layer in stored.keys() - set(rounded)):
        notes.append(
            f"{odd} layers in fp8 with one scale for each row became bf16: ComfyUI's layers take "
            "one for the weight"
        )
    if any(_is_unscaled(entry) for entry in stored.values()):
        notes.append(
            "the file's fp8 has no scales, which loses small weights: a scaled or a bf16 file "
            "follows prompts more closely"
        )
    return notes


def _is_unscaled(entry: StoredLayer) -> bool:
    return entry.format == "fp8" and entry.scale.dim() == 0 and float(entry.scale) == 1.0
