"""Attention that quantizes: this package's in 8 bits, and SageAttention 2.

Inside the fused blocks queries and keys of the first never are in 16 bits: the kernel that
normalizes and rotates them writes int8 (`blocks/workspace.py`).
"""

from __future__ import annotations

import functools
import importlib

import torch
import torch.nn.functional as F

from ...machine.packages import SAGE_ATTENTION, release
from ...spec.formats import EIGHT_BIT, FORMATS
from .. import attention_8bit, kernels
from ..attention_8bit import HEAD_DIMS, Heads
from ..kernels import on_card_of
from ..reference import Tokens
from .backends import ANY, HALVES, AttentionRequest, Backend, Limits, sm_of


def _in_8_bits(
    form: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    into = Heads.empty(form, k, q.shape[1])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    mask = mask if mask is None or mask.stride(3) == 1 else mask.contiguous()
    if q.is_cuda:
        from ..kernels.attention_8bit import attention_8bit as attention
        from ..kernels.qk_norm_rope import qk_norm_rope

        packed = k.shape[3], 1
        q, k = (x if x.stride()[2:] == packed else x.contiguous() for x in (q, k))
        tokens = Tokens(len(k), 0, k.shape[1], k.shape[1])
        quantize = qk_norm_rope(q, k, None, None, tokens, 0.0, into)
        for launch in (*quantize, *attention(into, v, mask, out)):
            launch.once()
    else:
        attention_8bit.quantize_heads(q, k, into)
        if into.v is not None:
            attention_8bit.quantize_values(v, into)
        attention_8bit.attention_8bit(into, v, mask, out)
    return out.flatten(2)


def _beyond_8_bits(request: AttentionRequest) -> str:
    if request.head_dim not in HEAD_DIMS:
        return f"takes heads of {', '.join(map(str, HEAD_DIMS))}, not {request.head_dim}"
    return kernels.missing() if request.device.type == "cuda" else ""


INT8, INT8_FP8 = (
    Backend(
        form,
        functools.partial(_in_8_bits, form),
        exact=False,
        card=Limits(FORMATS[multiplied].oldest, dtypes=HALVES),
        cpu=ANY,
        further=_beyond_8_bits,
        quantizes=True,
    )
    for form, multiplied in EIGHT_BIT.items()
)


# The tiles are 128 queries x 64 keys, on Hopper 64 x 128.
TILE = 128
CARDS = ((8, 0), (8, 6), (8, 9), (9, 0))


def kernel_for(sm: tuple[int, int], cuda: str) -> tuple[str, str]:
    """Names the package's function for a card, and how it is to sum weights times values.

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
    """Attends by SageAttention 2, q and k in int8, v in fp8 or fp16; as `Backend.attend`.

    Two faults that are reported of it are avoided. The Triton kernel sums weights times values in
    fp16, which overflows on Qwen-Image: black images. `sageattn()` may choose it, so neither is
    called. And the CUDA kernels leave the tail of a tile that is not full uninitialized in shared
    memory; what lies there can be NaN, and 0 * NaN is NaN. Padded keys would take part with a
    weight of exp(0), so nothing is padded: the kernels get whole tiles alone, all but the last
    tokens % 128 queries and keys. The rest goes through PyTorch's exact kernels and is joined by
    the log-sum-exp. With S the scores, A the keys of whole tiles and B the rest,

        out = (1 - w) softmax(S_A) V_A + w softmax(S_B) V_B,    w = sigmoid(lse_B - lse_A)

    is the softmax over all keys, identically.

    Smoothing takes the keys' mean off every key. That adds one number to all scores of a query,
    which the softmax does not see, but the log-sum-exp does. It is done here for both parts alike,
    and turned off in the package, which would correct the log-sum-exp by a product rounded to bf16.

    Args:
        q, k, v: At least 128 tokens.
        mask: None.
    """
    name, sums = kernel_for(sm_of(q.device), torch.version.cuda or "")
    kernel = getattr(importlib.import_module("sageattention"), name)
    options = {"tensor_layout": "NHD", "pv_accum_dtype": sums, "smooth_k": False}
    whole = q.shape[1] - q.shape[1] % TILE
    tiles, rest = slice(0, whole), slice(whole, None)
    smooth = k - k.mean(1, keepdim=True)
    with on_card_of(q):  # the package makes q's card the current one, and leaves it so
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
    # (B, queries, heads, head_dim) exactly, and its log-sum-exp, (B, heads, queries).
    name = "_scaled_dot_product_flash_attention" + ("" if q.is_cuda else "_for_cpu")
    out, lse = getattr(torch.ops.aten, name)(*(x.transpose(1, 2) for x in (q, k, v)))[:2]
    return out.transpose(1, 2), lse


def _too_few(request: AttentionRequest) -> str:
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
