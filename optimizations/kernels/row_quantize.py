"""Triton: per-row quantization in one pass over the rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..reference import SMALLEST_ROW, STORAGE, largest_of
from . import launch_beside

# One program holds a whole row in registers; wider rows would spill.
WIDEST_ROW = 16384


@triton.jit
def _round_to_even(steps, to_integer: tl.constexpr):
    """To whole numbers, or to what e4m3 holds; |steps| is at most 448.

    Adding 1.5 * 2**(23 + s) leaves no bits below 2**s, rounded to even. Triton's own cast to e4m3
    truncates to fp16 on the way on sm_89 (before 3.9), and its interpreter makes 64 of 127.3.
    """
    if to_integer:
        shift = 1.5 * 8388608.0
    else:
        # s is 3 below the exponent of the number, but never below that of e4m3's subnormals.
        exponent = tl.maximum(steps.to(tl.int32, bitcast=True) & 0x7F800000, (127 - 6) << 23)
        shift = (exponent + ((20 << 23) | (1 << 22))).to(tl.float32, bitcast=True)
    return (steps + shift) - shift


@triton.jit
def _row_quantize_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    x_stride,
    k,
    largest: tl.constexpr,
    smallest_row: tl.constexpr,
    to_integer: tl.constexpr,
    block_k: tl.constexpr,
):
    """scale = max(|x|) / largest, or 1 below smallest_row;  q = round(x * (1 / scale))."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block_k)
    inside = column < k
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    # Magnitudes sort like their bits, NaN above inf above all else; a float max drops NaN.
    bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=0)
    magnitude = bits.to(tl.float32, bitcast=True)
    scale = tl.where(magnitude < smallest_row, 1.0, tl.div_rn(magnitude, largest))
    # The clamp also keeps multiply and add from becoming one fma, which would not be the twin's.
    steps = tl.minimum(tl.maximum(x * tl.div_rn(1.0, scale), -largest), largest)
    steps = _round_to_even(steps, to_integer)
    tl.store(q_ptr + row * k + column, steps.to(q_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row, scale)


def launch_shape(k: int) -> tuple[int, int]:
    """Block and number of warps for rows of `k` elements, at most `WIDEST_ROW`."""
    block = max(triton.next_power_of_2(k), 256)
    return block, min(max(block // 1024, 1), 16)


def row_quantize(x: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.row_quantize`; x (M, K) may have any row stride, K is at most `WIDEST_ROW`."""
    rows, k = x.shape
    if k > WIDEST_ROW:
        raise ValueError(f"row_quantize takes rows of at most {WIDEST_ROW} elements, got {k}")
    largest = largest_of(format)
    if x.stride(1) != 1:
        x = x.contiguous()
    q = torch.empty((rows, k), dtype=STORAGE[format], device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block, warps = launch_shape(k)
    with launch_beside(x):
        _row_quantize_kernel[(rows,)](
            x,
            q,
            scale,
            x.stride(0),
            k,
            largest=largest,
            smallest_row=SMALLEST_ROW,
            to_integer=format == "int8",
            block_k=block,
            num_warps=warps,
        )
    return q, scale
