"""Triton: int8 or e4m3 GEMM with scales and bias in its epilogue."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import on_card_of
from .launch import Launch, PreparedLaunch


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
    (None, Tile(128, 256, 128, 8, 3, 1)),
)


@triton.jit(do_not_specialize=["m"])
def _scaled_gemm_kernel(
    b_ptr,
    scale_b_ptr,
    bias_ptr,
    a_ptr,
    scale_a_ptr,
    out_ptr,
    m,
    n,
    k: tl.constexpr,
    has_bias: tl.constexpr,
    sum_dtype: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group_m: tl.constexpr,
    unroll: tl.constexpr,
):
    """out[m, n] = (sum_k a[m, k] * b[n, k]) * scale_a[m] * scale_b[n] + bias[n]."""
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
    b_ptrs = b_ptr + tile_n.to(tl.int64) * k + (columns[None, :] * k + depth[:, None])

    total = tl.zeros((block_m, block_n), dtype=sum_dtype)
    for done in tl.range(0, k, block_k, loop_unroll_factor=unroll):
        if k % block_k == 0:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=depth[None, :] < k - done, other=0.0)
            b = tl.load(b_ptrs, mask=depth[:, None] < k - done, other=0.0)
        total = tl.dot(a, b, total, out_dtype=sum_dtype)
        a_ptrs += block_k
        b_ptrs += block_k

    row_scale = tl.load(scale_a_ptr + tile_m + rows)
    column_scale = tl.load(scale_b_ptr + tile_n + columns)
    out = total.to(tl.float32) * row_scale[:, None] * column_scale[None, :]
    if has_bias:
        out += tl.load(bias_ptr + tile_n + columns).to(tl.float32)[None, :]
    out_rows = tl.arange(0, block_m)
    out_columns = tl.arange(0, block_n)
    out_ptrs = out_ptr + tile_m.to(tl.int64) * n + tile_n
    inside = (out_rows[:, None] < m - tile_m) & (out_columns[None, :] < n - tile_n)
    tl.store(
        out_ptrs + out_rows[:, None] * n + out_columns[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=inside,
    )


def choose_tile(rows: int, sm: tuple[int, int]) -> Tile:
    """The tile for `rows` rows of activations on a card of compute capability `sm`."""
    table = TILES_SM90 if sm == (9, 0) else TILES
    for most, tile in table[:-1]:
        if rows <= most:
            return tile
    return table[-1][1]


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    """The compute capability of a card by its index; (0, 0) for the CPU, which is -1."""
    return (0, 0) if index < 0 else torch.cuda.get_device_capability(index)


def scaled_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """As `reference.scaled_gemm`.

    Args:
        out: Where to write, (M, N), contiguous, in `out_dtype`.
        tile: Overrides the choice, for measurements.
    """
    if out is None:
        out = a.new_empty(len(a), len(b), dtype=out_dtype)
    a, b, scale_a, scale_b = (part.contiguous() for part in (a, b, scale_a, scale_b))
    bias = None if bias is None else bias.contiguous()
    with on_card_of(a):
        _launch(a, b, scale_a, scale_b, bias, out, tile).once()
    return out


def prepare_scaled_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> PreparedLaunch:
    """`scaled_gemm` of this a and scale_a into `out`; takes b, scale_b and bias like these."""
    launch = _launch(a, b, scale_a, scale_b, bias, out).prepared()
    if bias is not None:
        return launch
    return lambda b, scale_b, _bias: launch(b, scale_b, out)


def _launch(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile | None = None,
) -> Launch:
    m, k = a.shape
    n = b.shape[0]
    if b.shape[1] != k or scale_a.numel() != m or scale_b.numel() != n:
        raise ValueError(
            f"scaled_gemm takes a (M, K), b (N, K) and a scale for each row, got {tuple(a.shape)}, "
            f"{tuple(b.shape)}, {scale_a.numel()} and {scale_b.numel()} scales"
        )
    if tile is None:
        tile = choose_tile(m, _capability(a.get_device()))
    # Rounded up; triton.cdiv takes 2 us of a launch for each of the two.
    tiles = -(-m // tile.m) * -(-n // tile.n)
    constants = {
        "k": k,
        "has_bias": bias is not None,
        "sum_dtype": tl.int32 if a.dtype == torch.int8 else tl.float32,
        "block_m": tile.m,
        "block_n": tile.n,
        "block_k": tile.k,
        "group_m": 8,
        "unroll": tile.unroll,
    }
    return Launch(
        _scaled_gemm_kernel,
        tiles,
        (b, scale_b, out if bias is None else bias),
        (a, scale_a, out, m, n),
        constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
