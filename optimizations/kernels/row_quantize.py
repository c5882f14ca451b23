"""Triton: per-row quantization in one pass over the rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .whole_row import launch_row_quantizer, load_row, quantize_row, store_row


@triton.jit
def _row_quantize_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    x_stride,
    k: tl.constexpr,
    largest: tl.constexpr,
    smallest_row: tl.constexpr,
    to_integer: tl.constexpr,
    part: tl.constexpr,
    parts: tl.constexpr,
):
    """As `quantize_row`, of a row in memory."""
    row = tl.program_id(0).to(tl.int64)
    a, b, c = load_row(x_ptr + row * x_stride, k, part, parts)
    a, b, c, scale = quantize_row(a, b, c, largest, smallest_row, to_integer)
    store_row(q_ptr + row * k, a, b, c, k, part, parts)
    tl.store(scale_ptr + row, scale)


def row_quantize(x: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.row_quantize`; x (M, K) may have any row stride, K is at most `WIDEST_ROW`."""
    return launch_row_quantizer(_row_quantize_kernel, x, format)
