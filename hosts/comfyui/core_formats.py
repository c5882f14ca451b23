"""Quantized matrices as ComfyUI's own layers hold them: values, a scale, and a format by name.

Core has one scale a tensor for fp8, and one a tensor or a row for int8.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...loaders.convrot import DEFAULT_GROUP, is_group_size, rotate
from ...loaders.quantize import dequantize_rows

CORE_FORMATS = {
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.int8: "int8_tensorwise",
}
KINDS = {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8", torch.int8: "int8"}
SCALES = (".weight_scale", ".scale_weight")


@dataclass(frozen=True)
class StoredWeight:
    """A quantized matrix of the file: values [N, K] times scale [] or [N, 1] is the weight; with
    `group` its columns are rotated in groups of so many (ConvRot).
    """

    values: torch.Tensor
    scale: torch.Tensor
    group: int | None

    @property
    def kind(self) -> str:
        """fp8 or int8."""
        return KINDS[self.values.dtype]

    @property
    def fits_core(self) -> bool:
        """Whether ComfyUI has a format for it."""
        return self.kind == "int8" or self.scale.numel() == 1

    def dequantized(self) -> torch.Tensor:
        """Returns [N, K] in float32."""
        scale = self.scale.reshape(-1, 1).expand(len(self.values), 1)
        weight = dequantize_rows(self.values, scale, torch.float32)
        return weight if self.group is None else rotate(weight, self.group)

    def tensors(self, layer: str) -> dict[str, torch.Tensor]:
        """Returns weight, weight_scale and comfy_quant by name."""
        settings: dict[str, Any] = {"format": CORE_FORMATS[self.values.dtype]}
        if self.group is not None:
            settings |= {"convrot": True, "convrot_groupsize": self.group}
        marker = torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)
        return {
            f"{layer}.weight": self.values,
            f"{layer}.weight_scale": self.scale,
            f"{layer}.comfy_quant": marker,
        }


def stored_weights(
    path: Path,
    names: Mapping[str, str],
    mapped: Mapping[str, torch.Tensor],
    settings: Mapping[str, Mapping[str, Any]],
) -> dict[str, StoredWeight]:
    """Returns {layer: weight} of the quantized matrices of a file.

    Args:
        names: {native name: name in the file}
        mapped: {name in the file: tensor}
        settings: {layer by its name in the file: what the file declares about its format}

    Raises:
        CheckpointError: a scale is missing, impossible, or belongs to nothing quantized.
    """
    scales = _scales(path, names, mapped)
    found = {}
    for native, name in names.items():
        if not native.endswith(".weight"):
            continue
        layer, weight = native.removesuffix(".weight"), mapped[name]
        scale = scales.get(layer)
        if weight.dtype not in KINDS or weight.dim() != 2:
            if scale is not None and not (scale == 1).all():
                raise CheckpointError(
                    f"{path} holds a scale for {layer!r}, which is {weight.dtype}: scales belong "
                    "to fp8 and int8 matrices, so get the file from the model's own source."
                )
            continue
        scale = _fitting(path, layer, weight, scale)
        group = _group(path, layer, weight, settings.get(name.removesuffix(".weight"), {}))
        found[layer] = StoredWeight(weight, scale, group)
    return found


def _scales(
    path: Path, names: Mapping[str, str], mapped: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for native, name in names.items():
        if not native.endswith(SCALES):
            continue
        scale = mapped[name].float()
        if not (scale.numel() and scale.isfinite().all() and (scale > 0).all()):
            raise CheckpointError(
                f"{path} holds NaN, infinity, zero or a negative number in the scale {native!r}: "
                "download it again."
            )
        found[native.rpartition(".")[0]] = scale
    return found


def _fitting(
    path: Path, layer: str, weight: torch.Tensor, scale: torch.Tensor | None
) -> torch.Tensor:
    """The scale as [] or [N, 1]; 1 for fp8 without one."""
    if scale is None and weight.dtype == torch.int8:
        raise CheckpointError(
            f"{path} holds no scale for the int8 weight of {layer!r}: download it again."
        )
    if scale is None:
        return torch.ones(())
    if scale.numel() not in (1, len(weight)):
        raise CheckpointError(
            f"{path} holds {scale.numel()} scales for the {len(weight)} rows of {layer!r}, and one "
            "or one a row is needed: get the file from the model's own source."
        )
    return scale.reshape(()) if scale.numel() == 1 else scale.reshape(-1, 1)


def _group(path: Path, layer: str, weight: torch.Tensor, settings: Mapping[str, Any]) -> int | None:
    nested = settings.get("params")
    values = {**(nested if isinstance(nested, dict) else {}), **settings}
    if weight.dtype != torch.int8 or not values.get("convrot"):
        return None
    size = values.get("convrot_groupsize", DEFAULT_GROUP)
    if not is_group_size(size, weight.shape[1]):
        raise CheckpointError(
            f"{path} rotates the {weight.shape[1]} columns of {layer!r} in groups of {size!r}, and "
            "a group must be a power of 4 that divides them: get the file from the model's own "
            "source."
        )
    return size
