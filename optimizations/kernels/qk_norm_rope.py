"""Triton: RMSNorm of the heads of queries and keys, and their rotation, in place or into int8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from ..reference import (
    HEAD_DIMS,
    SAMPLED_KEYS,
    SMALLEST_ROW,
    QKNorm,
    QuantizedHeads,
    Rotary,
    Tokens,
    padded,
    score_scale,
)
from .launch import Launch
from .rows import magnitude, round_to_step

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
    q8_ptr,
    k8_ptr,
    q_scale_ptr,
    k_scale_ptr,
    mean_ptr,
    q_item_stride,
    q_token_stride,
    k_item_stride,
    k_token_stride,
    joint,
    text,
    first,
    queries,
    q_length,
    k_length,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    eps: tl.constexpr,
    one_rotation: tl.constexpr,
    score_scale: tl.constexpr,
    smallest: tl.constexpr,
    block_heads: tl.constexpr,
):
    """n = x / sqrt(mean(x * x) + eps) * weight; (a, b) = (a cos - b sin, a sin + b cos).

    In place, or in int8 where there is q8; without weights q and k are normalized and rotated.
    """
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
    if q_weight_ptr is not None:
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
        x = _norm_and_turn(
            x, weight[None, :], cos[None, :], sin[None, :], block_heads, head_dim, eps
        )
    if q8_ptr is None:
        tl.store(x_ptrs, x.to(q_ptr.dtype.element_ty))
    else:
        pair = item * heads + head
        if is_q:
            to_ptr = q8_ptr
            scales_ptr = q_scale_ptr
            place = pair.to(tl.int64) * q_length + query
        else:
            to_ptr = k8_ptr
            scales_ptr = k_scale_ptr
            place = pair.to(tl.int64) * k_length + token
            x -= tl.load(mean_ptr + pair[:, None] * head_dim + element[None, :])
        largest = magnitude(x, 1)
        scale = tl.where(largest < smallest, 1.0, tl.div_rn(largest, 127.0))
        steps = round_to_step(x * tl.div_rn(1.0, scale)[:, None], 127.0, True)
        tl.store(to_ptr + place[:, None] * head_dim + element[None, :], steps.to(tl.int8))
        tl.store(scales_ptr + place, scale * tl.where(is_q, score_scale, 1.0))


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


@triton.jit(do_not_specialize=["joint", "text"])
def _key_mean_kernel(
    k_weight_ptr,
    k_text_weight_ptr,
    cos_ptr,
    sin_ptr,
    k_ptr,
    mean_ptr,
    k_item_stride,
    k_token_stride,
    joint,
    text,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    eps: tl.constexpr,
    one_rotation: tl.constexpr,
    samples: tl.constexpr,
):
    """The mean of some keys of a head, normalized and rotated where there are weights."""
    pair = tl.program_id(0)
    item = pair // heads
    head = pair - item * heads
    token = (tl.arange(0, samples).to(tl.int64) * joint) // samples
    element = tl.arange(0, head_dim)
    k_ptr += item.to(tl.int64) * k_item_stride + head * head_dim
    x = tl.load(k_ptr + token[:, None] * k_token_stride + element[None, :]).to(tl.float32)
    if k_weight_ptr is not None:
        image_weight = tl.load(k_weight_ptr + element).to(tl.float32)
        text_weight = tl.load(k_text_weight_ptr + element).to(tl.float32)
        weight = tl.where((token < text)[:, None], text_weight[None, :], image_weight[None, :])
        half: tl.constexpr = head_dim // 2
        row = token if one_rotation else item * joint + token
        angle = row[:, None] * half + tl.arange(0, half)[None, :]
        cos = tl.load(cos_ptr + angle).to(tl.float32)
        sin = tl.load(sin_ptr + angle).to(tl.float32)
        x = _norm_and_turn(x, weight, cos, sin, samples, head_dim, eps)
    tl.store(mean_ptr + pair * head_dim + element, tl.sum(x, axis=0) / samples)


def launch_shape(heads: int, head_dim: int) -> tuple[int, int]:
    """Heads of one program, a divisor of `heads`, and its number of warps."""
    together = min(heads & -heads, MOST_ELEMENTS // head_dim)
    return together, max(together * head_dim // (32 * ELEMENTS_PER_THREAD), 1)


def prepare_qk_norm_rope(
    *given: Any,
) -> Callable[[QKNorm | None, Rotary | None], None]:
    """`qk_norm_rope` of this q and k, for a norm and a rotary like these."""
    *means, launch = (each.prepared() for each in qk_norm_rope(*given))

    def run(norm: QKNorm | None, rotary: Rotary | None) -> None:
        norms, turns = norm or (None,) * 4, rotary or (None,) * 2
        for mean in means:
            mean(norms[1], norms[3], *turns)
        launch(*norms, *turns)

    return run


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    norm: QKNorm | None,
    rotary: Rotary | None,
    tokens: Tokens,
    eps: float,
    into: QuantizedHeads | None = None,
    first: int = 0,
) -> list[Launch]:
    """As `reference.qk_norm_rope`: the mean of the keys, which int8 needs, and the rest;
    head_dim is one of `HEAD_DIMS`, heads lie side by side.
    """
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
    rotations = 1
    if norm is not None:
        rotations = len(rotary.cos)
        _check_weights(norm, rotary, batch, joint, head_dim)
    together, warps = launch_shape(heads, head_dim)
    shared = {"heads": heads, "head_dim": head_dim, "eps": eps, "one_rotation": rotations == 1}
    constants = {
        **shared,
        "score_scale": score_scale(head_dim),
        "smallest": SMALLEST_ROW,
        "block_heads": together,
    }
    programs = batch * joint * (heads // together) * 2
    strides = q_item, q_token, k_item, k_token
    quantized = (None,) * 5 if into is None else into[:5]
    lengths = padded(queries), padded(joint)
    fixed = (q, k, *quantized, *strides, joint, tokens.text, first, queries, *lengths)
    varying = (*(norm or (None,) * 4), *(rotary or (None,) * 2))
    main = Launch(_qk_norm_rope_kernel, programs, varying, fixed, constants, num_warps=warps)
    if into is None:
        return [main]
    varying = (None,) * 4 if norm is None else (norm.key, norm.text_key, *rotary)
    fixed = (k, into.mean, k_item, k_token, joint, tokens.text)
    constants = {**shared, "samples": SAMPLED_KEYS}
    mean = Launch(_key_mean_kernel, batch * heads, varying, fixed, constants, num_warps=8)
    return [mean, main]


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
