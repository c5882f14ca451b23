"""Triton: RMSNorm of the heads of queries and keys, and their rotation, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from ..reference import HEAD_DIMS, QKNorm, Rotary, Tokens
from .launch import Launch

# What one program holds, in elements, and each of its threads: 16 bytes of bf16.
MOST_ELEMENTS, ELEMENTS_PER_THREAD = 2048, 8


# The numbers of tokens follow the prompt and the size of the image: no kernel of its own for each.
@triton.jit(do_not_specialize=["joint", "text", "first", "queries"])
def _qk_norm_rope_kernel(
    q_weight_ptr,
    k_weight_ptr,
    q_text_weight_ptr,
    k_text_weight_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_ptr,
    q_item_stride,
    q_token_stride,
    k_item_stride,
    k_token_stride,
    joint,
    text,
    first,
    queries,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    eps: tl.constexpr,
    one_rotation: tl.constexpr,
    block_heads: tl.constexpr,
):
    """n = x / sqrt(mean(x * x) + eps) * weight; (a, b) = (a cos - b sin, a sin + b cos)."""
    # Programs that share a rotation follow one another: all heads of q, then of k, of one token.
    groups: tl.constexpr = heads // block_heads
    program = tl.program_id(0)
    row = program // (2 * groups)
    item = row // joint
    token = row - item * joint
    group = program % groups
    is_q = program % (2 * groups) < groups
    query = token - first  # queries may be those of some tokens alone
    if is_q & ((query < 0) | (query >= queries)):
        return
    if is_q:
        x_ptr = q_ptr + item.to(tl.int64) * q_item_stride + query.to(tl.int64) * q_token_stride
    else:
        x_ptr = k_ptr + item.to(tl.int64) * k_item_stride + token.to(tl.int64) * k_token_stride

    head = group * block_heads + tl.arange(0, block_heads)
    element = tl.arange(0, head_dim)
    x_ptrs = x_ptr + head[:, None] * head_dim + element[None, :]
    x = tl.load(x_ptrs).to(tl.float32)
    is_text = token < text
    if is_q:
        weight_ptr = q_text_weight_ptr if is_text else q_weight_ptr
    else:
        weight_ptr = k_text_weight_ptr if is_text else k_weight_ptr
    weight = tl.load(weight_ptr + element).to(tl.float32)
    half: tl.constexpr = head_dim // 2
    angle = (token if one_rotation else row).to(tl.int64) * half + tl.arange(0, half)
    cos = tl.load(cos_ptr + angle).to(tl.float32)
    sin = tl.load(sin_ptr + angle).to(tl.float32)
    x = _norm_and_turn(x, weight[None, :], cos[None, :], sin[None, :], block_heads, head_dim, eps)
    tl.store(x_ptrs, x.to(q_ptr.dtype.element_ty))


@triton.jit
def _norm_and_turn(
    x, weight, cos, sin, rows: tl.constexpr, head_dim: tl.constexpr, eps: tl.constexpr
):
    """Of x (rows, head_dim); the others have one row, or as many."""
    mean_square = tl.sum(x * x, axis=1) / head_dim
    x = x * tl.rsqrt(mean_square + eps)[:, None] * weight
    # Whole rows are loaded and split in registers: loading every other element took 17 times as
    # long (H200).
    a, b = tl.split(tl.reshape(x, (rows, head_dim // 2, 2)))
    return tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (rows, head_dim))


def launch_shape(heads: int, head_dim: int) -> tuple[int, int]:
    """Heads of one program, a divisor of `heads`, and its number of warps."""
    together = min(heads & -heads, MOST_ELEMENTS // head_dim)
    return together, max(together * head_dim // (32 * ELEMENTS_PER_THREAD), 1)


def prepare_qk_norm_rope(*given: Any) -> Callable[[QKNorm, Rotary], None]:
    """`qk_norm_rope` of this q and k, for a norm and a rotary like these."""
    launch = qk_norm_rope(*given).prepared()
    return lambda norm, rotary: launch(*norm, *rotary)


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    norm: QKNorm,
    rotary: Rotary,
    tokens: Tokens,
    eps: float,
    first: int = 0,
) -> Launch:
    """As `reference.qk_norm_rope`; head_dim is one of `HEAD_DIMS`, heads lie side by side."""
    batch, joint, heads, _ = k.shape
    queries, head_dim = q.shape[1], q.shape[3]
    q_item, q_token, *q_packed = q.stride()
    k_item, k_token, *k_packed = k.stride()
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"qk_norm_rope takes heads of {HEAD_DIMS} elements, got {head_dim}")
    alike = q.dtype == k.dtype and q.shape == (batch, queries, *k.shape[2:])
    inside = 0 <= first <= first + queries <= joint
    if not alike or not inside or (batch, joint) != (tokens.batch, tokens.joint):
        raise ValueError(
            f"qk_norm_rope takes q and k of one dtype for {tokens.batch} x {tokens.joint} tokens, "
            f"q from token {first} on, got {tuple(q.shape)} {q.dtype} and {tuple(k.shape)} "
            f"{k.dtype}"
        )
    if not q_packed == k_packed == [head_dim, 1]:
        raise ValueError(
            "qk_norm_rope takes q and k whose heads lie side by side, got strides "
            f"{q.stride()} and {k.stride()}"
        )
    _check_weights(norm, rotary, batch, joint, head_dim)
    together, warps = launch_shape(heads, head_dim)
    constants = {
        "heads": heads,
        "head_dim": head_dim,
        "eps": eps,
        "one_rotation": len(rotary.cos) == 1,
        "block_heads": together,
    }
    programs = batch * joint * (heads // together) * 2
    fixed = (q, k, q_item, q_token, k_item, k_token, joint, tokens.text, first, queries)
    launch = (*norm, *rotary), fixed, constants
    return Launch(_qk_norm_rope_kernel, programs, *launch, num_warps=warps)


def _check_weights(norm: QKNorm, rotary: Rotary, batch: int, joint: int, head_dim: int) -> None:
    cos, sin = rotary
    rotations = cos.shape[0]
    if (
        rotations not in (1, batch)
        or not cos.shape == sin.shape == (rotations, joint, head_dim // 2)
        or not cos.is_contiguous()
        or not sin.is_contiguous()
    ):
        raise ValueError(
            f"qk_norm_rope takes contiguous cos and sin of 1 or {batch} x {joint} x "
            f"{head_dim // 2}, got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    dtype = norm.query.dtype
    for weight in norm:
        if weight.numel() != head_dim or weight.dtype != dtype or not weight.is_contiguous():
            raise ValueError(
                f"qk_norm_rope takes contiguous weights of {head_dim} elements and one dtype, got "
                f"{', '.join(f'{tuple(w.shape)} {w.dtype}' for w in norm)}"
            )
