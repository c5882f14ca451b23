"""Triton: GEMM of int8, e4m3 or bf16 with scales, bias, LoRAs, and GELU or SwiGLU in its epilogue;
and weights of 4 or 6 bits as the int8 that it multiplies by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ...caches import cached
from . import interpreted
from .launch import Launch
from .rows import gelu_tanh, silu


@dataclass(frozen=True)
class Tile:
    """What one program computes, and how Triton pipelines it.

    Attributes:
        m, n: Rows of a and of b, which are the rows and columns of out.
        k: Depth of one step of the sum.
        warps: Warps per program.
        stages: Steps that are loaded ahead, this one included.
        unroll: Steps per turn of the loop. Two keep Triton 3.8 and 3.9 on sm_80 to sm_89 from
            carrying the operands of the next step over the turn: they do so byte by byte, in one
            register each, and every large tile spills.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    unroll: int


# Most rows of `a` that a tile is meant for, and the tile; the last one takes all the rest. A table
# and not an autotuner: the order of fp8 sums depends on the tile, and a seed has to give the same
# image after every restart.
# Predicted, no L40S has run it. Shared memory is 99 KiB a block on sm_89, sm_86 and sm_120, so that
# this table serves every card but Hopper.
TILES = (
    (16, Tile(16, 64, 128, 4, 4, 2)),
    (64, Tile(64, 64, 64, 4, 4, 2)),
    (512, Tile(64, 128, 64, 4, 3, 2)),
    (None, Tile(128, 256, 64, 8, 3, 2)),
)
# Hopper's tensor cores want 64 rows or more: fp8 below them is computed in fp16.
TILES_SM90 = (
    (64, Tile(64, 64, 256, 4, 4, 1)),
    (512, Tile(64, 128, 128, 4, 4, 1)),
    # Two run beside each other, one's epilogue beside the other's sums: of int8, (N, K) of
    # 3072x3072, 12288x3072 and 3072x12288 take 63, 249 and 217 us for 79, 305 and 261 by the larger
    # one (H200, 4096 rows, triton 3.6). fp8 takes the same or up to 7 % more, but spills in the
    # larger one with a LoRA.
    (None, Tile(128, 128, 128, 4, 3, 1)),
)
# At 1100 rows the larger one takes 0 to 10 % less for int8.
TILES_SM90_INT8 = (*TILES_SM90[:-1], (2048, Tile(128, 256, 128, 8, 3, 1)), TILES_SM90[-1])
# bf16 is for many rows alone: (N, K) of 3072x3072, 12288x3072 and 3072x12288 with a LoRA of rank 64
# take 114, 481 and 397 us by this tile (H200, 4096 rows); cuBLAS, which adds the LoRA's part in a
# product of its own, 117, 443 and 426, and 62 more for the GELU of the second. It fits every card.
TILE_BF16 = Tile(128, 256, 64, 8, 3, 1)


_INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def wide_dot(a, b, total):
    """total + a @ b of one float dtype, with fp32 sums; fp32 is not rounded to TF32."""
    if _INTERPRETED:  # whose products of bf16 are those of the bits
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit(do_not_specialize=["m"])
def _scaled_gemm_kernel(
    b_ptr,
    scale_b_ptr,
    bias_ptr,
    up_ptr,
    a_ptr,
    scale_a_ptr,
    t_ptr,
    out_ptr,
    m,
    n,
    t_stride,
    k: tl.constexpr,
    rank: tl.constexpr,
    gelu: tl.constexpr,
    swiglu: tl.constexpr,
    sum_dtype: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    block_rank: tl.constexpr,
    group_m: tl.constexpr,
    unroll: tl.constexpr,
):
    """out[m, n] = (sum_k a[m, k] * b[n, k]) * scale_a[m] * scale_b[n] + bias[n]
    + sum_r t[m, r] * up[n, r], and its GELU where asked for; None leaves scales and bias out.

    With SwiGLU the rows of b are [gate; up], and out has half as many columns. A tile then takes
    rows of both alternately: each thread holds pairs of a gate and what it is multiplied with.
    """
    # Programs that run together share rows of a and b: group_m tiles high, all of n wide.
    # https://triton-lang.org/main/getting-started/tutorials/03-matrix-multiplication.html
    program = tl.program_id(0)
    tiles_m = tl.cdiv(m, block_m)
    tiles_n = tl.cdiv(n, block_n)
    group = program // (group_m * tiles_n)
    first_m = group * group_m
    height = tl.minimum(tiles_m - first_m, group_m)
    inside_group = program % (group_m * tiles_n)
    tile_m = (first_m + inside_group % height) * block_m
    tile_n = (inside_group // height) * block_n

    # Rows past the end read the last row: no mask in the loop, and the store drops them.
    rows = tl.minimum(tl.arange(0, block_m), m - 1 - tile_m)
    columns = tl.minimum(tl.arange(0, block_n), n - 1 - tile_n)
    depth = tl.arange(0, block_k)
    # Of 8 images of 3072x3072 the elements of `a` exceed 2**31.
    a_ptrs = a_ptr + tile_m.to(tl.int64) * k + (rows[:, None] * k + depth[None, :])
    if swiglu:
        columns += tile_n
        columns = (columns % 2) * (n // 2) + columns // 2
        tile_n = tile_n * 0  # it is in the columns
    b_ptrs = b_ptr + tile_n.to(tl.int64) * k + (columns[None, :] * k + depth[:, None])

    total = tl.zeros((block_m, block_n), dtype=sum_dtype)
    for done in tl.range(0, k, block_k, loop_unroll_factor=unroll):
        if k % block_k == 0:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=depth[None, :] < k - done, other=0.0)
            b = tl.load(b_ptrs, mask=depth[:, None] < k - done, other=0.0)
        if scale_a_ptr is None:
            total = wide_dot(a, b, total)
        else:
            total = tl.dot(a, b, total, out_dtype=sum_dtype)
        a_ptrs += block_k
        b_ptrs += block_k

    out = total.to(tl.float32)
    if scale_a_ptr is not None:
        row_scale = tl.load(scale_a_ptr + tile_m + rows)
        column_scale = tl.load(scale_b_ptr + tile_n + columns)
        out = out * row_scale[:, None] * column_scale[None, :]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + tile_n + columns).to(tl.float32)[None, :]
    if rank > 0:
        depth = tl.arange(0, block_rank)
        t_ptrs = t_ptr + tile_m.to(tl.int64) * t_stride
        t_ptrs += rows[:, None] * t_stride + depth[None, :]
        up_ptrs = up_ptr + tile_n * rank + (columns[None, :] * rank + depth[:, None])
        for done in tl.range(0, rank, block_rank):
            if rank % block_rank == 0:
                t = tl.load(t_ptrs)
                up = tl.load(up_ptrs)
            else:
                t = tl.load(t_ptrs, mask=depth[None, :] < rank - done, other=0.0)
                up = tl.load(up_ptrs, mask=depth[:, None] < rank - done, other=0.0)
            out = wide_dot(t, up, out)
            t_ptrs += block_rank
            up_ptrs += block_rank
    if gelu:
        out = gelu_tanh(out)
    width: tl.constexpr = block_n // 2 if swiglu else block_n
    out_n = (inside_group // height) * width
    if swiglu:
        # Rounded, as a product leaves them for `swiglu_quantize`: the same bits.
        out = out.to(out_ptr.dtype.element_ty).to(tl.float32)
        gate, up_part = tl.split(tl.reshape(out, (block_m, width, 2)))
        out = silu(gate) * up_part
        n = n // 2
    out_rows = tl.arange(0, block_m)
    out_columns = tl.arange(0, width)
    out_ptrs = out_ptr + tile_m.to(tl.int64) * n + out_n
    inside = (out_rows[:, None] < m - tile_m) & (out_columns[None, :] < n - out_n)
    tl.store(
        out_ptrs + out_rows[:, None] * n + out_columns[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=inside,
    )


def choose_tile(rows: int, sm: tuple[int, int], dtype: torch.dtype) -> Tile:
    """The tile for `rows` rows of activations on a card of compute capability `sm`."""
    if dtype.itemsize > 1:
        return TILE_BF16
    table: Sequence[Any] = TILES
    if sm == (9, 0):
        table = TILES_SM90_INT8 if dtype == torch.int8 else TILES_SM90
    for most, tile in table[:-1]:
        if rows <= most:
            return tile
    return table[-1][1]


@cached
def capability(index: int) -> tuple[int, int]:
    """The compute capability of a card by its index; (0, 0) for the CPU, which is -1."""
    return (0, 0) if index < 0 else torch.cuda.get_device_capability(index)


def scaled_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    beside: tuple[torch.Tensor, torch.Tensor] | None = None,
    gelu: bool = False,
    swiglu: bool = False,
) -> Launch:
    """As `reference.scaled_gemm`, into `out`; b, scale_b, bias, up and a may be others like these.
    All are contiguous but for t.
    """
    m, k = a.shape
    n = b.shape[0]
    scales = [0 if scale is None else scale.numel() for scale in (scale_a, scale_b)]
    if b.shape[1] != k or scales != ([m, n] if a.dtype.itemsize == 1 else [0, 0]):
        raise ValueError(
            f"scaled_gemm takes a (M, K), b (N, K) and a scale for each row of 8 bits, got "
            f"{tuple(a.shape)}, {tuple(b.shape)}, {scales[0]} and {scales[1]} scales"
        )
    if out.shape != (m, n // 2 if swiglu else n):
        raise ValueError(f"scaled_gemm gives {m} rows of {n}, not {tuple(out.shape)}")
    t, up = beside or (None, None)
    rank = 0 if t is None else t.shape[1]
    if t is not None and (t.shape != (m, rank) or up.shape != (n, rank) or t.stride(1) != 1):
        raise ValueError(
            f"scaled_gemm takes t (M, R) and up (N, R), got {tuple(t.shape)} and {tuple(up.shape)}"
        )
    card = torch.cuda.current_device() if a.is_meta else a.get_device()
    tile = choose_tile(m, capability(card), a.dtype)
    # Rounded up; triton.cdiv takes 2 us of a launch for each of the two.
    tiles = -(-m // tile.m) * -(-n // tile.n)
    constants = {
        "k": k,
        "rank": rank,
        "gelu": gelu,
        "swiglu": swiglu,
        "sum_dtype": tl.int32 if a.dtype == torch.int8 else tl.float32,
        "block_m": tile.m,
        "block_n": tile.n,
        "block_k": tile.k,
        "block_rank": 32 if rank % 32 == 0 else 16,
        "group_m": 8,
        "unroll": tile.unroll,
    }
    return Launch(
        _scaled_gemm_kernel,
        tiles,
        (b, scale_b, bias, up, a),
        (scale_a, t, out, m, n, 0 if t is None else t.stride(0)),
        constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


# A weight of 4 or 6 bits as the int8 that it stands for, in one pass. A program takes units of so
# many columns that all of a unit have one scale. A thread reads 8 bytes of codes and writes 16 of
# int8 where groups have 16 columns, as in published files.

DECODED_AT_ONCE, DECODING_WARPS = 2048, 4  # columns


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
    at_once = max(DECODED_AT_ONCE // unit, 1)
    constants = {"k": k, "group": group, "unit": unit, "at_once": at_once, "bits": bits}
    constants["is_e4m3"] = group_scale.dtype == torch.uint8
    units = rows * k // unit
    return Launch(
        _decode_weight_kernel,
        triton.cdiv(units, at_once),
        (codes, group_scale, codebook),
        (out, units),
        constants,
        num_warps=DECODING_WARPS,
    )
