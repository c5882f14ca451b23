"""The quantizer: weights in fp8 or int8 with one scale for each output row, and which layers get
them.

A row's largest magnitude becomes 448 (e4m3) or 127 (int8), and every value is rounded to the
nearest that the format has. Everything is computed in float32, in pieces of a few rows: temporaries
stay small next to the weight, and in the processor's cache.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from ..errors import SettingError
from ..spec.formats import LARGEST, QUANTIZED, RowFormat
from ..spec.transformer import BLOCKS

VALUE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
# What `.comfy_quant` calls them. Core ComfyUI has no fp8 with one scale a row: it refuses our name
# instead of computing with one scale.
COMFY_QUANT = {"fp8": "float8_e4m3fn_rowwise", "int8": "int8_tensorwise"}
# Under it, values that are smaller than any weight of a model would make the scale subnormal.
SMALLEST_SCALE = 1e-30
# Values in a piece: small enough for a processor's cache, large enough to fill a card.
PIECE = {"cpu": 2**19, "cuda": 2**24}


def _in_a_block(names: Iterable[str]) -> re.Pattern[str]:
    ends = "|".join(re.escape(name) for name in dict.fromkeys(names))
    return re.compile(rf"transformer_blocks\.[0-9]+\.({ends})")


_QUANTIZED = _in_a_block(name for block in BLOCKS for name in block.gemms)
_MODULATION = _in_a_block(f"{it}.1" for block in BLOCKS for it in block.modulation.values())


# Groups of columns that int8 is rotated in: the first that divides the columns. ComfyUI's own files
# have 256.
ROTATIONS = (256, 64)


def row_format(format: str, columns: int) -> RowFormat:
    """How attention and MLP of the blocks are rounded: int8 after a rotation, as ConvRot.

    Large channels, which would take most of the steps of a row, are spread over a group first. The
    steps of e4m3 follow the size of each value, and need none.
    """
    sizes = (size for size in ROTATIONS if columns % size == 0)
    return RowFormat(_known(format), next(sizes, 0) if format == "int8" else 0)


def rotate(weight: torch.Tensor, size: int) -> torch.Tensor:
    """Rotates a weight [N, K] of a floating dtype in groups of `size`, as ConvRot does.

    Each group is multiplied by comfy-kitchen's Hadamard matrix, which spreads outliers before they
    are rounded to int8: the Kronecker power of a symmetric 4 x 4 matrix with rows of equal sum,
    divided by the square root of its size. It is its own inverse.

    Sums are taken in one order on every device, so that files are the same.
    """
    low = 1
    while low < size:
        # Rows of the matrix: + + + -, + + - +, + - + +, - + + +.
        a, b, c, d = weight.unflatten(1, (-1, 4, low)).unbind(2)
        left, right, left_difference, right_difference = a + b, c + d, a - b, c - d
        parts = (left + right_difference, left - right_difference)
        parts += (left_difference + right, right - left_difference)
        weight = torch.stack(parts, dim=2).flatten(1)
        low *= 4
    return weight / size**0.5


def row_scales(weight: torch.Tensor, format: str) -> torch.Tensor:
    """Returns the scale of every row of a weight [N, K], float32 [N, 1]: 1 for a row of zeros, NaN
    or infinity for a row that holds one.
    """
    # Divided by a tensor: by a number, a card multiplies with the reciprocal, and its scales would
    # differ from the processor's in the last bit.
    limit = torch.full((), LARGEST[_known(format)], device=weight.device)
    scale = torch.ones((len(weight), 1), device=weight.device)
    for rows in _pieces(weight):
        amax = weight[rows].abs().amax(dim=1, keepdim=True).float()
        scale[rows] = torch.where(amax == 0, 1.0, (amax / limit).clamp_(min=SMALLEST_SCALE))
    return scale


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

    Raises:
        SettingError: the format is not in `QUANTIZED`.
    """
    limit = LARGEST[_known(format)]
    scale = torch.empty((len(weight), 1), device=weight.device)
    values = torch.empty(weight.shape, dtype=VALUE_DTYPES[format], device=weight.device)
    generator = None
    if seed is not None:
        generator = torch.Generator(weight.device).manual_seed(seed)
    for rows in _pieces(weight):
        piece = _rotated(weight[rows].float(), rotation)
        scale[rows] = row_scales(piece, format)
        scaled = piece / scale[rows]
        if generator is not None:
            _dither(scaled, format, generator)
        elif format == "int8":
            scaled.round_()
        values[rows] = scaled.clamp_(-limit, limit).to(values.dtype)
    return values, scale


