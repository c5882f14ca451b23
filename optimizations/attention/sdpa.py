"""PyTorch's own attention, `scaled_dot_product_attention`, with one of its kernels at a time.

Left alone, PyTorch takes the first kernel that fits. On an H200 that is FlashAttention-2, 0.800 ms
for 24 heads x 128 and 4296 tokens in bf16, where cuDNN takes 0.454.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .request import ANY, HALVES, Backend, Limits, Request

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
