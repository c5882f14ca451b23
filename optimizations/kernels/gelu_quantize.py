"""Triton: tanh GELU and per-row quantization in one pass over the rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .whole_row import launch_row_quantizer, load_row, quantize_row, store_row


@triton.jit
def _gelu_quantize_kernel(
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
    """As `quantize_row`, of the GELU of a row in memory."""
    row = tl.program_id(0).to(tl.int64)
    a, b, c = load_row(x_ptr + row * x_stride, k, part, parts)
    a, b, c, scale = quantize_row(_gelu(a), _gelu(b), _gelu(c), largest, smallest_row, to_integer)
    store_row(q_ptr + row * k, a, b, c, k, part, parts)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _gelu(x):
    """x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 x**3).

    (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)), which loses no bits where tanh(u) is near -1.
    """
    # exp2 of -2 u / ln(2), its constants multiplied out; 0 or inf far out, and no NaN.
    return x / (1.0 + tl.exp2(x * (-2.302208198144325 - 0.1029432395800235 * (x * x))))


def gelu_quantize(x: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.gelu_quantize`; x (M, K) may have any row stride, K is at most `WIDEST_ROW`."""
    return launch_row_quantizer(_gelu_quantize_kernel, x, format)
