"""comfy-kitchen's int8 attention: q, k, v and the weights in int8, the softmax in fp32.

4296 tokens, 24 heads x 128, H200: 0.803 ms, relative error 0.016.
"""

from __future__ import annotations

import functools

import torch

from ..hardware import State
from ..kernels import launch_beside
from ..software import KITCHEN, check_kitchen
from .request import Backend, Limits, Request


def _attend(q, k, v, mask=None):
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
    _attend,
    exact=False,
    card=Limits(oldest=(7, 5), widest=256),
    package=KITCHEN,
    further=_missing,
)
