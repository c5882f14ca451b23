"""Triton: SwiGLU and per-row quantization in one pass over gate and up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...spec.formats import RowFormat
from ..reference import QuantizedRows, check_rotation, storage_of
from . import on_card_of
from .launch import Launch, PreparedLaunch
from .rows import WIDEST_ROW, launch_shape, load_row, quantization, quantize_row, store_row


@triton.jit(do_not_specialize=["cut", "gap"])
def _swiglu_quantize_kernel(
    gate_ptr,
    up_ptr,
    q_ptr,
    scale_ptr,
    stride,
    cut,
    gap,
    k: tl.constexpr,
    largest: tl.constexpr,
    smallest_row: tl.constexpr,
    to_integer: tl.constexpr,
    rotation: tl.constexpr,
    part: tl.constexpr,
    parts: tl.constexpr,
    keep: tl.constexpr,
):
    """As `rows.quantize_row`, of gate / (1 + exp(-gate)) * up, which is written over the gate to
    `keep` it; that alone where there is no q.
    """
    row = tl.program_id(0).to(tl.int64)
    a, b, c = load_row(gate_ptr + row * stride, k, part, parts)
    up_a, up_b, up_c = load_row(up_ptr + row * stride, k, part, parts)
    a = _silu(a) * up_a
    b = _silu(b) * up_b
    c = _silu(c) * up_c
    if keep:
        store_row(gate_ptr + row * stride, a, b, c, k, part, parts)
    if q_ptr is not None:
        a, b, c, scale = quantize_row(
            a, b, c, largest, smallest_row, to_integer, rotation, part, parts
        )
        store_row(q_ptr + row * k, a, b, c, k, part, parts)
        tl.store(scale_ptr + row + tl.where(row >= cut, gap, 0), scale)


@triton.jit
def _silu(x):
    # exp2 is 0 or inf far out, and no NaN.
    return x / (1.0 + tl.exp2(x * -1.4426950408889634))


def _launch(
    gate: torch.Tensor,
    up: torch.Tensor,
    format: RowFormat | None,
    out: QuantizedRows | None,
    keep: bool,
) -> Launch:
    rows, k = gate.shape
    if k > WIDEST_ROW:
        raise ValueError(f"rows of at most {WIDEST_ROW} elements can be activated, got {k}")
    if gate.shape != up.shape or gate.stride() != up.stride() or gate.stride(1) != 1:
        raise ValueError(
            "swiglu_quantize takes gate and up of one shape and row stride, got "
            f"{tuple(gate.shape)} of {gate.stride()} and {tuple(up.shape)} of {up.stride()}"
        )
    rotated = format is not None and format.rotation > 0
    if rotated:
        check_rotation(format.rotation, k)
    part, parts, warps = launch_shape(k, rotated)
    constants = {
        "k": k,
        **quantization(format),
        "part": part,
        "parts": parts,
        "keep": keep or format is None,
    }
    written = (None, None) if out is None else (out.values, out.scale)
    cut, gap = (rows, 0) if out is None else (out.cut, out.gap)
    fixed = (gate, up, *written, gate.stride(0), cut, gap)
    return Launch(_swiglu_quantize_kernel, rows, (), fixed, constants, num_warps=warps)


def swiglu_quantize(
    gate: torch.Tensor, up: torch.Tensor, format: RowFormat | None, keep: bool = False
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """As `reference.swiglu_quantize`; gate and up (M, K) have one row stride and columns that lie
    side by side, K is at most `WIDEST_ROW`.
    """
    out = None
    if format is not None:
        q = gate.new_empty(gate.shape, dtype=storage_of(format))
        out = QuantizedRows(q, gate.new_empty(len(gate), 1, dtype=torch.float32), len(gate))
    with on_card_of(gate):
        _launch(gate, up, format, out, keep).once()
    return None if out is None else (out.values, out.scale)


def prepare_swiglu_quantize(
    gate: torch.Tensor,
    up: torch.Tensor,
    format: RowFormat | None,
    out: QuantizedRows | None,
    keep: bool = False,
) -> PreparedLaunch:
    """`swiglu_quantize` of gate and up into `out`."""
    return _launch(gate, up, format, out, keep).prepared()
