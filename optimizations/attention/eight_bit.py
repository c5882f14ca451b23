"""This package's attention in 8 bits as backends: on heads that are normalized and rotated already.

Inside the fused blocks queries and keys never are in 16 bits: the kernel that normalizes and
rotates them writes int8 (`blocks/workspace.py`).
"""

from __future__ import annotations

import functools

import torch

from ...spec.formats import OLDEST_CAPABILITY
from .. import attention_8bit, kernels
from ..attention_8bit import HEAD_DIMS, Heads
from ..reference import Tokens
from .backend import ANY, HALVES, AttentionRequest, Backend, Limits


def attend(
    form: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `Backend.attend`, by the form "int8" or "int8_fp8"."""
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


def _refusal(request: AttentionRequest) -> str:
    if request.head_dim not in HEAD_DIMS:
        return f"takes heads of {', '.join(map(str, HEAD_DIMS))}, not {request.head_dim}"
    return kernels.missing() if request.device.type == "cuda" else ""


INT8, INT8_FP8 = (
    Backend(
        form,
        functools.partial(attend, form),
        exact=False,
        card=Limits(OLDEST_CAPABILITY[oldest], dtypes=HALVES),
        cpu=ANY,
        further=_refusal,
        quantizes=True,
    )
    for form, oldest in (("int8", "int8"), ("int8_fp8", "fp8"))
)
