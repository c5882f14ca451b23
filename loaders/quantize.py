"""e4m3 and e5m2 values through the bits of float16, because torch converts fp8 one value at a time
on the CPU: 0.3 G values/s a thread, and 3 this way.

The exponent and mantissa of e4m3 are bits 13 to 7 of the float16 number that is 2^-8 of its value,
subnormal numbers included; an e5m2 byte is the upper half of a float16 number. Only e4m3's NaN
(0x7F, 0xFF) has no such image.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatchcase
from typing import Any

import torch

from ..errors import CheckpointError, SettingError
from ..spec import LARGEST


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


# Weights in fp8 or int8 with one scale for each output row, and which layers get them.
#
# A row's largest magnitude becomes 448 (e4m3) or 127 (int8), and every value is rounded to the
# nearest that the format has. Everything is computed in float32, in pieces of a few rows:
# temporaries
# stay small next to the weight, and in the processor's cache.

FORMATS = ("fp8", "int8")
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
# What `.comfy_quant` calls them. Core ComfyUI has no fp8 with one scale a row: it refuses our name
# instead of computing with one scale.
COMFY_QUANT = {"fp8": "float8_e4m3fn_rowwise", "int8": "int8_tensorwise"}
# Under it, values that are smaller than any weight of a model would make the scale subnormal.
SMALLEST_SCALE = 1e-30
# Values in a piece: small enough for a processor's cache, large enough to fill a card.
PIECE = {"cpu": 2**19, "cuda": 2**24}

_QUANTIZED = re.compile(
    r"transformer_blocks\.[0-9]+\.("
    r"attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
    r"|(img|txt)_mlp\.net\.(0\.proj|2))"
)
_MODULATION = re.compile(r"transformer_blocks\.[0-9]+\.(img|txt)_mod\.1")


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
    weight: torch.Tensor, format: str, *, seed: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds a weight to one of `FORMATS`.

    int8 from a float32 weight is bit for bit what comfy-kitchen's `quantize_int8_rowwise` gives,
    except for the scale of a row of zeros (1 here, 1e-30 there). From bf16 it is more exact:
    comfy-kitchen rounds the quotient to bf16 first, to steps of 0.5 from 64 on.

    Args:
        weight: [N, K], any floating dtype, on any device.
        seed: rounds stochastically instead of to nearest (even), so that changes under a step
            survive on average; the numbers drawn depend on the device.

    Returns:
        values [N, K] of float8_e4m3fn or int8 and scales [N, 1] of float32, where values * scales
        is the weight. A row that holds NaN or infinity has a scale that is not finite: its values
        mean nothing.

    Raises:
        SettingError: the format is not in `FORMATS`.
    """
    scale = row_scales(weight, format)
    limit = LARGEST[format]
    values = torch.empty(weight.shape, dtype=DTYPES[format], device=weight.device)
    generator = None
    if seed is not None:
        generator = torch.Generator(weight.device).manual_seed(seed)
    for rows in _pieces(weight):
        scaled = weight[rows].float() / scale[rows]
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


def relative_error(weight: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> float:
    """Returns |values * scale - weight| / |weight|, in Frobenius norms; 0 for a weight of zeros."""
    # Sums in place: a list of small results between large temporaries would fragment the heap.
    lost, whole = torch.zeros((2, 1), dtype=torch.float64, device=weight.device)
    for rows in _pieces(weight):
        exact = weight[rows].float()
        rounded = _as_float(values[rows]) * scale[rows]
        lost += torch.linalg.vector_norm(rounded.sub_(exact)).double() ** 2
        whole += torch.linalg.vector_norm(exact).double() ** 2
    return float((lost / whole).sqrt().nan_to_num_(0.0))


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
                f"keep pattern {pattern!r} matches no layer that is quantized: patterns are "
                "compared with whole layer names such as transformer_blocks.0.attn.to_q or "
                "transformer_blocks.59.img_mlp.net.2, so begin with * or transformer_blocks."
            )
        kept |= matching
    return candidates - kept


def is_modulation(layer: str) -> bool:
    """Whether a layer computes a block's modulation, from the timestep alone."""
    return _MODULATION.fullmatch(layer) is not None