def dequantize_rows(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns values [N, K] * scale [N, 1], computed in float32, as [N, K] of `dtype`.

    Args:
        values: float8_e4m3fn, float8_e5m2 or int8.
    """
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
    return _ratio(_squares(weight, values, scale, rotation))


def _squares(
    weight: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, rotation: int
) -> torch.Tensor:
    """Sums of squares [2] in float64, of what rounding changed and of the weight."""
    # Sums in place: a list of small results between large temporaries would fragment the heap.
    sums = torch.zeros(2, dtype=torch.float64, device=weight.device)
    for rows in _pieces(weight):
        exact = _rotated(weight[rows].float(), rotation)
        rounded = _as_float(values[rows]) * scale[rows]
        sums[0] += torch.linalg.vector_norm(rounded.sub_(exact)).double() ** 2
        sums[1] += torch.linalg.vector_norm(exact).double() ** 2
    return sums


def _rotated(piece: torch.Tensor, rotation: int) -> torch.Tensor:
    return rotate(piece, rotation) if rotation else piece


def _ratio(squares: torch.Tensor) -> float:
    return float((squares[0] / squares[1]).sqrt().nan_to_num_(0.0))


def layers_to_quantize(layers: Iterable[str], keep: Sequence[str] = ()) -> frozenset[str]:
    """Returns the layers that are quantized: attention and MLP of the blocks, less what is kept.

    Args:
        layers: names without `.weight`; those that are never quantized are passed over.
        keep: shell patterns of layers that stay in bf16, such as `transformer_blocks.0.*`.

    Raises:
        SettingError: a pattern matches none of the layers that can be quantized.
    """
    candidates = frozenset(filter(_QUANTIZED.fullmatch, layers))
    kept: set[str] = set()
    for pattern in keep:
        matching = {layer for layer in candidates if fnmatchcase(layer, pattern)}
        if not matching:
            raise SettingError(
                f"keep_in_bf16 (--keep) {pattern!r} matches no layer that is quantized: whole "
                "names are compared, such as transformer_blocks.5.attn.to_q, so begin with * or "
                "transformer_blocks."
            )
        kept |= matching
    return candidates - kept


def is_modulation(layer: str) -> bool:
    """Whether a layer computes a block's modulation, from the timestep alone."""
    return _MODULATION.fullmatch(layer) is not None


def comfy_quant_tensor(format: str, settings: Mapping[str, Any] | None = None) -> torch.Tensor:
    """Returns the `.comfy_quant` tensor of a layer: JSON as uint8 [bytes].

    Args:
        format: one of `QUANTIZED`.
        settings: further entries, such as `{"full_precision_matrix_mult": True}`.
    """
    text = json.dumps({"format": COMFY_QUANT[_known(format)], **(settings or {})})
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _known(format: str) -> str:
    if format not in QUANTIZED:
        raise SettingError(f"format {format!r} is unknown: choose {' or '.join(QUANTIZED)}.")
    return format


def _pieces(matrix: torch.Tensor) -> Iterator[slice]:
    """Slices of rows that cover the matrix; none when it has no values."""
    rows, columns = matrix.shape
    if columns:
        count = max(1, PIECE.get(matrix.device.type, PIECE["cpu"]) // columns)
        yield from (slice(first, first + count) for first in range(0, rows, count))


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


# One thread spends its time reading the file and copying, so several keep a card's bus busy. On a
# CPU torch's own threads share the work of one layer.
WORKERS_OF_A_CARD = 8
# Pinned memory, from which and to which a card copies 3 times as fast: so much for each worker and
# each way. torch keeps these 128 MiB for its next pinned tensors.
SLAB_BYTES = 8 * 2**20


class RoundedLayer(NamedTuple):
    """values [N, K] * scale is the weight, rotated as `form` says; both on the CPU, scale float32
    [N, 1], or [] for one.

    `error` is `relative_error`, None where it was not asked for.
    """

    layer: str
    values: torch.Tensor
    scale: torch.Tensor
    form: RowFormat
    error: float | None


def quantize_layers(
    layers: Iterable[str],
    weight_of: Callable[[str], torch.Tensor],
    format: str,
    device: torch.device,
    take: Callable[[RoundedLayer], None],
    refuse: Callable[[str], Exception],
    *,
    per_row: bool = True,
    measured: bool = False,
) -> None:
    """Rounds layers, several in work at a time, and hands out each as it is ready.

    A mapped bf16 weight is read from its file, goes to a card in slabs of rows, is rounded there
    and comes back in half the bytes: host memory holds the results and the slabs, never the model.

    Args:
        weight_of: returns a layer's weight [N, K] of any floating dtype; called in other threads.
        format: fp8 or int8.
        device: where the rounding is computed.
        take: called in the caller's thread, for one layer after another; what it raises ends the
            work.
        refuse: makes the error for a tensor, by name, that holds NaN or infinity.
        per_row: False for one scale for the whole weight.
        measured: whether to compute the rounding errors.
    """
    workers = min(WORKERS_OF_A_CARD, os.cpu_count() or 1) if device.type == "cuda" else 1
    staging = _Staging(device, format, per_row, measured)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="quantize")
    waiting = iter(layers)

    def start(count: int) -> set[Future[RoundedLayer]]:
        chosen = itertools.islice(waiting, count)
        return {pool.submit(staging.round, layer, weight_of) for layer in chosen}

    try:
        running = start(workers + 1)
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            running |= start(len(done))
            for future in done:
                rounded = future.result()
                if not rounded.scale.isfinite().all():
                    raise refuse(f"{rounded.layer}.weight")
                take(rounded)
    finally:
        pool.shutdown(cancel_futures=True)
        if device.type == "cuda":
            # Each worker's stream holds memory that no other stream could use.
            torch.cuda.empty_cache()


class _Staging(threading.local):
    """What each worker has for itself: a stream of the card, and pinned memory on both ways."""

    _stream: torch.cuda.Stream | None = None

    def __init__(self, device: torch.device, format: str, per_row: bool, measured: bool) -> None:
        self._device, self._format = device, format
        self._per_row, self._measured = per_row, measured

    def round(self, layer: str, weight_of: Callable[[str], torch.Tensor]) -> RoundedLayer:
        weight = weight_of(layer)
        shape, form = weight.shape, RowFormat(self._format)
        if self._per_row and _QUANTIZED.fullmatch(layer):
            form = row_format(self._format, shape[1])
        if not self._per_row:
            weight = weight.reshape(1, -1)
        rows = SLAB_BYTES // max(1, weight.shape[1] * weight.itemsize)
        if self._device.type == "cuda" and weight.device.type == "cpu" and rows:
            values, scale, squares = self._in_slabs(weight, rows, form.rotation)
        else:
            there = weight.to(self._device)
            values, scale, squares = self._whole(there, form.rotation)
        error = _ratio(squares) if self._measured else None
        scale = scale if self._per_row else scale.reshape(())
        return RoundedLayer(layer, values.reshape(shape), scale, form, error)

    def _whole(
        self, weight: torch.Tensor, rotation: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values, scale = quantize_rows(weight, self._format, rotation=rotation)
        squares = _squares(weight, values, scale, rotation) if self._measured else torch.zeros(2)
        return values.cpu(), scale.cpu(), squares

    def _in_slabs(
        self, weight: torch.Tensor, rows: int, rotation: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._stream is None:  # `__init__` also runs in the thread that hands out the work
            self._stream = torch.cuda.Stream(self._device)
            self._up = torch.empty(SLAB_BYTES, dtype=torch.uint8, pin_memory=True)
            self._down = torch.empty(SLAB_BYTES, dtype=torch.uint8, pin_memory=True)
        values = torch.empty(weight.shape, dtype=VALUE_DTYPES[self._format])
        scale, squares = torch.empty((len(weight), 1)), torch.zeros(2, dtype=torch.float64)
        slabs = zip(weight.split(rows), values.split(rows), scale.split(rows), strict=True)
        with torch.cuda.stream(self._stream):
            for slab, slab_values, slab_scale in slabs:
                up = self._up[: slab.nbytes].view(slab.dtype).view(slab.shape).copy_(slab)
                there = up.to(self._device, non_blocking=True)
                rounded, found = quantize_rows(there, self._format, rotation=rotation)
                down = self._down[: slab_values.nbytes].view(rounded.dtype).view(rounded.shape)
                down.copy_(rounded, non_blocking=True)
                if self._measured:
                    squares += _squares(there, rounded, found, rotation).cpu()
                slab_scale.copy_(found)  # waits for the stream
                self._stream.synchronize()
                slab_values.copy_(down)
        return values, scale, squares
