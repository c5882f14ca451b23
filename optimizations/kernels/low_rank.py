"""Triton: rows times the first matrix of LoRAs, for both streams in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..reference import RowOrder
from . import on_card_of
from .launch import Launch, PreparedLaunch
from .rows import _gelu
from .scaled_gemm import wide_dot


class LowRankTile(NamedTuple):
    """What one program computes, and how Triton pipelines it; as `scaled_gemm.Tile`."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# Predicted. Low enough that 4296 rows fill a card.
TILE = LowRankTile(32, 64, 128, 4, 3)


# The numbers of tokens follow the prompt and the size of the image: no kernel of its own for each.
@triton.jit(do_not_specialize=["text", "image"])
def _low_rank_rows_kernel(
    x_ptr,
    text_down_ptr,
    image_down_ptr,
    out_ptr,
    text,
    image,
    x_stride,
    out_stride,
    k: tl.constexpr,
    text_rank: tl.constexpr,
    image_rank: tl.constexpr,
    text_gelu: tl.constexpr,
    image_gelu: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    """t[row, r] = sum_k f(x[row, k]) * down[r, k], with the down of the row's stream.

    A rank of 0 leaves a stream out.
    """
    tiles_n: tl.constexpr = (max(text_rank, image_rank) + block_n - 1) // block_n
    program = tl.program_id(0)
    tile_n = (program % tiles_n) * block_n
    tile = program // tiles_n
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

    rows = tl.minimum(tl.arange(0, block_m), length - 1 - first)
    columns = tl.minimum(tile_n + tl.arange(0, block_n), rank - 1)
    depth = tl.arange(0, block_k)
    x_ptrs = x_ptr + start * x_stride + (rows[:, None] * x_stride + depth[None, :])
    if text_rank == 0:
        down_ptr = image_down_ptr
    elif image_rank == 0:
        down_ptr = text_down_ptr
    else:
        down_ptr = tl.where(is_text, text_down_ptr, image_down_ptr)
    down_ptrs = down_ptr + (columns[None, :] * k + depth[:, None])

    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    for done in tl.range(0, k, block_k):
        if k % block_k == 0:
            x = tl.load(x_ptrs)
            down = tl.load(down_ptrs)
        else:
            x = tl.load(x_ptrs, mask=depth[None, :] < k - done, other=0.0)
            down = tl.load(down_ptrs, mask=depth[:, None] < k - done, other=0.0)
        if text_gelu and image_gelu:
            x = _gelu(x.to(tl.float32)).to(down.dtype)
        elif text_gelu:
            x = tl.where(is_text, _gelu(x.to(tl.float32)).to(down.dtype), x)
        elif image_gelu:
            x = tl.where(is_text, x, _gelu(x.to(tl.float32)).to(down.dtype))
        total = wide_dot(x, down, total)
        x_ptrs += block_k
        down_ptrs += block_k

    out_rows = tl.arange(0, block_m)
    out_columns = tile_n + tl.arange(0, block_n)
    out_ptrs = out_ptr + start * out_stride
    tl.store(
        out_ptrs + out_rows[:, None] * out_stride + out_columns[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=(out_rows[:, None] < length - first) & (out_columns[None, :] < rank),
    )


def low_rank_rows(
    x: torch.Tensor,
    text_down: torch.Tensor | None,
    image_down: torch.Tensor | None,
    order: RowOrder,
    gelu: tuple[bool, bool] = (False, False),
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `reference.low_rank_rows`; x may have any row stride."""
    if out is None:
        downs = (down for down in (text_down, image_down) if down is not None)
        out = x.new_zeros(len(x), max(map(len, downs)))
    with on_card_of(x):
        _launch(x, text_down, image_down, order, gelu, out).once()
    return out


def prepare_low_rank_rows(
    x: torch.Tensor,
    text_down: torch.Tensor | None,
    image_down: torch.Tensor | None,
    order: RowOrder,
    gelu: tuple[bool, bool],
    out: torch.Tensor,
) -> PreparedLaunch:
    """`low_rank_rows` into `out`; takes x, text_down and image_down like these."""
    return _launch(x, text_down, image_down, order, gelu, out).prepared()


def _launch(
    x: torch.Tensor,
    text_down: torch.Tensor | None,
    image_down: torch.Tensor | None,
    order: RowOrder,
    gelu: tuple[bool, bool],
    out: torch.Tensor,
    tile: LowRankTile = TILE,
) -> Launch:
    ranks = [0 if down is None else len(down) for down in (text_down, image_down)]
    lengths = zip(ranks, order[1:], strict=True)
    tiles = order.items * sum(-(-length // tile.m) for rank, length in lengths if rank)
    constants = {
        "k": x.shape[1],
        "text_rank": ranks[0],
        "image_rank": ranks[1],
        "text_gelu": gelu[0],
        "image_gelu": gelu[1],
        "block_m": tile.m,
        "block_n": tile.n,
        "block_k": tile.k,
    }
    return Launch(
        _low_rank_rows_kernel,
        tiles * -(-max(ranks) // tile.n),
        (x, text_down, image_down),
        (out, order.text, order.image, x.stride(0), out.stride(0)),
        constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
