"""Brings the forms in which people store a quantized transformer into one: fp8 e4m3 or int8 weights
with a float32 scale for each row, the rest in a plain dtype. Values stay, except that e5m2 and what
is never computed quantized become bf16. Tensors may be mapped: none is read that needs no change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from ..errors import CheckpointError
from ..families.registry import is_modulation, is_quantizable
from ..optimizations.reference import decode_weight
from ..spec.formats import RowFormat, is_rotation
from .gguf_blocks import BlockRows
from .quantization import (
    AUXILIARY,
    DECODING,
    GGUF,
    PACKED,
    PACKED_BITS,
    RUNNABLE,
    STORAGE_ONLY,
    Quantization,
)
from .quantize import (
    VALUE_DTYPES,
    comfy_quant_tensor,
    dequantize_rows,
    is_finite,
    rotate,
)

DEFAULT_GROUP = 256
SCALES = (".weight_scale", ".scale_weight", ".weight_s_channel")
# Activations are scaled for each token as they come: a stored scale for them is not used.
ACCOMPANYING = (*SCALES, *DECODING, ".comfy_quant", ".input_scale", ".scale_input")
MARKER = "scaled_fp8"
# What holds quantized values, and core ComfyUI's name for it with one scale for the weight.
KINDS = {dtype: name for name, dtype in VALUE_DTYPES.items()} | {torch.float8_e5m2: "fp8"}
CORE_FP8 = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
E_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FORM_DTYPES = {
    form: next((dtype for name, dtype in E_DTYPES.items() if name in form), torch.int8)
    for form in RUNNABLE | STORAGE_ONLY | PACKED
}
REMEDY = "download or save the file again"


@dataclass(frozen=True)
class StoredLayer:
    """Holds a layer whose weight stays quantized: values * scale is the weight."""

    weight: torch.Tensor  # [N, K], float8_e4m3fn, float8_e5m2 or int8
    scale: torch.Tensor  # [N, 1], or [] for ComfyUI's own layers, whose fp8 has one; float32
    format: str  # "fp8", "int8" or "int8 ConvRot"
    # of "int8 ConvRot": so many columns of the weight, and of what it is multiplied with, are
    # rotated together
    convrot_groupsize: int | None = None
    # whether the layer is computed with the dequantized weight, because the file says so or because
    # it is a modulation
    full_precision: bool = False

    def dequantized(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Returns the weight [N, K], rotated back and rounded once, to `dtype`."""
        scale = self.scale.expand(len(self.weight), 1)
        if self.convrot_groupsize is None:
            return dequantize_rows(self.weight, scale, dtype)
        rotated = dequantize_rows(self.weight, scale, torch.float32)
        return rotate(rotated, self.convrot_groupsize).to(dtype)

    @classmethod
    def rounded(cls, values: torch.Tensor, scale: torch.Tensor, form: RowFormat) -> StoredLayer:
        name = "int8 ConvRot" if form.rotation else form.storage
        return cls(values, scale, name, form.rotation or None)

    def tensors(self, layer: str) -> dict[str, torch.Tensor]:
        """Returns the layer as a file holds it: weight, weight_scale and comfy_quant by name."""
        kind = self.format.split()[0]
        settings: dict[str, Any] = {}
        if kind == "fp8" and self.scale.dim() == 0:
            settings["format"] = CORE_FP8[self.weight.dtype]
        if self.convrot_groupsize is not None:
            settings |= {"convrot": True, "convrot_groupsize": self.convrot_groupsize}
        if self.full_precision:
            settings["full_precision_matrix_mult"] = True
        return {
            f"{layer}.weight": self.weight,
            # ComfyUI's dynamic VRAM copies the bytes, whatever the strides are.
            f"{layer}.weight_scale": self.scale.contiguous(),
            f"{layer}.comfy_quant": comfy_quant_tensor(kind, settings),
        }


