"""Triton: RMSNorm of the heads of queries and keys, and their rotation, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..reference import HEAD_DIMS, QKNorm, Rotary, Tokens
from . import on_card_of
from .launch import Launch, PreparedLaunch

# What one program holds, in elements, and each of its threads: 16 bytes of bf16.
MOST_ELEMENTS, ELEMENTS_PER_THREAD = 2048, 8


# The numbers of tokens follow the prompt and the size of the image: no kernel of its own for each.
@triton.jit(do_not_specialize=["joint", "text"])
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
    is_text = token < text
    if program % (2 * groups) < groups:
        x_ptr = q_ptr + item.to(tl.int64) * q_item_stride + token.to(tl.int64) * q_token_stride
        weight_ptr = q_text_weight_ptr if is_text else q_weight_ptr
    else:
        x_ptr = k_ptr + item.to(tl.int64) * k_item_stride + token.to(tl.int64) * k_token_stride
        weight_ptr = k_text_weight_ptr if is_text else k_weight_ptr

    head = group * block_heads + tl.arange(0, block_heads)
    element = tl.arange(0, head_dim)
    x_ptrs = x_ptr + head[:, None] * head_dim + element[None, :]
    x = tl.load(x_ptrs).to(tl.float32)
    weight = tl.load(weight_ptr + element).to(tl.float32)
    mean_square = tl.sum(x * x, axis=1) / head_dim
    x = x * tl.rsqrt(mean_square + eps)[:, None] * weight[None, :]

    half: tl.constexpr = head_dim // 2
    angle = (token if one_rotation else row).to(tl.int64) * half + tl.arange(0, half)
    cos = tl.load(cos_ptr + angle).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle).to(tl.float32)[None, :]
    # Whole rows are loaded and split in registers: loading every other element took 17 times as
    # long (H200).
    a, b = tl.split(tl.reshape(x, (block_heads, half, 2)))
    x = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (block_heads, head_dim))
    tl.store(x_ptrs, x.to(q_ptr.dtype.element_ty))


def launch_shape(heads: int, head_dim: int) -> tuple[int, int]:
    """Heads of one program, a divisor of `heads`, and its number of warps."""
    together = min(heads & -heads, MOST_ELEMENTS // head_dim)
    return together, max(together * head_dim // (32 * ELEMENTS_PER_THREAD), 1)


def qk_norm_rope(
    q: torch.Tensor, k: torch.Tensor, norm: QKNorm, rotary: Rotary, tokens: Tokens, eps: float
) -> None:
    """As `reference.qk_norm_rope`; head_dim is one of `HEAD_DIMS`, a token's heads contiguous."""
    with on_card_of(q):
        _launch(q, k, norm, rotary, tokens, eps).once()


def prepare_qk_norm_rope(
    q: torch.Tensor, k: torch.Tensor, norm: QKNorm, rotary: Rotary, tokens: Tokens, eps: float
) -> PreparedLaunch:
    """`qk_norm_rope` of these q and k; takes the tensors of a norm and of a rotary like these."""
    return _launch(q, k, norm, rotary, tokens, eps).prepared()


def _launch(
    q: torch.Tensor, k: torch.Tensor, norm: QKNorm, rotary: Rotary, tokens: Tokens, eps: float
) -> Launch:
    batch, joint, heads, head_dim = q.shape
    cos, sin = rotary
    rotations = cos.shape[0]
    q_item, q_token, *q_packed = q.stride()
    k_item, k_token, *k_packed = k.stride()
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"qk_norm_rope takes heads of {HEAD_DIMS} elements, got {head_dim}")
    if k.shape != q.shape or k.dtype != q.dtype or (batch, joint) != (tokens.batch, tokens.joint):
        raise ValueError(
            f"qk_norm_rope takes q and k of one shape and dtype for {tokens.batch} x "
            f"{tokens.joint} tokens, got {tuple(q.shape)} {q.dtype} and {tuple(k.shape)} {k.dtype}"
        )
    if not q_packed == k_packed == [head_dim, 1]:
        raise ValueError(
            "qk_norm_rope takes q and k whose heads lie side by side, got strides "
            f"{q.stride()} and {k.stride()}"
        )
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
    together, warps = launch_shape(heads, head_dim)
    constants = {
        "heads": heads,
        "head_dim": head_dim,
        "eps": eps,
        "one_rotation": rotations == 1,
        "block_heads": together,
    }
    programs = batch * joint * (heads // together) * 2
    fixed = (q, k, q_item, q_token, k_item, k_token, joint, tokens.text)
    varying = (*norm, cos, sin)
    return Launch(_qk_norm_rope_kernel, programs, varying, fixed, constants, num_warps=warps)
