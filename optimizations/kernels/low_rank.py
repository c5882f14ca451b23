"""Triton: rows times the first matrix of LoRAs, for both streams in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..reference import RowOrder
from .launch import Launch
from .scaled_gemm import wide_dot


class LowRankTile(NamedTuple):
    """What one program computes, and how Triton pipelines it; as `scaled_gemm.Tile`."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# The best of seven tiles at 4296 rows on an H200, for few programs and for many: K = 3072 takes 14,
# 20 and 39 us for ranks of 64, 192 and 576. They fit sm_89 too, on which nobody has run them.
TILE, TILE_OF_MANY = LowRankTile(64, 64, 128, 4, 3), LowRankTile(128, 64, 64, 4, 4)
MANY = 400  # programs
# K is split until so many programs would run, down to sums of so many products.
MOST_PROGRAMS, LEAST_DEPTH = 280, 1024


# The numbers of tokens follow the prompt and the size of the image: no kernel of its own for each.
@triton.jit(do_not_specialize=["text", "image"])
def _low_rank_rows_kernel(
    x_ptr,
    text_down_ptr,
    image_down_ptr,
    out_ptr,
    part_ptr,
    ticket_ptr,
    text,
    image,
    x_stride,
    out_stride,
    part_stride,
    k: tl.constexpr,
    text_rank: tl.constexpr,
    image_rank: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    splits: tl.constexpr,
):
    """t[row, r] = sum_k x[row, k] * down[r, k], with the down of the row's stream.

    A rank of 0 leaves a stream out. Of the programs that share a tile, each with a part of K, the
    last one adds up what all have left, always in the same order.
    """
    tiles_n: tl.constexpr = (max(text_rank, image_rank) + block_n - 1) // block_n
    program = tl.program_id(0)
    split = program % splits
    shared = program // splits
    tile_n = (shared % tiles_n) * block_n
    tile = shared // tiles_n
    # Tiles of an item: of its text rows, then of its image rows.
    text_tiles = tl.cdiv(text, block_m) if text_rank > 0 else 0
    image_tiles = tl.cdiv(image, block_m) if image_rank > 0 else 0
    item = tile // (text_tiles + image_tiles)
    tile -= item * (text_tiles + image_tiles)
    is_text = tile < text_tiles
    first = tl.where(is_text, tile, tile - text_tiles) * block_m
    length = tl.where(is_text, text, image)
    rank = tl.where(is_text, text_rank, image_rank)
    start = (item * (text + image) + tl.where(is_text, 0, text) + first).to(tl.int64)

    part: tl.constexpr = (k + splits * block_k - 1) // (splits * block_k) * block_k
    rows = tl.minimum(tl.arange(0, block_m), length - 1 - first)
    columns = tl.minimum(tile_n + tl.arange(0, block_n), rank - 1)
    depth = split * part + tl.arange(0, block_k)
    x_ptrs = x_ptr + start * x_stride + (rows[:, None] * x_stride + depth[None, :])
    if text_rank == 0:
        down_ptr = image_down_ptr
    elif image_rank == 0:
        down_ptr = text_down_ptr
    else:
        down_ptr = tl.where(is_text, text_down_ptr, image_down_ptr)
    down_ptrs = down_ptr + (columns[None, :] * k + depth[:, None])

    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    for done in tl.range(0, part, block_k):
        if k % (splits * block_k) == 0:
            x = tl.load(x_ptrs)
            down = tl.load(down_ptrs)
        else:
            x = tl.load(x_ptrs, mask=depth[None, :] < k - done, other=0.0)
            down = tl.load(down_ptrs, mask=depth[:, None] < k - done, other=0.0)
        total = wide_dot(x, down, total)
        x_ptrs += block_k
        down_ptrs += block_k

    out_rows = tl.arange(0, block_m)
    out_columns = tile_n + tl.arange(0, block_n)
    inside = (out_rows[:, None] < length - first) & (out_columns[None, :] < rank)
    out_ptrs = (
        out_ptr + start * out_stride + (out_rows[:, None] * out_stride + out_columns[None, :])
    )
    if splits == 1:
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        width: tl.constexpr = max(text_rank, image_rank)
        part_ptrs = part_ptr + start * width + (out_rows[:, None] * width + out_columns[None, :])
        tl.store(part_ptrs + split * part_stride, total, mask=inside)
        tl.debug_barrier()  # all threads have stored before one takes the ticket
        if tl.atomic_add(ticket_ptr + shared, 1, sem="acq_rel") == splits - 1:
            total = tl.zeros((block_m, block_n), dtype=tl.float32)
            for other in range(splits):
                # Past L1, where another multiprocessor's stores do not show.
                total += tl.load(
                    part_ptrs + other * part_stride, mask=inside, other=0.0, cache_modifier=".cg"
                )
            tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=inside)
            tl.store(ticket_ptr + shared, 0)  # for the next launch


def low_rank_rows(
    x: torch.Tensor,
    text_down: torch.Tensor | None,
    image_down: torch.Tensor | None,
    order: RowOrder,
    out: torch.Tensor,
) -> Launch:
    """As `reference.low_rank_rows`, of these or of tensors like them; x may have any row stride."""
    ranks = [0 if down is None else len(down) for down in (text_down, image_down)]
    tile, k = TILE, x.shape[1]
    programs = _programs(ranks, order, tile)
    if programs > MANY:
        tile = TILE_OF_MANY
        programs = _programs(ranks, order, tile)
    splits = 1
    while 2 * splits * programs <= MOST_PROGRAMS and k // (2 * splits) >= LEAST_DEPTH:
        splits *= 2
    part = ticket = None
    if splits > 1:
        part = x.new_empty(splits, len(x), max(ranks), dtype=torch.float32)
        ticket = x.new_zeros(programs, dtype=torch.int32)
    constants = {
        "k": k,
        "text_rank": ranks[0],
        "image_rank": ranks[1],
        "block_m": tile.m,
        "block_n": tile.n,
        "block_k": tile.k,
        "splits": splits,
    }
    strides = x.stride(0), out.stride(0), len(x) * max(ranks)
    return Launch(
        _low_rank_rows_kernel,
        programs * splits,
        (x, text_down, image_down),
        (out, part, ticket, order.text, order.image, *strides),
        constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _programs(ranks: list[int], order: RowOrder, tile: LowRankTile) -> int:
    lengths = zip(ranks, order[1:], strict=True)
    rows = order.items * sum(-(-length // tile.m) for rank, length in lengths if rank)
    return rows * -(-max(ranks) // tile.n)
