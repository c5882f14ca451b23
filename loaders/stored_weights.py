"""Brings the forms in which people store a quantized transformer into one form.

What comes out: fp8 e4m3 or int8 weights with one float32 scale for each output row, and everything
else in a plain dtype under its own name; scales, markers and settings are gone. Values do not
change, but for what was stored in e5m2 and for quantized layers that are never computed quantized:
these become bf16.

Tensors are read one at a time, and those that need no conversion are passed on as they are: the
host may have mapped them and not read them yet. So nothing here looks for NaN in a weight that it
does not have to convert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ..errors import CheckpointError
from .convrot import DEFAULT_GROUP, is_group_size, rotate
from .e4m3_bits import e5m2_as_half, holds_nan
from .quantization import AUXILIARY, RUNNABLE, STORAGE_ONLY, Quantization
from .quantize import (
    comfy_quant_tensor,
    dequantize_rows,
    is_modulation,
    layers_to_quantize,
    rescale_rows_exactly,
)

SCALES = ("weight_scale", "scale_weight")
# Activations are scaled for each token as they come: a stored scale for them is not used.
DROPPED = ("comfy_quant", "input_scale", "scale_input")
MARKER = "scaled_fp8"
DTYPES = {
    "fp8 e4m3, scaled": torch.float8_e4m3fn,
    "fp8 e4m3, scaled per row": torch.float8_e4m3fn,
    "fp8 e4m3, unscaled": torch.float8_e4m3fn,
    "fp8 e5m2, scaled": torch.float8_e5m2,
    "fp8 e5m2, unscaled": torch.float8_e5m2,
    "int8": torch.int8,
    "int8 ConvRot": torch.int8,
}
REMEDY = "download or save the file again"


@dataclass(frozen=True)
class StoredLayer:
    """A linear layer whose weight stays quantized: values * scale is the weight.

    Args:
        weight: [N, K], float8_e4m3fn or int8.
        scale: [N, 1], float32.
        format: "fp8", "int8" or "int8 ConvRot".
        convrot_groupsize: of "int8 ConvRot": so many columns of the weight, and of what it is
            multiplied with, are rotated together.
        full_precision: whether the layer is computed with the dequantized weight, because the file
            says so or because it is a modulation.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    format: str
    convrot_groupsize: int | None = None
    full_precision: bool = False

    def tensors(self, layer: str) -> dict[str, torch.Tensor]:
        """Returns the layer as a file holds it: weight, weight_scale and comfy_quant by name."""
        settings: dict[str, Any] = {}
        if self.convrot_groupsize is not None:
            settings |= {"convrot": True, "convrot_groupsize": self.convrot_groupsize}
        if self.full_precision:
            settings["full_precision_matrix_mult"] = True
        return {
            f"{layer}.weight": self.weight,
            f"{layer}.weight_scale": self.scale,
            f"{layer}.comfy_quant": comfy_quant_tensor(self.format.split()[0], settings),
        }


def canonical_tensors(
    tensors: Mapping[str, torch.Tensor], quantization: Quantization
) -> Iterator[tuple[str, torch.Tensor | StoredLayer]]:
    """Yields every weight of a transformer: (layer, `StoredLayer`) for what stays quantized, and
    (name, tensor) for the rest, in the order of `tensors`.

    Attention and MLP of the blocks stay quantized, and so does a modulation that the file has
    quantized, which is then computed in full precision.

    Args:
        tensors: {name without prefix: tensor}, on any device. A weight is asked for once, when its
            turn comes; scales at once.
        quantization: what `find_quantization` said of the same tensors.

    Raises:
        CheckpointError: at once, for a format that this package does not run and for a scale that
            is missing, negative, zero, NaN or infinite; for a shape or a dtype that does not fit,
            and for NaN or infinity in what is converted, when its turn comes.
    """
    for layer, form in quantization.layers.items():
        if form not in RUNNABLE | STORAGE_ONLY:
            _refuse(
                f"{layer}.weight",
                f"is stored as {form}",
                "only bf16, fp8 e4m3 or e5m2 and int8 are read",
                "get the model in one of these",
            )
    scales = _scales(tensors, quantization)
    return _converted(tensors, quantization, scales)