def comfy_quant_tensor(format: str, settings: Mapping[str, Any] | None = None) -> torch.Tensor:
    """Returns the `.comfy_quant` tensor of a layer: JSON as uint8 [bytes].

    Args:
        format: one of `FORMATS`.
        settings: further entries, such as `{"full_precision_matrix_mult": True}`.
    """
    text = json.dumps({"format": COMFY_QUANT[_known(format)], **(settings or {})})
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _known(format: str) -> str:
    if format not in FORMATS:
        raise SettingError(f"format {format!r} is unknown: choose {' or '.join(FORMATS)}.")
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


# Quantizes the layers of a model one by one, several in work at a time, on a card if there is one.
#
# A mapped bf16 weight is read from its file, goes to the card in slabs of rows, is rounded there
# and
# comes back in half the bytes: host memory holds the result and the slabs, never the bf16 model.

# One thread spends its time reading the file and copying, so several keep a card's bus busy. On a
# CPU torch's own threads share the work of one layer.
WORKERS_OF_A_CARD = 8
# Pinned memory, from which and to which a card copies 3 times as fast: so much for each worker and
# each way. torch keeps these 128 MiB for its next pinned tensors.
SLAB_BYTES = 8 * 2**20


def quantize_layers(
    layers: Iterable[str],
    weight_of: Callable[[str], torch.Tensor],
    format: str,
    device: torch.device,
    done: Callable[[], None] = lambda: None,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns {layer: (values [N, K], scale [N, 1] float32)} on the CPU.

    Args:
        weight_of: returns a layer's weight [N, K] of any floating dtype; called in other threads.
        format: fp8 or int8.
        device: where the rounding is computed.
        done: called after each layer, in the caller's thread; what it raises ends the work.

    Raises:
        CheckpointError: a weight holds NaN or infinity.
    """
    workers = min(WORKERS_OF_A_CARD, os.cpu_count() or 1) if device.type == "cuda" else 1
    staging = _Staging(device)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="quantize")
    try:
        futures = {
            pool.submit(staging.quantize, layer, weight_of, format): layer for layer in layers
        }
        found = {}
        for future in as_completed(futures):
            values, scale = future.result()
            if not scale.isfinite().all():
                raise CheckpointError(
                    f"the tensor {f'{futures[future]}.weight'!r} holds NaN or infinity: download "
                    "the file again."
                )
            found[futures[future]] = (values, scale)
            done()
        return found
    finally:
        pool.shutdown(cancel_futures=True)
        if device.type == "cuda":
            # Each worker's stream holds memory that no other stream could use.
            torch.cuda.empty_cache()


class _Staging(threading.local):
    """What each worker has for itself: a stream of the card, and pinned memory on both ways."""

    _stream: torch.cuda.Stream | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def quantize(
        self, layer: str, weight_of: Callable[[str], torch.Tensor], format: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight = weight_of(layer)
        if self._device.type != "cuda":
            return quantize_rows(weight, format)
        if self._stream is None:  # `__init__` also runs in the thread that hands out the work
            self._stream = torch.cuda.Stream(self._device)
            self._up = torch.empty(SLAB_BYTES, dtype=torch.uint8, pin_memory=True)
            self._down = torch.empty(SLAB_BYTES, dtype=torch.uint8, pin_memory=True)
        rows = SLAB_BYTES // max(1, weight.shape[1] * weight.itemsize)
        with torch.cuda.stream(self._stream):
            if rows == 0 or weight.device.type != "cpu":
                values, scale = quantize_rows(weight.to(self._device), format)
                return values.cpu(), scale.cpu()
            values = torch.empty(weight.shape, dtype=DTYPES[format])
            scale = torch.empty((len(weight), 1))
            slabs = zip(weight.split(rows), values.split(rows), scale.split(rows), strict=True)
            for slab, slab_values, slab_scale in slabs:
                self._through_the_card(slab, slab_values, slab_scale, format)
        return values, scale

    def _through_the_card(
        self, slab: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, format: str
    ) -> None:
        up = self._up[: slab.nbytes].view(slab.dtype).view(slab.shape).copy_(slab)
        rounded, found = quantize_rows(up.to(self._device, non_blocking=True), format)
        down = self._down[: values.nbytes].view(values.dtype).view(values.shape)
        down.copy_(rounded, non_blocking=True)
        scale.copy_(found)  # waits for the stream
        self._stream.synchronize()
        values.copy_(down)
