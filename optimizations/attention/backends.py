"""Attention backends: PyTorch's kernels one at a time, exact slices, FlashAttention 2 and 3.

Left alone, PyTorch takes the first kernel that fits. On an H200 that is FlashAttention-2, 0.800 ms
for 24 heads x 128 and 4296 tokens in bf16, where cuDNN takes 0.454.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...machine.packages import (
    FLASH_ATTENTION_2,
    FLASH_ATTENTION_3,
)
from ..kernels import on_card_of
from .backend import ANY, HALVES, AttentionRequest, Backend, Limits

# The efficient kernel reads the mask 8 elements at a time.
MASK_ALIGNMENT = 8


def _attend(
    kernel: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    # The kernels lay their result out as q is: transposed back, it is contiguous without a copy.
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).flatten(2)


def _efficient(q, k, v, mask=None):
    mask = None if mask is None else aligned_mask(mask)
    return _attend("EFFICIENT_ATTENTION", q, k, v, mask)


def aligned_mask(mask: torch.Tensor) -> torch.Tensor:
    """The mask with rows that start at multiples of 8 elements, as the efficient kernel wants them.

    What is aligned already comes back as it is: aligned once per forward, it is copied in no block.

    Args:
        mask: (B, 1, 1, tokens).
    """
    if all(stride % MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1]):
        return mask
    tokens = mask.shape[-1]
    return F.pad(mask, (0, -tokens % MASK_ALIGNMENT))[..., :tokens]


def _single_token(request: AttentionRequest) -> str:
    return "takes two tokens or more" if request.tokens < 2 else ""


# Its CPU kernel, unlike the one for cards, takes masks.
SDPA_FLASH = Backend(
    "sdpa_flash",
    functools.partial(_attend, "FLASH_ATTENTION"),
    card=Limits(oldest=(8, 0), dtypes=HALVES, widest=256, masks=False),
    cpu=ANY,
)
SDPA_CUDNN = Backend(
    "sdpa_cudnn",
    functools.partial(_attend, "CUDNN_ATTENTION"),
    card=Limits(oldest=(8, 0), dtypes=HALVES, widest=256, head_bytes=16),
    further=_single_token,
)
SDPA_EFFICIENT = Backend(
    "sdpa_efficient",
    _efficient,
    card=Limits(oldest=(5, 0), head_bytes=16),
)
MATH = Backend(
    "math",
    functools.partial(_attend, "MATH"),
    card=ANY,
    cpu=ANY,
    other=ANY,
    whole_scores=True,
)


# Attention in slices, for cards and processors without any better: exact, in bounded memory.

# The scores of 40,000 tokens and 24 heads would take 143 GiB in fp32.
SCORE_BYTES = 2**28


def slices(heads: int, tokens: int, score_bytes: int = SCORE_BYTES) -> tuple[int, int]:
    """How many heads and queries to take at once.

    Whole heads while one fits, else queries of one head; at least one query, whatever it takes.
    """
    rows = score_bytes // (4 * tokens)
    if rows >= tokens:
        return min(heads, rows // tokens), tokens
    return 1, max(rows, 1)


def sliced(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Softmax of q @ k.T / sqrt(head_dim) + mask, times v, in fp32 with one rounding at the end."""
    batch, tokens, heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    heads_at_once, rows = slices(heads, tokens)
    for item in range(batch):
        for head in range(0, heads, heads_at_once):
            these = (item, slice(None), slice(head, head + heads_at_once))
            keys = k[these].permute(1, 2, 0).float()  # (heads, head_dim, tokens)
            values = v[these].transpose(0, 1).float()
            for row in range(0, tokens, rows):
                queries = q[these][row : row + rows].transpose(0, 1).float()
                scores = (queries * head_dim**-0.5) @ keys
                if mask is not None:
                    scores += mask[item]
                scores -= scores.amax(-1, keepdim=True)
                weights = scores.exp_()
                part = (weights @ values) / weights.sum(-1, keepdim=True)
                out[these][row : row + rows] = part.transpose(0, 1)
    return out.flatten(2)


SLICED = Backend("sliced", sliced, card=ANY, cpu=ANY, other=ANY, whole_scores=True)


# The packages of FlashAttention: version 2 from Ampere on, version 3 on Hopper.


def _version_2(q, k, v, mask=None):
    from flash_attn import flash_attn_func

    with on_card_of(q):
        return flash_attn_func(q, k, v).flatten(2)


def _version_3(q, k, v, mask=None):
    from flash_attn_interface import flash_attn_func

    with on_card_of(q):
        out = flash_attn_func(q, k, v)
    # Its first releases gave the log-sum-exp too, asked or not.
    return (out if isinstance(out, torch.Tensor) else out[0]).flatten(2)


FLASH_ATTN_2 = Backend(
    "flash_attn_2",
    _version_2,
    card=Limits(oldest=(8, 0), dtypes=HALVES, widest=256, masks=False),
    package=FLASH_ATTENTION_2,
    unproven="not run by us",
)
FLASH_ATTN_3 = Backend(
    "flash_attn_3",
    _version_3,
    card=Limits(cards=((9, 0),), dtypes=HALVES, widest=256, head_bytes=16, masks=False),
    package=FLASH_ATTENTION_3,
    unproven="not run by us",
)
