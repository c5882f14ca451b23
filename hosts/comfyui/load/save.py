"""Writes a MODEL's transformer in fp8 or int8, with the LoRAs that were merged into it.

A LoRA is added to the weight that was loaded and the sum is rounded once, so that from a bf16 MODEL
nothing is rounded twice. One weight at a time is in work.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor

from .... import __version__
from ....errors import CheckpointError, SettingError, UnavailableError
from ....loaders.convert import is_finite
from ....loaders.precision import format_bytes
from ....loaders.quantize import COMFY_QUANT, DTYPES, FORMATS, layers_to_quantize, quantize_rows
from ....loaders.quantized_file import READERS
from ....loaders.source import METADATA_KEY
from ....loaders.stored import StoredLayer
from ....loaders.writer import DTYPES as FILE_DTYPES
from ....loaders.writer import SafetensorsLayout, write_safetensors
from .precision import STAGING_BYTES
from .weights import PREFIX, Tensors, layer_as_held, loaded_weights, with_patches

DTYPE_NAMES = {dtype: name for name, dtype in FILE_DTYPES.items()}


@dataclass(frozen=True)
class SavedModel:
    """What was written.

    Args:
        bytes: of the file.
        quantized: layers in `precision`.
        twice: those of them that the model held in another quantized form, or with a LoRA.
        merged: tensors that LoRAs or other patches changed.
    """

    path: Path
    precision: str
    bytes: int
    quantized: int
    twice: int
    merged: int

    def text(self) -> str:
        """Returns a few lines for the node."""
        lines = [
            f"{self.path.name}: {format_bytes(self.bytes)}, {self.quantized} layers in "
            f"{self.precision}, for {READERS[self.precision]}"
        ]
        if self.merged:
            lines.append(f"{self.merged} weights with LoRAs merged into them")
        if self.twice:
            lines.append(
                f"{self.twice} layers were quantized in the model already and were rounded a "
                "second time, so that both errors add up: start from bf16 to round once"
            )
        return "\n".join(lines)


def save_quantized(
    model: ModelPatcher,
    destination: Path,
    precision: str,
    keep: Sequence[str] = (),
    *,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SavedModel:
    """Writes the file whole, or not at all.

    Layers that are quantized in `precision` already, and that no LoRA changes, are written as they
    are. Everything else that is not quantized becomes bf16.

    Args:
        model: of any loader; loaded on a card or not.
        precision: fp8 or int8.
        keep: shell patterns of layers that stay in bf16, or become it.
        progress: called with the tensors that are done and their number; may raise to cancel.

    Raises:
        SettingError: the precision, a pattern or the destination cannot be used, or the model has a
            LoRA beside its weights.
        CheckpointError: the model is not a Qwen-Image transformer, or a weight is not finite.
        UnavailableError: the disk does not take the file.
    """
    if precision not in FORMATS:
        raise SettingError(f"precision {precision!r} is unknown: choose {' or '.join(FORMATS)}.")
    _check_destination(destination, overwrite=overwrite)
    device = comfy.model_management.get_torch_device()
    comfy.model_management.free_memory(STAGING_BYTES, device)
    weights = loaded_weights(model)
    layers = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
    chosen = layers_to_quantize(layers, keep)
    if not chosen:
        raise SettingError("the keep patterns leave no layer to quantize: name fewer layers.")
    kept = layers_to_quantize(layers) - chosen
    taken_over = {
        layer: entry
        for layer in layers
        if layer not in kept and (entry := layer_as_held(model, layer, weights, precision))
    }
    quantized = chosen | taken_over.keys()
    layout = SafetensorsLayout(
        _specs(weights, quantized, taken_over, precision), _metadata(model, precision, keep)
    )
    _make_folder(destination.parent)
    with write_safetensors(destination, layout) as file:
        for done, (name, weight) in enumerate(weights.items(), start=1):
            layer = name.removesuffix(".weight")
            if layer in taken_over:
                parts = taken_over[layer].tensors(layer)
            elif layer in quantized:
                parts = _rounded(model, name, weight, precision, device).tensors(layer)
            else:
                dtype = FILE_DTYPES[layout.tensors[name].dtype]
                parts = {name: with_patches(model, name, weight, device).to(dtype)}
            for part, value in parts.items():
                if not is_finite(value):
                    raise CheckpointError(
                        f"{name!r} of the model holds NaN or infinity, with its LoRAs: leave the "
                        "LoRAs out or load the model again."
                    )
                file.write(part, value.cpu())
            progress(done, len(weights))
    held = [layer for layer in quantized if isinstance(weights[f"{layer}.weight"], QuantizedTensor)]
    return SavedModel(
        path=destination,
        precision=precision,
        bytes=layout.file_bytes,
        quantized=len(quantized),
        twice=len(set(held) - taken_over.keys()),
        merged=sum(PREFIX + name in model.patches for name in weights),
    )


def _check_destination(destination: Path, *, overwrite: bool) -> None:
    if destination.is_dir():
        raise SettingError(f"{destination.name} is a folder: name a file.")
    if os.path.lexists(destination) and not overwrite:
        raise SettingError(
            f"{destination.name} exists: choose another name, or switch overwrite on."
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnavailableError(
            f"cannot create the folder {folder} ({error.strerror}): choose another name."
        ) from error


def _rounded(
    model: ModelPatcher, name: str, weight: torch.Tensor, precision: str, device: torch.device
) -> StoredLayer:
    patched = PREFIX + name in model.patches
    if precision == "fp8" and weight.dtype == torch.float8_e4m3fn and not patched:
        return StoredLayer(weight, torch.ones((len(weight), 1)), precision)
    weight = with_patches(model, name, weight, device).to(device, torch.float32)
    return StoredLayer(*quantize_rows(weight, precision), precision)


def _specs(
    weights: Tensors,
    quantized: Collection[str],
    taken_over: Mapping[str, StoredLayer],
    precision: str,
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{name: (dtype, shape)} of everything in the file."""
    specs: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        if layer not in quantized:
            # Only a marker has no elements.
            specs[name] = ("BF16" if weight.numel() else "F32", tuple(weight.shape))
            continue
        entry = taken_over.get(layer) or StoredLayer(
            torch.empty(weight.shape, dtype=DTYPES[precision], device="meta"),
            torch.empty((len(weight), 1), device="meta"),
            precision,
        )
        for part, value in entry.tensors(layer).items():
            specs[part] = (DTYPE_NAMES[value.dtype], tuple(value.shape))
    return specs


def _metadata(model: ModelPatcher, precision: str, keep: Sequence[str]) -> dict[str, str]:
    entry = {
        "precision": precision,
        "format": COMFY_QUANT[precision],
        "keep": list(keep),
        "version": __version__,
        # No tensor tells how a head is split over time, height and width.
        "config": {"axes_dims_rope": list(model.model.diffusion_model.pe_embedder.axes_dim)},
    }
    return {"format": "pt", METADATA_KEY: json.dumps(entry)}
