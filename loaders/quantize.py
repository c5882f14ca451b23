"""Quantizes weights in fp8 or int8 with one scale for each output row, and chooses the layers. A
row's largest magnitude becomes 448 (e4m3) or 127 (int8), every value the nearest that the format
has; in float32, in pieces of a few rows, which stay in the CPU's cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, SettingError
from ..families.registry import is_quantizable
from ..spec.formats import FORMATS, QUANTIZED, SMALLEST_SCALE, RowFormat

# Values in a piece: small enough for a CPU's cache, large enough to fill a card.
PIECE = {"cpu": 2**19, "cuda": 2**24}
VALUE_DTYPES = {name: getattr(torch, form.dtype) for name, form in FORMATS.items()}


def row_format(format: str, columns: int) -> RowFormat:
    """Returns how attention and MLP of the blocks are rounded: int8 after a rotation, as ConvRot.

    Large channels, which would take most of the steps of a row, are spread over a group first. The
    steps of e4m3 follow the size of each value, and need none.
    """
    sizes = (size for size in FORMATS[known_format(format)].rotations if columns % size == 0)
    return RowFormat(format, next(sizes, 0))


def rotate(weight: torch.Tensor, size: int) -> torch.Tensor:
    """Rotates a weight [N, K] of a floating dtype as `optimizations.reference.rotate`, with sums in
    one order on every device, so that files are the same.
    """
    low = 1
    while low < size:
        # Rows of the matrix: + + + -, + + - +, + - + +, - + + +.
        a, b, c, d = weight.unflatten(1, (-1, 4, low)).unbind(2)
        left, right, left_difference, right_difference = a + b, c + d, a - b, c - d
        parts = [left + right_difference, left - right_difference]
        parts += left_difference + right, right - left_difference
        weight = torch.stack(parts, dim=2).flatten(1)
        low *= 4
    return weight / size**0.5


def quantize_rows(
    weight: torch.Tensor, format: str, *, rotation: int = 0, seed: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds a weight to one of `QUANTIZED`.

    int8 from a float32 weight is bit for bit what comfy-kitchen's `quantize_int8_rowwise` gives,
    except for the scale of a row of zeros (1 here, 1e-30 there). From bf16 it is more exact:
    comfy-kitchen rounds the quotient to bf16 first, to steps of 0.5 from 64 on.

    Args:
        weight: [N, K], any floating dtype, on any device.
        rotation: so many columns are rotated together before, as in `RowFormat`.
        seed: rounds stochastically instead of to nearest (even), so that changes under a step
            survive on average; the numbers drawn depend on the device.

    Returns:
        values [N, K] of float8_e4m3fn or int8 and scales [N, 1] of float32, where values * scales
        is the weight, rotated. A row that holds NaN or infinity has a scale that is not finite: its
        values mean nothing.
    """
    limit = FORMATS[known_format(format)].largest
    # Divided by a tensor: by a number, a card multiplies with the reciprocal, and its scales would
    # differ from the CPU's in the last bit.
    largest = torch.full((), limit, device=weight.device)
    scale = torch.ones((len(weight), 1), device=weight.device)
    values = torch.empty(weight.shape, dtype=VALUE_DTYPES[format], device=weight.device)
    generator = None
    if seed is not None:
        generator = torch.Generator(weight.device).manual_seed(seed)
    for rows in _pieces(weight):
        piece = _rotated(weight[rows].float(), rotation)
        amax = piece.abs().amax(dim=1, keepdim=True)
        scale[rows] = torch.where(amax == 0, 1.0, (amax / largest).clamp_(min=SMALLEST_SCALE))
        scaled = piece / scale[rows]
        if generator is not None:
            _dither(scaled, format, generator)
        elif format == "int8":
            scaled.round_()
        values[rows] = scaled.clamp_(-limit, limit).to(values.dtype)
    return values, scale


