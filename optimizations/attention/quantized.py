"""Attention that quantizes: in 8 bits, and comfy-kitchen's.

In 8 bits softmax(q k^T) v has q and k in int8, one scale for each head of each token, after
SageAttention (arXiv 2410.02367, 2411.10958): softmax does not see a vector that is taken from every
key, and without their mean keys are small enough. `int8` multiplies weights and values in the
values' own dtype, `int8_fp8` both in e4m3, with one scale for each channel of v.
"""

from __future__ import annotations

import functools

import torch

from ...machine.packages import KITCHEN_ATTENTION
from ...spec.formats import EIGHT_BIT, FORMATS
from .. import kernels
from ..kernels import on_card_of
from ..reference import (
    HEAD_DIMS_8BIT,
    QuantizedHeads,
    Tokens,
    attention_8bit,
    quantize_heads,
    quantize_values,
)
from .backends import HALVES, AttentionRequest, Backend, Limits


def _in_8_bits(
    form: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    into = QuantizedHeads.empty(form, k, q.shape[1])
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
        quantize_heads(q, k, into)
        if into.v is not None:
            quantize_values(v, into)
        attention_8bit(into, v, mask, out)
    return out.flatten(2)


def _without_triton(request: AttentionRequest) -> str:
    return kernels.missing() if request.device.type == "cuda" else ""


INT8, INT8_FP8 = (
    Backend(
        form,
        functools.partial(_in_8_bits, form),
        exact=False,
        card=Limits(FORMATS[multiplied].oldest, dtypes=HALVES, heads=HEAD_DIMS_8BIT),
        cpu=Limits(heads=HEAD_DIMS_8BIT),
        further=_without_triton,
        quantizes=True,
    )
    for form, multiplied in EIGHT_BIT.items()
)


def kitchen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Attends by comfy-kitchen, q, k, v and the softmax's weights in int8; as `Backend.attend`.

    The package rotates q and k by a Hadamard matrix before it rounds them. It takes other kernels
    for keys up to 256 and 1,024, pads heads of other sizes, and reads masks. `KITCHEN_INT8` takes
    none of these, so that one path is tried and measured.
    """
    from comfy_kitchen import int8_attention

    with on_card_of(q):
        out = int8_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    return out.transpose(1, 2).flatten(2)


KITCHEN_INT8 = Backend(
    "kitchen_int8",
    kitchen,
    exact=False,
    card=Limits(
        FORMATS["int8"].oldest, dtypes=HALVES, heads=(64, 128, 256), fewest=1025, masks=False
    ),
    package=KITCHEN_ATTENTION,
)