@dataclass(frozen=True)
class PackedLayer:
    """Holds a layer whose weight is stored in 4 or 6 bits, codes of an int8 ConvRot weight [N, K]:
    `rint(clamp(level * group_scale, -127, 127))`. The level is the code's entry in the codebook, or
    without a codebook the code less half of all codes.
    """

    # [N, K * bits / 8], int8. A byte holds two codes, the lower bits first. Of 6 bits the upper two
    # follow in K / 4 bytes of four.
    codes: torch.Tensor
    group_scale: torch.Tensor  # [N, groups], float8_e4m3fn or float32, finite
    codebook: torch.Tensor | None  # [16], float32, finite; None for equal steps, and for 6 bits
    bits: int  # 4 or 6
    # scale, convrot_groupsize, full_precision: as of `StoredLayer`
    scale: torch.Tensor
    convrot_groupsize: int
    full_precision: bool = False

    def tensors(self, layer: str) -> dict[str, torch.Tensor]:
        settings: dict[str, Any] = {"format": PACKED_NAMES[self.bits]}
        settings["group_size"] = self.codes.shape[1] * 8 // self.bits // self.group_scale.shape[1]
        settings["convrot_groupsize"] = self.convrot_groupsize
        if self.full_precision:
            settings["full_precision_matrix_mult"] = True
        found = {
            "weight": self.codes,
            "weight_s_rel": self.group_scale,
            "weight_s_channel": self.scale.flatten(),
            "weight_codebook": self.codebook,
            "comfy_quant": comfy_quant_tensor("int8", settings),
        }
        return {f"{layer}.{end}": tensor for end, tensor in found.items() if tensor is not None}

    def decoded(self, device: torch.device | str) -> StoredLayer:
        codebook = None if self.codebook is None else self.codebook.to(device)
        levels = self.codes.to(device), self.group_scale.to(device), codebook
        values = decode_weight(*levels, self.bits).cpu()
        return StoredLayer(
            values, self.scale, "int8 ConvRot", self.convrot_groupsize, self.full_precision
        )


PACKED_NAMES = {4: "asym_w4a8_int8", 6: "w6a8_int8"}
Weight = torch.Tensor | StoredLayer | PackedLayer | BlockRows


def accompanies(name: str) -> bool:
    """Tells whether a tensor is a scale, a setting or a marker of the formats read here."""
    return name == MARKER or name.endswith(ACCOMPANYING)


def canonical_tensors(
    tensors: Mapping[str, torch.Tensor | BlockRows],
    quantization: Quantization,
    device: torch.device | str = "cpu",
    *,
    packed: bool = False,
) -> Iterator[tuple[str, Weight]]:
    """Yields every weight of a transformer by its name, in the order of `tensors`: `StoredLayer`
    for what stays quantized, `BlockRows` for what is in GGUF's blocks, and a tensor for the rest.

    Attention and MLP of the blocks stay quantized, and so does a modulation that the file has
    quantized, which is then computed in full precision. Their scales are [N, 1]; e4m3 without
    scales has ones.

    Args:
        tensors: {name without prefix: tensor}, on any device. A weight is asked for once, when its
            turn comes; scales at once.
        device: where 4 and 6 bits are decoded.
        packed: whether these stay so, as `PackedLayer`, where they stay quantized.

    Raises:
        CheckpointError: at once, for a format that this package does not run and for a scale that
            is missing, negative, zero, NaN or infinite; for a shape or a dtype that does not fit,
            and for NaN or infinity in what is converted, when its turn comes.
    """
    for layer, form in quantization.layers.items():
        if form not in RUNNABLE | STORAGE_ONLY | PACKED | GGUF.keys():
            _refuse(
                f"{layer}.weight",
                f"is stored as {form}",
                "only bf16, fp8 e4m3 or e5m2 and int8 are read",
                "get the model in one of these",
            )
    scales = _scales(tensors, quantization.layers)
    for layer, form in quantization.layers.items():
        if layer not in scales and not form.endswith("unscaled") and form not in GGUF:
            _refuse(
                f"{layer}.weight", f"is {form} and has no scale", "its weight_scale must be there"
            )
    return _converted(tensors, quantization, scales, device, packed)


def stored_layers(
    tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Mapping[str, Any]]
) -> dict[str, StoredLayer]:
    """Returns {layer: every matrix in fp8 or int8}, as stored: a single scale stays one, []."""
    quantized = {
        name.removesuffix(".weight"): weight
        for name, weight in tensors.items()
        if name.endswith(".weight") and weight.dtype in KINDS and weight.dim() == 2
    }
    scales = _scales(tensors, quantized)
    return {
        layer: _stored(layer, weight, scales.get(layer), settings.get(layer, {}))
        for layer, weight in quantized.items()
    }


