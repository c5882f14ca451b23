"""Triton: a weight of 4 or 6 bits as the int8 that it stands for, in one pass.

A program takes units of so many columns that all of a unit have one scale. A thread reads 8 bytes
of codes and writes 16 of int8 where groups have 16 columns, as in published files.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Launch

COLUMNS_AT_ONCE, WARPS = 2048, 4


@triton.jit(do_not_specialize=["units"])
def _decode_weight_kernel(
    codes_ptr,
    scale_ptr,
    codebook_ptr,
    out_ptr,
    units,
    k: tl.constexpr,
    group: tl.constexpr,
    unit: tl.constexpr,
    at_once: tl.constexpr,
    bits: tl.constexpr,
    is_e4m3: tl.constexpr,
):
    """rint(clamp(level * scale, -127, 127))"""
    one = tl.program_id(0) * at_once + tl.arange(0, at_once)[:, None]
    there = one < units
    row, place = one // (k // unit), one % (k // unit)
    pair = tl.arange(0, unit // 2)[None, :]
    first = codes_ptr + row.to(tl.int64) * (k * bits // 8)
    codes = tl.load(first + place * (unit // 2) + pair, mask=there, other=0).to(tl.int32)
    low, high = codes & 15, (codes >> 4) & 15
    if bits == 6:
        upper = first + k // 2 + place * (unit // 4) + pair // 2
        four = tl.load(upper, mask=there, other=0).to(tl.int32) >> 4 * (pair % 2)
        low |= (four & 3) << 4
        high |= (four & 12) << 2
    if is_e4m3:
        scale = _from_e4m3(tl.load(scale_ptr + one * unit // group, mask=there, other=0))
    else:
        scale = tl.load(scale_ptr + one * unit // group, mask=there, other=0.0)
    if codebook_ptr is None:
        low, high = (low - 2 ** (bits - 1)).to(tl.float32), (high - 2 ** (bits - 1)).to(tl.float32)
    else:
        low, high = tl.load(codebook_ptr + low), tl.load(codebook_ptr + high)
    values = tl.reshape(tl.join(_to_step(low * scale), _to_step(high * scale)), at_once, unit)
    column = tl.arange(0, unit)[None, :]
    tl.store(out_ptr + one.to(tl.int64) * unit + column, values.to(tl.int8), mask=there)


@triton.jit
def _from_e4m3(byte):
    """fp32 of what no card before sm_89 converts."""
    byte = byte.to(tl.int32)
    small = (byte & 7).to(tl.float32) * 0.001953125  # 2**-9, the step of subnormals
    normal = (((byte & 0x7F) << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    size = tl.where((byte & 0x78) == 0, small, normal)
    return tl.where((byte & 0x80) == 0, size, -size)


@triton.jit
def _to_step(x):
    """Rounded to even, in the low byte of an int32; as `rows.round_to_step`."""
    return (tl.clamp(x, -127.0, 127.0) + 1.5 * 8388608.0).to(tl.int32, bitcast=True)


def decode_weight(
    codes: torch.Tensor,
    group_scale: torch.Tensor,
    codebook: torch.Tensor | None,
    bits: int,
    out: torch.Tensor,
) -> Launch:
    """As `reference.decode_weight`, into `out`, (N, K) of int8, of these or of tensors like them,
    e4m3 scales as bytes.
    """
    rows, k = out.shape
    group = k // group_scale.shape[1]
    shapes = codes.shape == (rows, k * bits // 8) and group_scale.shape == (rows, k // group)
    if not shapes or group % 4 or not (codes.is_contiguous() and group_scale.is_contiguous()):
        raise ValueError(
            f"{tuple(codes.shape)} and {tuple(group_scale.shape)} are no codes and scales of "
            f"{tuple(out.shape)} in {bits} bits"
        )
    unit = group & -group
    at_once = max(COLUMNS_AT_ONCE // unit, 1)
    constants = {"k": k, "group": group, "unit": unit, "at_once": at_once, "bits": bits}
    constants["is_e4m3"] = group_scale.dtype == torch.uint8
    units = rows * k // unit
    return Launch(
        _decode_weight_kernel,
        triton.cdiv(units, at_once),
        (codes, group_scale, codebook),
        (out, units),
        constants,
        num_warps=WARPS,
    )
