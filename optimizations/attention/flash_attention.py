"""The packages of FlashAttention: version 2 from Ampere on, version 3 on Hopper."""

from __future__ import annotations

import torch

from ..kernels import launch_beside
from ..software import FLASH_ATTENTION_2, FLASH_ATTENTION_3
from .request import HALVES, Backend, Limits


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