def _converted(
    tensors: Mapping[str, torch.Tensor],
    quantization: Quantization,
    scales: Mapping[str, torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor | StoredLayer]]:
    computed = layers_to_quantize(quantization.layers)
    slow_marker = MARKER in tensors and tensors[MARKER].numel() == 2
    for name in tensors:
        if AUXILIARY.search(name):
            continue
        layer = name.removesuffix(".weight")
        form = quantization.layers.get(layer) if layer != name else None
        weight = tensors[name]
        if form is None:
            yield name, _plain(name, weight)
            continue
        scale = _row_scale(name, form, weight, scales.get(layer))
        settings = quantization.settings.get(layer, {})
        group = _group_size(name, weight, settings) if form == "int8 ConvRot" else None
        if form in STORAGE_ONLY or not (layer in computed or is_modulation(layer)):
            yield name, _in_bf16(name, weight, scale, group)
            continue
        if weight.dim() != 2:
            shape = tuple(weight.shape)
            _refuse(name, f"has the shape {shape}", "a linear layer's weight is a matrix")
        if scale is None:
            if holds_nan(weight):
                _refuse(name, "holds NaN", "a weight must be finite")
            weight, scale = rescale_rows_exactly(weight)
        slow = (
            layer not in computed
            or bool(settings.get("full_precision_matrix_mult"))
            or (slow_marker and f"{layer}.scale_weight" in tensors)
        )
        kind = "fp8" if form.startswith("fp8") else form
        scale = scale.expand(len(weight), 1).contiguous()
        yield layer, StoredLayer(weight, scale, kind, group, slow)


def _scales(
    tensors: Mapping[str, torch.Tensor], quantization: Quantization
) -> dict[str, torch.Tensor]:
    """Returns {layer: its scale as it is stored}, and refuses what is left over or impossible."""
    found: dict[str, torch.Tensor] = {}
    for name in filter(AUXILIARY.search, tensors):
        layer, _, kind = name.rpartition(".")
        if name == MARKER or kind in DROPPED:
            continue
        if kind not in SCALES:
            _refuse(name, "changes a weight in an unknown way", "only scales are applied")
        if layer not in quantization.layers:
            _refuse(name, "is the scale of no quantized weight", "a scale stands beside one")
        if layer in found:
            _refuse(name, "is a second scale of its layer", "a weight has one")
        scale = tensors[name].float()
        if not (scale.numel() and scale.isfinite().all() and (scale > 0).all()):
            _refuse(name, "holds NaN, infinity, zero or a negative number", "scales are above 0")
        found[layer] = scale
    for layer, form in quantization.layers.items():
        if layer not in found and not form.endswith("unscaled"):
            _refuse(
                f"{layer}.weight", f"is {form} and has no scale", "its weight_scale must be there"
            )
    return found


def _row_scale(
    name: str, form: str, weight: torch.Tensor, scale: torch.Tensor | None
) -> torch.Tensor | None:
    """Returns the scale as [1, 1] or [N, 1]; None for an unscaled weight."""
    if weight.dtype != DTYPES[form]:
        _refuse(name, f"is {weight.dtype} and declared as {form}", "dtype and format must agree")
    if scale is None:
        return None
    rows = weight.shape[0] if weight.dim() else 1
    if scale.numel() not in (1, rows):
        shapes = f"{tuple(scale.shape)} for a weight of {tuple(weight.shape)}"
        _refuse(name, f"has a scale of shape {shapes}", "one value or one a row is needed")
    return scale.reshape(-1, 1)


def _group_size(name: str, weight: torch.Tensor, settings: Mapping[str, Any]) -> int:
    params = settings.get("params")
    nested = params if isinstance(params, dict) else {}
    size = {**nested, **settings}.get("convrot_groupsize", DEFAULT_GROUP)
    columns = weight.shape[-1] if weight.dim() else 0
    if not is_group_size(size, columns):
        _refuse(
            name,
            f"is rotated in groups of {size!r} and {columns} wide",
            "a group is a power of 4 that divides the width",
        )
    return size


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Passes a tensor on; fp8 in a bias or in another tensor without a scale becomes bf16."""
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return _in_bf16(name, tensor, None, None)
    if tensor.dtype == torch.int8 and name.endswith(".weight"):
        _refuse(name, "is int8 and has no scale", "its weight_scale must be there")
    return tensor


def _in_bf16(
    name: str, values: torch.Tensor, scale: torch.Tensor | None, group: int | None
) -> torch.Tensor:
    """Returns values * scale in bf16, in the shape of `values`, without ConvRot's rotation."""
    if not values.numel():
        return values.to(torch.bfloat16)
    if values.dtype == torch.float8_e5m2:
        values = e5m2_as_half(values)
    rows = values.reshape(values.shape[0] if values.dim() else 1, -1)
    if scale is None:
        scale = torch.ones((1, 1), device=values.device)
    scale = scale.expand(len(rows), 1)
    if group is None:
        weight = dequantize_rows(rows, scale, torch.bfloat16)
    else:
        weight = rotate(dequantize_rows(rows, scale, torch.float32), group).bfloat16()
    if not torch.stack(torch.aminmax(weight)).isfinite().all():
        _refuse(name, "holds NaN or infinity", "a weight must be finite")
    return weight.reshape(values.shape)


def _refuse(name: str, what: str, rule: str, remedy: str = REMEDY) -> NoReturn:
    raise CheckpointError(f"the tensor {name!r} {what}: {rule}, so {remedy}.")
