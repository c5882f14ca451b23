"""Triton: attention with queries and keys in int8, and weights and values in bf16 or e4m3."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...spec.sizes import HEAD_TOKENS_AT_ONCE
from ..reference import (
    HEAD_DIMS_8BIT,
    LARGEST_VALUE,
    SMALLEST_ROW,
    WEIGHT_SCALE,
    QuantizedHeads,
    padded,
)
from .launch import Launch, PreparedLaunch
from .rows import magnitude, round_to_step
from .scaled_gemm import capability


class AttentionTile(NamedTuple):
    """Queries of a program, keys of a step, and how Triton compiles it."""

    queries: int
    keys: int
    warps: int
    stages: int


# By form, and whether there is a mask. sm_90: the fastest of nine without spills at 4,296 tokens,
# 24 heads x 128 (H200, triton 3.6): 0.531 ms in int8 and 0.402 in int8_fp8, with a mask 0.701 and
# 0.475, where FlashAttention-2 takes 0.728; at 16,584 tokens 6.50 and 5.15 of 9.54.
# Elsewhere predicted: what keeps all in registers within 99 KiB of shared memory.
TILE = AttentionTile(128, 64, 8, 3)
TILES_SM90 = {
    ("int8", False): AttentionTile(128, 128, 8, 3),
    ("int8", True): AttentionTile(64, 64, 4, 3),
    ("int8_fp8", False): AttentionTile(64, 128, 4, 3),
    ("int8_fp8", True): AttentionTile(64, 128, 4, 3),
}


@triton.jit(do_not_specialize=["mask_stride", "tokens", "queries"])
def _attention_kernel(
    mask_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    mask_stride,
    v_item_stride,
    v_token_stride,
    v_head_stride,
    out_item_stride,
    out_token_stride,
    tokens,
    queries,
    length,
    q_length,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    tile: tl.constexpr,
    keys: tl.constexpr,
    weight_scale: tl.constexpr,
):
    """A tile of the queries of one head, over all keys; FlashAttention-2's loop (arXiv 2307.08691).

    v is (batch, tokens, heads, head_dim) by its strides, or with v_scale (batch, heads, head_dim,
    length). Triton sees that length is a multiple of 16, without which it reads v byte by byte.
    """
    tiles = tl.cdiv(queries, tile)
    program = tl.program_id(0)
    pair = program // tiles
    first = (program - pair * tiles) * tile
    item = pair // heads
    head = pair - item * heads
    start = pair.to(tl.int64) * length
    row = first + tl.arange(0, tile)
    channel = tl.arange(0, head_dim)
    q_row = pair.to(tl.int64) * q_length + row
    q = tl.load(q_ptr + q_row[:, None] * head_dim + channel[None, :])
    q_scale = tl.load(q_scale_ptr + q_row)
    k_ptr += start * head_dim
    k_scale_ptr += start
    if v_scale_ptr is not None:
        v_ptr += start * head_dim
    else:
        v_ptr += item.to(tl.int64) * v_item_stride + head.to(tl.int64) * v_head_stride
    if mask_ptr is not None:
        mask_ptr += item * mask_stride

    best = tl.full((tile,), -1e30, tl.float32)
    sums = tl.zeros((tile,), tl.float32)
    total = tl.zeros((tile, head_dim), tl.float32)
    # Steps of whole tiles, without a comparison for each key; then what is left.
    whole = tokens // keys * keys
    for key in range(0, whole, keys):
        best, sums, total = _step(
            q, q_scale, best, sums, total, k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, mask_ptr,
            v_token_stride, key, tokens, length, head_dim, keys, weight_scale, False,
        )  # fmt: skip
    if whole < tokens:
        best, sums, total = _step(
            q, q_scale, best, sums, total, k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, mask_ptr,
            v_token_stride, whole, tokens, length, head_dim, keys, weight_scale, True,
        )  # fmt: skip
    out = total / sums[:, None]
    if v_scale_ptr is not None:
        v_scale = tl.load(v_scale_ptr + pair * head_dim + channel)
        out *= (v_scale / weight_scale)[None, :]
    out_ptr += item.to(tl.int64) * out_item_stride + head * head_dim
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * out_token_stride + channel[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=(row < queries)[:, None])


@triton.jit
def _step(
    q,
    q_scale,
    best,
    sums,
    total,
    k_ptr,
    k_scale_ptr,
    v_ptr,
    v_scale_ptr,
    mask_ptr,
    v_token_stride,
    first,
    tokens,
    length,
    head_dim: tl.constexpr,
    keys: tl.constexpr,
    weight_scale: tl.constexpr,
    last: tl.constexpr,
):
    """The softmax so far with `keys` more keys from `first` on, some of them past the end in the
    last step.
    """
    key = first + tl.arange(0, keys)
    channel = tl.arange(0, head_dim)
    inside = key < tokens
    # Rows of k go on to the next multiple of every step.
    k = tl.load(k_ptr + key[None, :] * head_dim + channel[:, None])
    k_scale = tl.load(k_scale_ptr + key)
    scores = tl.dot(q, k, out_dtype=tl.int32).to(tl.float32) * k_scale[None, :]
    if mask_ptr is not None:
        # The mask in the unit of these scores, before q's scale.
        added = tl.load(mask_ptr + key, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
        scores = scores * q_scale[:, None] + added[None, :]
    if last:
        scores = tl.where(inside[None, :], scores, float("-inf"))
    if mask_ptr is not None:
        now = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - now[:, None])
    else:  # one multiplication and addition; a scale is never negative
        now = tl.maximum(best, tl.max(scores, axis=1) * q_scale)
        weights = tl.exp2(scores * q_scale[:, None] - now[:, None])
    shrunk = tl.exp2(best - now)
    sums = sums * shrunk + tl.sum(weights, axis=1)
    total *= shrunk[:, None]
    if v_scale_ptr is not None:
        v = tl.load(v_ptr + channel[:, None] * length + key[None, :])
        # Added up in fp32: tensor cores keep 14 bits of a sum of e4m3 products.
        weights = (weights * weight_scale).to(v_ptr.dtype.element_ty)
        total += tl.dot(weights, tl.trans(v))
    else:
        v_ptrs = v_ptr + key.to(tl.int64)[:, None] * v_token_stride + channel[None, :]
        v = tl.load(v_ptrs, mask=inside[:, None], other=0.0) if last else tl.load(v_ptrs)
        total = tl.dot(weights.to(v_ptr.dtype.element_ty), v, total, input_precision="ieee")
    return now, sums, total


# Values in e4m3: the largest magnitude of each channel, then what they are divided by.


@triton.jit
def _load_values(
    v_ptr,
    v_item_stride,
    v_token_stride,
    v_head_stride,
    pair,
    token,
    tokens,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
):
    """These tokens of one head in fp32, with zeros past the last one."""
    item = pair // heads
    v_ptr += item.to(tl.int64) * v_item_stride
    v_ptr += (pair - item * heads).to(tl.int64) * v_head_stride
    channel = tl.arange(0, head_dim)
    v_ptrs = v_ptr + token.to(tl.int64)[:, None] * v_token_stride + channel[None, :]
    return tl.load(v_ptrs, mask=(token < tokens)[:, None], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _largest_kernel(
    v_ptr,
    largest_ptr,
    v_item_stride,
    v_token_stride,
    v_head_stride,
    tokens,
    chunks,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    chunk: tl.constexpr,
):
    """The largest magnitude of each channel among `chunk` tokens of one head."""
    program = tl.program_id(0)
    pair = program // chunks
    token = (program - pair * chunks) * chunk + tl.arange(0, chunk)
    channel = tl.arange(0, head_dim)
    v = _load_values(
        v_ptr, v_item_stride, v_token_stride, v_head_stride, pair, token, tokens, heads, head_dim
    )
    tl.store(largest_ptr + program * head_dim + channel, magnitude(v, 0))


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _values_kernel(
    v_ptr,
    largest_ptr,
    q_ptr,
    scale_ptr,
    v_item_stride,
    v_token_stride,
    v_head_stride,
    tokens,
    length,
    chunks,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    chunk: tl.constexpr,
    largest_value: tl.constexpr,
    smallest: tl.constexpr,
):
    """`chunk` tokens of one head in e4m3, transposed."""
    program = tl.program_id(0)
    pair = program // chunks
    token = (program - pair * chunks) * chunk + tl.arange(0, chunk)
    channel = tl.arange(0, head_dim)
    largest = tl.zeros((head_dim,), tl.int32)
    for other in range(0, chunks):
        found = tl.load(largest_ptr + (pair * chunks + other) * head_dim + channel)
        largest = tl.maximum(largest, found.to(tl.int32, bitcast=True))
    largest = largest.to(tl.float32, bitcast=True)
    scale = tl.where(largest < smallest, 1.0, tl.div_rn(largest, largest_value))
    tl.store(scale_ptr + pair * head_dim + channel, scale)  # each program of the head the same
    v = _load_values(
        v_ptr, v_item_stride, v_token_stride, v_head_stride, pair, token, tokens, heads, head_dim
    )
    v = round_to_step(v * tl.div_rn(1.0, scale)[None, :], largest_value, False)
    q_ptrs = q_ptr + (pair.to(tl.int64) * head_dim + channel)[:, None] * length + token[None, :]
    tl.store(q_ptrs, tl.trans(v.to(q_ptr.dtype.element_ty)))


def _quantize_values(v: torch.Tensor, into: QuantizedHeads) -> list[Launch]:
    batch, tokens, heads, head_dim = v.shape
    length = padded(tokens)
    chunks = length // HEAD_TOKENS_AT_ONCE
    strides = v.stride(0), v.stride(1), v.stride(2)
    constants = {"heads": heads, "head_dim": head_dim, "chunk": HEAD_TOKENS_AT_ONCE}
    fixed = (v, into.v_largest, *strides, tokens, chunks)
    programs = batch * heads * chunks
    largest = Launch(_largest_kernel, programs, (), fixed, constants, num_warps=4)
    constants = {**constants, "largest_value": LARGEST_VALUE, "smallest": SMALLEST_ROW}
    fixed = (v, into.v_largest, into.v, into.v_scale, *strides, tokens, length, chunks)
    return [largest, Launch(_values_kernel, programs, (), fixed, constants, num_warps=4)]


def prepare_attention_8bit(
    heads: QuantizedHeads, v: torch.Tensor, mask: torch.Tensor | None, out: torch.Tensor
) -> PreparedLaunch:
    """`attention_8bit` of these tensors; takes a mask like this one, or None without one."""
    *values, attend = (each.prepared() for each in attention_8bit(heads, v, mask, out))

    def run(mask: torch.Tensor | None) -> None:
        for quantize in values:
            quantize()
        attend(mask)

    return run if values else attend


def attention_8bit(
    heads: QuantizedHeads, v: torch.Tensor, mask: torch.Tensor | None, out: torch.Tensor
) -> list[Launch]:
    """As `reference.attention_8bit`, after `quantize_values` where the form has them; v, mask
    and out have a contiguous last dimension.
    """
    batch, tokens, count, head_dim = v.shape
    queries = out.shape[1]
    length, q_length = padded(tokens), padded(queries)
    fits = heads.k.shape == (batch, count, length, head_dim)
    fits = fits and heads.q.shape == (batch, count, q_length, head_dim)
    if head_dim not in HEAD_DIMS_8BIT or not fits:
        raise ValueError(
            f"attention_8bit takes heads of {HEAD_DIMS_8BIT} elements, padded to {q_length} and "
            f"{length} tokens, got {tuple(heads.q.shape)} and {tuple(heads.k.shape)} for values "
            f"{tuple(v.shape)}"
        )
    whole = out.shape == (batch, queries, count, head_dim)
    if not whole or out.stride()[2:] != (head_dim, 1) or v.stride(3) != 1:
        raise ValueError(
            f"attention_8bit takes values and a result of the same heads, which lie side by side "
            f"in the result, got {tuple(v.shape)} {v.stride()} and {tuple(out.shape)} "
            f"{out.stride()}"
        )
    if mask is not None and (mask.shape[1:] != (1, 1, tokens) or mask.stride(3) != 1):
        raise ValueError(
            f"attention_8bit takes a mask of {batch} x 1 x 1 x {tokens}, got {tuple(mask.shape)}"
        )
    form = "int8" if heads.v is None else "int8_fp8"
    tile = choose_tile(form, mask is not None, capability(v.get_device()))
    constants = {
        "heads": count,
        "head_dim": head_dim,
        "tile": tile.queries,
        "keys": tile.keys,
        "weight_scale": WEIGHT_SCALE,
    }
    fixed = (
        *(heads.q, heads.k, v if heads.v is None else heads.v),
        *(heads.q_scale, heads.k_scale, heads.v_scale, out),
        *(0 if mask is None or len(mask) == 1 else mask.stride(0), *v.stride()[:3]),
        *(*out.stride()[:2], tokens, queries, length, q_length),
    )
    programs = batch * count * -(-queries // tile.queries)
    how = {"num_warps": tile.warps, "num_stages": tile.stages}
    attend = Launch(_attention_kernel, programs, (mask,), fixed, constants, **how)
    return [attend] if heads.v is None else [*_quantize_values(v, heads), attend]


def choose_tile(form: str, masked: bool, sm: tuple[int, int]) -> AttentionTile:
    """The tile of "int8" or "int8_fp8" on a card of compute capability `sm`."""
    return TILES_SM90[form, masked] if sm == (9, 0) else TILE
