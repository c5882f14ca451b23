"""Attention backends: PyTorch's kernels one at a time, exact slices, FlashAttention 2 and 3.

Left alone, PyTorch takes the first kernel that fits. On an H200 that is FlashAttention-2, 0.800 ms
for 24 heads x 128 and 4296 tokens in bf16, where cuDNN takes 0.454.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...machine.packages import FLASH_ATTENTION_2, FLASH_ATTENTION_3
from ..kernels import on_card_of
from .backend import ANY, HALVES, AttentionRequest, Backend, Limits

# The efficient kernel reads the mask 8 elements at a time.
MASK_ALIGNMENT = 8
# FlashAttention takes heads of whole eights.
FLASH_ALIGNMENT = 8


# PyTorch's own kernels: each by its operator, called as F.scaled_dot_product_attention calls it.
# Choosing among them with `sdpa_kernel` takes 20 us a call, and sets flags of the whole process
# that another thread may be setting for its own card.


def _operator(name: str, given: tuple[str, ...], named: str) -> Callable[..., tuple] | None:
    """An operator of PyTorch; None where it does not take what it is called with here.

    Args:
        given: The names of its first arguments; those that follow have defaults.
        named: Another argument of it.
    """
    try:
        arguments = getattr(torch.ops.aten, name).default._schema.arguments
        call = getattr(torch, name)  # which takes 1 us less than torch.ops
    except AttributeError:
        return None
    names = tuple(argument.name for argument in arguments)
    known = names[: len(given)] == given and named in names[len(given) :]
    rest = arguments[len(given) :]
    return call if known and all(argument.has_default_value() for argument in rest) else None


_QKV = ("query", "key", "value")
_BIASED = (*_QKV, "attn_bias", "compute_log_sumexp")
_FLASH = _operator("_scaled_dot_product_flash_attention", _QKV, "scale")
_FLASH_ON_CPU = _operator("_scaled_dot_product_flash_attention_for_cpu", _QKV, "attn_mask")
_CUDNN = _operator("_scaled_dot_product_cudnn_attention", _BIASED, "scale")
_EFFICIENT = _operator("_scaled_dot_product_efficient_attention", _BIASED, "scale")
_MATH = _operator("_scaled_dot_product_attention_math", _QKV, "attn_mask")


def _flash(q, k, v, mask):
    if q.is_cpu:
        return _FLASH_ON_CPU(q, k, v, attn_mask=mask)[0]
    width = q.shape[-1]
    if width % FLASH_ALIGNMENT == 0:
        return _FLASH(q, k, v)[0]
    q, k, v = (F.pad(x, (0, -width % FLASH_ALIGNMENT)) for x in (q, k, v))
    return _FLASH(q, k, v, scale=1 / math.sqrt(width))[0][..., :width]


def _cudnn(q, k, v, mask):
    return _CUDNN(q, k, v, mask, _has_gradient(q, k, v))[0]


def _efficient(q, k, v, mask):
    if mask is not None:
        mask = aligned_mask(mask).expand(*q.shape[:-1], k.shape[-2])
    return _EFFICIENT(q, k, v, mask, _has_gradient(q, k, v))[0]


def _math(q, k, v, mask):
    if q.is_cpu or q.is_cuda:
        return _MATH(q, k, v, attn_mask=mask)[0]
    return _selected("MATH", q, k, v, mask)  # Apple's has an operator of its own


def _has_gradient(q, k, v) -> bool:
    """Whether the backward pass needs the log-sum-exp."""
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def _selected(kernel, q, k, v, mask):
    """What PyTorch calls itself, for operators and devices that are not known here."""
    if kernel == "EFFICIENT_ATTENTION" and mask is not None:
        mask = aligned_mask(mask)
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _attend(
    compute: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    # The kernels lay their result out as q is: transposed back, it is contiguous without a copy.
    out = compute(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
    return out.transpose(1, 2).flatten(2)


def _by(
    kernel: str, compute: Callable[..., torch.Tensor], *operators: Callable | None
) -> Callable[..., torch.Tensor]:
    """`Backend.attend` by a kernel of PyTorch, directly where its operators are known."""
    if None in operators:
        compute = functools.partial(_selected, kernel)
    return functools.partial(_attend, compute)


def aligned_mask(mask: torch.Tensor) -> torch.Tensor:
    """The mask with rows that start at multiples of 8 elements, as the efficient kernel wants them.

    What is aligned already comes back as it is: aligned once per forward, it is copied in no block.

    Args:
        mask: (B, 1, 1, tokens).
    """
    *strides, last = mask.stride()
    if last == 1 and all(stride % MASK_ALIGNMENT == 0 for stride in strides):
        return mask
    tokens = mask.shape[-1]
    return F.pad(mask.contiguous(), (0, -tokens % MASK_ALIGNMENT))[..., :tokens]


def _against_cudnn(request: AttentionRequest) -> str:
    if request.tokens < 2:
        return "takes two tokens or more"
    strict = not torch.is_deterministic_algorithms_warn_only_enabled()
    if strict and torch.are_deterministic_algorithms_enabled():
        return "torch counts it as not deterministic"
    return ""


# Its CPU kernel, unlike the one for cards, takes masks.
SDPA_FLASH = Backend(
    "sdpa_flash",
    _by("FLASH_ATTENTION", _flash, _FLASH, _FLASH_ON_CPU),
    card=Limits(oldest=(8, 0), dtypes=HALVES, widest=256, masks=False),
    cpu=ANY,
)
SDPA_CUDNN = Backend(
    "sdpa_cudnn",
    _by("CUDNN_ATTENTION", _cudnn, _CUDNN),
    card=Limits(oldest=(8, 0), dtypes=HALVES, widest=128, head_bytes=16),
    further=_against_cudnn,
)
SDPA_EFFICIENT = Backend(
    "sdpa_efficient",
    _by("EFFICIENT_ATTENTION", _efficient, _EFFICIENT),
    card=Limits(oldest=(5, 0), head_bytes=16),
)
MATH = Backend(
    "math",
    _by("MATH", _math, _MATH),
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


@functools.cache
def flash_attention_3() -> Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]:
    """The function of version 3, whose module has a name in each distribution."""
    return importlib.import_module(FLASH_ATTENTION_3.present.module).flash_attn_func


def _version_3(q, k, v, mask=None):
    with on_card_of(q):
        out = flash_attention_3()(q, k, v)
    # Its first releases gave the log-sum-exp too, asked or not.
    return (out if isinstance(out, torch.Tensor) else out[0]).flatten(2)


FLASH_ATTN_2 = Backend(
    "flash_attn_2",
    _version_2,
    card=Limits(oldest=(8, 0), dtypes=HALVES, widest=256, masks=False),
    package=FLASH_ATTENTION_2,
    unproven="not run by us but on sm_90",
)
FLASH_ATTN_3 = Backend(
    "flash_attn_3",
    _version_3,
    card=Limits(cards=((9, 0),), dtypes=HALVES, widest=256, head_bytes=16, masks=False),
    package=FLASH_ATTENTION_3,
)