def _converted(
    tensors: Mapping[str, Any],
    quantization: Quantization,
    scales: Mapping[str, torch.Tensor],
    device: torch.device | str,
    packed: bool,
) -> Iterator[tuple[str, Weight]]:
    slow_marker = MARKER in tensors and tensors[MARKER].numel() == 2
    for name in tensors:
        if AUXILIARY.search(name):
            continue
        layer = name.removesuffix(".weight")
        form = quantization.layers.get(layer) if layer != name else None
        weight = tensors[name]
        if isinstance(weight, BlockRows):
            yield name, weight.dequantized() if form is None else weight
            continue
        if form is None:
            yield name, _plain(name, weight)
            continue
        if weight.dtype != FORM_DTYPES[form]:
            what = f"is {weight.dtype} and declared as {form}"
            _refuse(name, what, "dtype and format must agree")
        settings = quantization.settings.get(layer, {})
        computed = is_quantizable(layer)
        stays = form not in STORAGE_ONLY and (computed or is_modulation(layer))
        slow = (
            not computed
            or bool(settings.get("full_precision_matrix_mult"))
            or (slow_marker and f"{layer}.scale_weight" in tensors)
        )
        if form in PACKED:
            coded = _packed(layer, tensors, scales[layer], settings, PACKED_BITS[form])
            if packed and stays:
                yield name, replace(coded, full_precision=slow)
                continue
            entry = coded.decoded(device)
        else:
            entry = _stored(layer, weight, scales.get(layer), settings)
        if not stays:
            yield name, _in_bf16(name, entry)
            continue
        _check_matrix(name, weight)
        scale = entry.scale.expand(len(entry.weight), 1).contiguous()
        yield name, replace(entry, scale=scale, full_precision=slow)


