"""Weights in fp8 or int8 with one scale for each output row, and which layers get them.

A row's largest magnitude becomes 448 (e4m3) or 127 (int8), and every value is rounded to the
nearest that the format has. Everything is computed in float32, in pieces of a few rows: temporaries
stay small next to the weight, and in the processor's cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from ..errors import SettingError
from ..planning.formats import LARGEST
from .e4m3_bits import e4m3_as_float, e5m2_as_half

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
