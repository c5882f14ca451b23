"""PyTorch's own attention, `scaled_dot_product_attention`, with one of its kernels at a time.

Left alone, PyTorch takes the first kernel that fits. On an H200 that is FlashAttention-2, 0.800 ms
for 24 heads x 128 and 4296 tokens in bf16, where cuDNN takes 0.454.
"""

from __future__ import annotations

import functools
import importlib

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...machine.card import State
from ...machine.packages import (
    FLASH_ATTENTION_2,
    FLASH_ATTENTION_3,
    KITCHEN,
    SAGE_ATTENTION,
    check_kitchen,
    release,
)
from ..kernels import launch_beside
from .backend import ANY, HALVES, Backend, Limits, Request, sm_of

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


def _single_token(request: Request) -> str:
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

    with launch_beside(q):
        return flash_attn_func(q, k, v).flatten(2)


def _version_3(q, k, v, mask=None):
    from flash_attn_interface import flash_attn_func

    with launch_beside(q):
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


# SageAttention 2: q and k in int8, v in fp8 or fp16.
#
# Two faults that are reported of it are kept away from. The Triton kernel sums weights times values
# in fp16, which overflows on Qwen-Image: black images. `sageattn()` may choose it, so neither is
# called. And the CUDA kernels leave the tail of a tile that is not full uninitialized in shared
# memory, in queries, keys and (fp16) values; what lies there can be NaN, and 0 * NaN is NaN.
#
# No argument says how many of the keys count, so padded keys would take part: exp(0) of weight
# each,
# which cannot be taken off again where the true scores are far below 0. Nothing is padded,
# therefore.
# The kernels get whole tiles alone: all but the last tokens % 128 queries and keys. The rest goes
# through PyTorch's exact kernels, and is joined by the log-sum-exp, which is what `return_lse` is
# published for. With S the scores, A the keys of whole tiles and B the rest,
#
#     out = (1 - w) softmax(S_A) V_A + w softmax(S_B) V_B,    w = sigmoid(lse_B - lse_A)
#
# is the softmax over all keys, identically.
#
# Smoothing takes the keys' mean off every key. That adds one number to all scores of a query, which
# the softmax does not see, but the log-sum-exp does. It is done here, before the keys are divided,
# so that both parts have it, and turned off in the package, which would correct the log-sum-exp by
# a
# product rounded to bf16.

# The tiles are 128 queries x 64 keys, on Hopper 64 x 128.
TILE = 128
CARDS = ((8, 0), (8, 6), (8, 9), (9, 0))


def kernel_for(sm: tuple[int, int], cuda: str) -> tuple[str, str]:
    """The function of the package for a card, and how it is to sum weights times values.

    Args:
        cuda: torch.version.cuda; the fp16 sums of Ada's fp8 instruction came with CUDA 12.8.
    """
    if sm == (9, 0):
        return "sageattn_qk_int8_pv_fp8_cuda_sm90", "fp32+fp32"
    if sm == (8, 9):
        sums = "fp32+fp16" if release(cuda) >= (12, 8) else "fp32+fp32"
        return "sageattn_qk_int8_pv_fp8_cuda", sums
    return "sageattn_qk_int8_pv_fp16_cuda", "fp32"


def sage(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """As `Backend.attend`, of at least 128 tokens; takes no mask."""
    name, sums = kernel_for(sm_of(q.device), torch.version.cuda or "")
    kernel = getattr(importlib.import_module("sageattention"), name)
    options = {"tensor_layout": "NHD", "pv_accum_dtype": sums, "smooth_k": False}
    whole = q.shape[1] - q.shape[1] % TILE
    tiles, rest = slice(0, whole), slice(whole, None)
    smooth = k - k.mean(1, keepdim=True)
    with launch_beside(q):  # the package makes q's card the current one, and leaves it so
        if whole == q.shape[1]:
            return kernel(q, smooth, v, return_lse=False, **options).flatten(2)
        within, lse = kernel(q[:, tiles], smooth[:, tiles], v[:, tiles], return_lse=True, **options)
        beyond, lse_beyond = _with_lse(q[:, tiles], smooth[:, rest], v[:, rest])
    share = torch.sigmoid(lse_beyond - lse).to(q.dtype).transpose(1, 2)[..., None]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    torch.lerp(within, beyond, share, out=out[:, tiles])
    last = (x.transpose(1, 2) for x in (q[:, rest], k, v))
    out[:, rest] = F.scaled_dot_product_attention(*last).transpose(1, 2)
    return out.flatten(2)


def _with_lse(q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, (B, queries, heads, head_dim), and its log-sum-exp, (B, heads, queries)."""
    name = "_scaled_dot_product_flash_attention" + ("" if q.is_cuda else "_for_cpu")
    out, lse = getattr(torch.ops.aten, name)(*(x.transpose(1, 2) for x in (q, k, v)))[:2]
    return out.transpose(1, 2), lse


def _too_few(request: Request) -> str:
    few = request.tokens < TILE
    return f"needs {TILE} tokens, there are {request.tokens}" if few else ""


SAGE_2 = Backend(
    "sage_2",
    sage,
    exact=False,
    card=Limits(cards=CARDS, dtypes=HALVES, widest=128, head_bytes=16, masks=False),
    package=SAGE_ATTENTION,
    unproven="not run by us but on sm_90",
    further=_too_few,
)


# comfy-kitchen's int8 attention: q, k, v and the weights in int8, the softmax in fp32.
#
# 4296 tokens, 24 heads x 128, H200: 0.803 ms, relative error 0.016.


def _kitchen_attend(q, k, v, mask=None):
    from comfy_kitchen import int8_attention

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with launch_beside(q):
        out = int8_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).flatten(2)  # a copy: it writes head by head


def _missing(request: Request) -> str:
    return missing_on(request.device)


@functools.cache
def missing_on(device: torch.device) -> str:
    """Why comfy-kitchen's attention cannot run on a card, in one clause; empty when it can."""
    capability = check_kitchen(torch)
    if capability.state is not State.USABLE:
        return f"comfy-kitchen {capability.reason}"
    import comfy_kitchen

    available = getattr(comfy_kitchen, "int8_attention_is_available", None)
    if available is None:
        return "comfy-kitchen is older than its int8 attention"
    return "" if available(device) else "comfy-kitchen has no int8 attention for this card"


KITCHEN_INT8 = Backend(
    "kitchen_int8",
    _kitchen_attend,
    exact=False,
    card=Limits(oldest=(7, 5), widest=256),
    package=KITCHEN,
    further=_missing,
)