def _scales(tensors: Mapping[str, Any], quantized: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Returns {layer: its scale in float32}, and refuses what is left over or impossible."""
    found: dict[str, torch.Tensor] = {}
    for name in filter(AUXILIARY.search, tensors):
        if not accompanies(name):
            _refuse(name, "changes a weight in an unknown way", "only scales are applied")
        layer = name.rpartition(".")[0]
        if name.endswith((SCALES[2], *DECODING)) and quantized.get(layer) not in PACKED:
            _refuse(name, "is of no weight in 4 or 6 bits", "it belongs to one")
        if not name.endswith(SCALES):
            continue
        scale = tensors[name].float()
        if not (scale.numel() and scale.isfinite().all() and (scale > 0).all()):
            _refuse(name, "holds NaN, infinity, zero or a negative number", "scales are above 0")
        # A scale of 1 changes nothing, so some files have it with plain weights too.
        if layer not in quantized and not (scale == 1).all():
            _refuse(name, "is the scale of no quantized weight", "a scale belongs to one")
        if layer in found:
            _refuse(name, "is a second scale of its layer", "a weight has one")
        found[layer] = scale
    return found


def _stored(
    layer: str, weight: torch.Tensor, scale: torch.Tensor | None, settings: Mapping[str, Any]
) -> StoredLayer:
    """Joins a weight and its scale, which becomes [] or [N, 1]; fp8 without one has 1."""
    name, kind, group = f"{layer}.weight", KINDS[weight.dtype], None
    if scale is None:
        if kind == "int8":
            _refuse(name, "is int8 and has no scale", "its weight_scale must be there")
        scale = torch.ones((), device=weight.device)
    rows = weight.shape[0] if weight.dim() else 1
    if scale.numel() not in (1, rows):
        what = f"has {scale.numel()} scales for {rows} rows"
        _refuse(name, what, "one value, or one for each row, is needed")
    scale = scale.reshape(() if scale.numel() == 1 else (-1, 1))
    settings = _flat(settings)
    if kind == "int8" and settings.get("convrot"):
        columns = weight.shape[-1] if weight.dim() else 0
        kind, group = "int8 ConvRot", _group_size(name, columns, settings)
    return StoredLayer(weight, scale, kind, group)


def stored_format(quantization: Quantization, layer: str, columns: int) -> RowFormat | None:
    """Tells what rows a layer's stored weight is multiplied with; None of one in full precision."""
    form = quantization.layers.get(layer)
    if form is None or form in STORAGE_ONLY:
        return None
    if form.startswith("fp8"):
        return RowFormat("fp8")
    rotated = form != "int8"
    settings = _flat(quantization.settings.get(layer, {}))
    return RowFormat("int8", _group_size(layer, columns, settings) if rotated else 0)


def _packed(
    layer: str,
    tensors: Mapping[str, torch.Tensor],
    scale: torch.Tensor,
    settings: Mapping[str, Any],
    bits: int,
) -> PackedLayer:
    """Joins what belongs to a weight in 4 or 6 bits; of the codes only the shape is read."""
    name, codes = f"{layer}.weight", tensors[f"{layer}.weight"]
    _check_matrix(name, codes)
    rows, columns = codes.shape[0], codes.shape[1] * 8 // bits
    if not codes.numel() or columns * bits != codes.shape[1] * 8 or columns % 16:
        rule = f"weights of {bits} bits take a multiple of {2 * bits} bytes a row"
        _refuse(name, f"has {codes.shape[1]} bytes a row", rule)
    if scale.shape not in ((rows,), (rows, 1)):
        what = f"has {scale.numel()} scales for {rows} rows"
        _refuse(f"{layer}.weight_s_channel", what, "one for each row is needed")
    settings = _flat(settings)
    size, group_scale = settings.get("group_size", 16), tensors.get(f"{layer}.weight_s_rel")
    known = type(size) is int and size >= 4 and not columns % size
    if not known or (size % 16 and (bits == 6 or 16 % size)):
        what = f"has groups of {size!r} and is {columns} wide"
        _refuse(name, what, "4, 8 or a multiple of 16 that divides the width is needed")
    if group_scale is None:
        _refuse(name, f"has {bits} bits and no weight_s_rel", "each group has a scale")
    if group_scale.dtype == torch.uint8:  # as some writers name e4m3
        group_scale = group_scale.view(torch.float8_e4m3fn)
    if group_scale.dtype != torch.float8_e4m3fn:
        group_scale = group_scale.float()
    if group_scale.shape != (rows, columns // size):
        found, needed = tuple(group_scale.shape), (rows, columns // size)
        _refuse(f"{layer}.weight_s_rel", f"has the shape {found}", f"{needed} is needed")
    codebook = tensors.get(f"{layer}.weight_codebook")
    if codebook is not None and (bits != 4 or codebook.shape != (16,)):
        what = f"has the shape {tuple(codebook.shape)} for {bits} bits"
        _refuse(f"{layer}.weight_codebook", what, "4 bits take 16 entries, and 6 bits none")
    for part, numbers in (("weight_s_rel", group_scale), ("weight_codebook", codebook)):
        if numbers is not None and not is_finite(numbers):
            _refuse(f"{layer}.{part}", "holds NaN or infinity", "a weight must be finite")
    return PackedLayer(
        codes,
        group_scale,
        None if codebook is None else codebook.float(),
        bits,
        scale.reshape(-1, 1),
        _group_size(name, columns, settings),
    )


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    params = settings.get("params")
    return {**(params if isinstance(params, dict) else {}), **settings}


def _check_matrix(name: str, weight: torch.Tensor) -> None:
    if weight.dim() != 2:
        shape = tuple(weight.shape)
        _refuse(name, f"has the shape {shape}", "a linear layer's weight is a matrix")


def _group_size(name: str, columns: int, settings: Mapping[str, Any]) -> int:
    size = settings.get("convrot_groupsize", DEFAULT_GROUP)
    if not is_rotation(size, columns):
        _refuse(
            name,
            f"is rotated in groups of {size!r} and {columns} wide",
            "a group is a power of 4 that divides the width",
        )
    return size


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Passes a tensor on; fp8 in a bias or in another tensor without a scale becomes bf16."""
    if tensor.dtype in CORE_FP8:
        return _in_bf16(name, StoredLayer(tensor, torch.ones((), device=tensor.device), "fp8"))
    if tensor.dtype == torch.int8 and name.endswith(".weight"):
        _refuse(name, "is int8 and has no scale", "its weight_scale must be there")
    return tensor


def _in_bf16(name: str, entry: StoredLayer) -> torch.Tensor:
    values = entry.weight
    if not values.numel():
        return values.to(torch.bfloat16)
    rows = values.reshape(values.shape[0] if values.dim() else 1, -1)
    weight = replace(entry, weight=rows).dequantized()
    if not is_finite(weight):
        _refuse(name, "holds NaN or infinity", "a weight must be finite")
    return weight.reshape(values.shape)


def _refuse(name: str, what: str, rule: str, remedy: str = REMEDY) -> NoReturn:
    raise CheckpointError(f"The tensor {name!r} {what}: {rule}, so {remedy}.")
