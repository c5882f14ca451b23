"""Brings a transformer's tensors into the precision that was chosen, in the names ComfyUI reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import comfy.model_management
import comfy.utils
import torch

from ...loaders.precision import format_bytes
from ...loaders.quantize import (
    FORMATS,
    comfy_quant_tensor,
    layers_to_quantize,
)
from ...loaders.quantize_stream import quantize_layers
from ...loaders.source import Source
from ...loaders.stored_weights import StoredLayer, canonical_tensors
from .precision import STAGING_BYTES

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def prepare(
    source: Source,
    tensors: dict[str, torch.Tensor],
    precision: str,
    keep: Sequence[str],
    device: torch.device,
    *,
    named: bool,
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Returns the state dict to load, and sentences about what was changed on the way.

    Args:
        tensors: the file's, mapped; this function reads only what it has to convert.
        precision: bf16, fp16, fp32, fp8 or int8.
        keep: patterns of layers that stay in bf16.
        device: where weights are rounded.
        named: whether the user named the precision: only then one quantized format is converted
            into another, in files that hold both as well.

    Raises:
        CheckpointError: a weight or a scale cannot be used; the message names it.
        SettingError: a pattern in `keep` matches no layer.
    """
    notes = _what_was_stored(source)
    ready: dict[str, torch.Tensor] = {}
    stored: dict[str, StoredLayer] = {}
    for name, entry in canonical_tensors(tensors, source.part.quantization):
        if isinstance(entry, StoredLayer):
            stored[name] = entry
        else:
            ready[name] = entry
    linear = [
        *stored,
        *(_layer(name) for name, tensor in ready.items() if _is_weight(name, tensor)),
    ]
    quantizable = layers_to_quantize(linear)
    kept = quantizable - layers_to_quantize(linear, keep)

    to_round = []
    # What the author of a quantized file left in bf16 stays so.
    if precision in FORMATS and not quantizable & stored.keys():
        to_round = sorted(quantizable - kept)
    for layer, entry in stored.items():
        if precision not in FORMATS or layer in kept:
            ready[f"{layer}.weight"] = entry.dequantized()
        elif named and layer in quantizable and entry.format.split()[0] != precision:
            to_round.append(layer)
        else:
            ready |= entry.tensors(layer)

    def weight_of(layer: str) -> torch.Tensor:
        entry = stored.get(layer)
        return ready[f"{layer}.weight"] if entry is None else entry.dequantized()

    if to_round:
        comfy.model_management.free_memory(STAGING_BYTES, device)
        progress = comfy.utils.ProgressBar(len(to_round))
        # The bar raises when the user cancels the prompt.
        rounded = quantize_layers(
            to_round, weight_of, precision, device, lambda: progress.update(1)
        )
        for layer, (values, scale) in rounded.items():
            ready[f"{layer}.weight"] = values
            ready[f"{layer}.weight_scale"] = scale
            ready[f"{layer}.comfy_quant"] = comfy_quant_tensor(precision)
        notes.append(f"{len(to_round)} layers quantized to {precision}, one scale for each row.")
    if kept and precision in FORMATS:
        extra = sum(ready[f"{layer}.weight"].nbytes for layer in kept) // 2
        notes.append(f"{len(kept)} layers kept in bf16, which takes {format_bytes(extra)} more.")
    return ready, notes


def _is_weight(name: str, tensor: torch.Tensor) -> bool:
    return name.endswith(".weight") and tensor.dim() == 2 and tensor.dtype in FLOATS


def _layer(name: str) -> str:
    return name.removesuffix(".weight")


def _what_was_stored(source: Source) -> list[str]:
    notes = []
    formats = Counter(source.part.quantization.layers.values())
    for name, count in formats.most_common():
        if name == "fp8 e4m3, unscaled":
            notes.append(
                f"{count} layers are stored in e4m3 without scales, which an fp8 GEMM with a fixed "
                "scale for activations spoils: here they are scaled for each token."
            )
        elif name == "fp8 e4m3, scaled":
            notes.append(
                f"{count} layers are stored in e4m3 with one scale each: it is applied to every "
                "row, and activations are scaled for each token instead of by a stored scale."
            )
        elif name.startswith("fp8 e5m2"):
            notes.append(f"{count} layers stored in {name} were converted to bf16.")
    return notes