def dequantize_rows(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns values [N, K] * scale [N, 1], computed in float32, as [N, K] of `dtype`."""
    weight = torch.empty(values.shape, dtype=dtype, device=values.device)
    for rows in _pieces(values):
        weight[rows] = _as_float(values[rows]) * scale[rows]
    return weight


def relative_error(
    weight: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, rotation: int = 0
) -> float:
    """Returns |values * scale - weight| / |weight|, in Frobenius norms, of a weight that is rotated
    as the values are; 0 for a weight of zeros.
    """
    return root_ratio(measured_squares(weight, values, scale, rotation))


def measured_squares(
    weight: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, rotation: int
) -> torch.Tensor:
    """Computes sums of squares [2] in float64, of what rounding changed and of the weight."""
    # Sums in place: a list of small results between large temporaries would fragment the heap.
    sums = torch.zeros(2, dtype=torch.float64, device=weight.device)
    for rows in _pieces(weight):
        exact = _rotated(weight[rows].float(), rotation)
        rounded = _as_float(values[rows]) * scale[rows]
        sums[0] += torch.linalg.vector_norm(rounded.sub_(exact)).double() ** 2
        sums[1] += torch.linalg.vector_norm(exact).double() ** 2
    return sums


def expected_squares(
    weight: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, rotation: int
) -> torch.Tensor:
    """Computes what `measured_squares` gives on average of int8, from scales and one reading of the
    weight: a step's square over 12 for each value (Bennett 1948). A rotation changes no norm.
    """
    sums = weight.shape[1] / 12 * scale.double().square().sum()
    return torch.stack((sums, torch.linalg.vector_norm(weight, dtype=torch.float32).double() ** 2))


def _rotated(piece: torch.Tensor, rotation: int) -> torch.Tensor:
    return rotate(piece, rotation) if rotation else piece


def root_ratio(squares: torch.Tensor) -> float:
    """Returns the relative error of what `measured_squares` gives."""
    return float((squares[0] / squares[1]).sqrt().nan_to_num_(0.0))


def check_finite(path: Path, name: str, tensor: torch.Tensor) -> None:
    """Raises CheckpointError when a tensor of any dtype holds NaN or infinity.

    Attention can swallow NaN and generate a plausible wrong image, so the image does not show it.
    """
    if not is_finite(tensor):
        raise not_finite(path, name)


def not_finite(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"The tensor {name!r} has NaN or infinity: download the file again.", path
    )


def is_finite(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor of any dtype and device holds neither NaN nor infinity.

    `aminmax` passes NaN on and reads 38 GB/s on two CPU cores, where `isfinite` reads 0.7 (bf16).
    """
    if not (tensor.is_floating_point() and tensor.numel()):
        return True
    wide = tensor.float() if tensor.itemsize == 1 else tensor
    return bool(torch.stack(torch.aminmax(wide)).isfinite().all())


def layers_to_quantize(layers: Iterable[str], keep: Sequence[str] = ()) -> frozenset[str]:
    """Returns the layers that are quantized: attention and MLP of the blocks, less what is kept.

    Raises:
        SettingError: a pattern matches none of the layers that can be quantized.
    """
    candidates = frozenset(filter(is_quantizable, layers))
    kept: set[str] = set()
    for pattern in keep:
        matching = {layer for layer in candidates if fnmatchcase(layer, pattern)}
        if not matching:
            raise SettingError(
                f"bf16_layers (keep_in_bf16, --keep) {pattern!r} matches no quantized layer. A "
                "pattern is compared with whole names such as transformer_blocks.5.attn.to_q: "
                "start it with * or transformer_blocks."
            )
        kept |= matching
    return candidates - kept


def comfy_quant_tensor(format: str, settings: Mapping[str, Any] | None = None) -> torch.Tensor:
    """Returns the `.comfy_quant` tensor of a layer: JSON as uint8 [bytes]."""
    text = json.dumps({"format": FORMATS[known_format(format)].marker, **(settings or {})})
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def known_format(format: str) -> str:
    if format not in QUANTIZED:
        raise SettingError(f"format {format!r} is unknown: choose {' or '.join(QUANTIZED)}.")
    return format


def _pieces(matrix: torch.Tensor) -> Iterator[slice]:
    """Slices of rows that cover the matrix; none when it has no values."""
    rows, columns = matrix.shape
    if columns:
        count = max(1, PIECE.get(matrix.device.type, PIECE["cpu"]) // columns)
        yield from (slice(first, first + count) for first in range(0, rows, count))


def cast_fp8(values: torch.Tensor) -> torch.Tensor:
    """Returns fp8 values as bf16, exactly."""
    return _as_float(values).to(torch.bfloat16)


def _as_float(values: torch.Tensor) -> torch.Tensor:
    if values.dtype == torch.float8_e4m3fn:
        return e4m3_as_float(values)
    return (e5m2_as_half(values) if values.dtype == torch.float8_e5m2 else values).float()


def _dither(scaled: torch.Tensor, format: str, generator: torch.Generator) -> None:
    """Rounds float32 up or down at random, in place, so that the expectation is the value."""
    noise = torch.rand(scaled.shape, generator=generator, device=scaled.device)
    if format == "int8":
        scaled.add_(noise).floor_()
        return
    # The exponent bits alone are a power of two; e4m3 has 8 steps to the next one.
    power = (scaled.view(torch.int32) & 0x7F800000).view(torch.float32)
    step = power.clamp_(min=2.0**-6).mul_(2.0**-3)
    scaled.div_(step).add_(noise).floor_().mul_(step)


# torch converts fp8 one value at a time on the CPU: 0.3 G values/s a thread, and 3 through the bits
# of float16. The exponent and mantissa of e4m3 are bits 13 to 7 of the float16 number that is 2^-8
# of its value, subnormal numbers included; an e5m2 byte is the upper half of a float16 number. Only
# e4m3's NaN (0x7F, 0xFF) has no such image.


def e5m2_as_half(values: torch.Tensor) -> torch.Tensor:
    """Returns float8_e5m2 values as float16, exactly, with NaN and infinity."""
    return values.view(torch.uint8).to(torch.int16).bitwise_left_shift_(8).view(torch.float16)


def e4m3_as_float(values: torch.Tensor) -> torch.Tensor:
    """Returns float8_e4m3fn values as float32, exactly, with NaN."""
    if values.device.type != "cpu" or _holds_nan(values):
        return values.float()
    bits = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
    # The sign was extended into bit 14 too.
    return bits.bitwise_and_(~0x4000).view(torch.float16).float().mul_(2.0**8)


def _holds_nan(values: torch.Tensor) -> bool:
    if not values.numel():
        return False
    # NaN is the largest byte, read as signed or as unsigned: no temporary of the tensor's size.
    signed, unsigned = values.view(torch.int8).max(), values.view(torch.uint8).max()
    return bool((signed == 0x7F) | (unsigned == 0xFF))
