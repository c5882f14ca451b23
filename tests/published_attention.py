"""Stands in for attention packages, which run on a card alone.

Each computes attention in fp32 on any device, exactly but for comfy-kitchen's. `install` puts such
a module where `import` finds it. `on_every_device` makes a backend of comfy-kitchen's.
"""

import importlib.machinery
import inspect
import sys
import types
from dataclasses import replace

import torch

from qwen_l40s.optimizations.attention import BACKENDS
from qwen_l40s.optimizations.attention.backends import Limits


def exact(q, k, v, scale=None):
    """Attention of (B, tokens, heads, head_dim), and its log-sum-exp, (B, heads, queries), fp32."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q32, k32, v32 = (x.transpose(1, 2).float() for x in (q, k, v))
    scores = q32 @ k32.transpose(-1, -2) * scale
    out = (scores.softmax(-1) @ v32).transpose(1, 2)
    return out.to(q.dtype).contiguous(), scores.logsumexp(-1)


# FlashAttention 3 (fa3_fwd_interface, flash_attn_interface) takes these first and has
# defaults for the rest, in Dao-AILab/flash-attention at 0251105a (2026-08-15).
def flash_attn_func(q, k, v):
    return exact(q, k, v)[0]


# comfy-kitchen 0.2.31 and 0.2.40, sage_attention.py. The CUDA source (0.2.31) shares a scale among
# 4 queries and 32 keys, subtracts one key from all where that helps, and rounds weights by tiles.
# That is off by 0.016 on Gaussian input of 4,296 tokens, this by 0.022.
def int8_attention(q, k, v, *, scale=None, attn_mask=None):
    """q, k, v, (B, heads, tokens, head_dim), and the weights in int8: q and k rotated, a scale for
    each of their rows and for each channel of v.
    """
    assert scale is None and attn_mask is None and all(x.stride(-1) == 1 for x in (q, k, v))
    heads, turn = q.shape[-1], torch.ones(1, 1, device=q.device)
    while len(turn) < heads:
        turn = torch.cat([torch.cat([turn, turn], 1), torch.cat([turn, -turn], 1)])
    q8, k8 = (_round(x.float() @ turn * heads**-0.5, -1) for x in (q, k))
    weights = (q8 @ k8.transpose(-1, -2) * heads**-0.5).softmax(-1)
    weights = weights / weights.amax(-1, keepdim=True) * 255
    mixed = weights.round() @ _round(v.float(), -2)
    return (mixed / weights.sum(-1, keepdim=True)).to(q.dtype)


def _round(x, dim):
    scale = x.abs().amax(dim, keepdim=True) / 127
    return (x / scale).round() * scale


FLASH = {"flash_attn_func": flash_attn_func}
KITCHEN = {"int8_attention": int8_attention}


def install(monkeypatch, module, functions, change=None):
    """Makes `import module` find stand-ins.

    Args:
        functions: By name, each with the published signature.
        change: Made of every result before it is given back.

    Returns:
        A list that fills with (name, bound arguments) of every call.
    """
    calls = []

    def record(name, function):
        signature = inspect.signature(function)

        def call(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            calls.append((name, bound.arguments))
            result = function(*bound.args, **bound.kwargs)
            return change(result) if change else result

        return call

    fake = types.ModuleType(module)
    fake.__spec__ = importlib.machinery.ModuleSpec(module, None)
    for name, function in functions.items():
        setattr(fake, name, record(name, function))
    monkeypatch.setitem(sys.modules, module, fake)
    return calls


def on_every_device(monkeypatch, change=None):
    """Has `kitchen_int8` compute as published on every device, with few tokens too.

    Args:
        change: Takes the result of every call with its q and k, and gives the result.
    """

    def attend(q, k, v, mask=None):
        assert mask is None
        out = int8_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2).flatten(2)
        return change(out, q, k) if change else out

    anywhere = Limits(masks=False)
    limits = {"card": anywhere, "cpu": anywhere, "package": None}
    backend = replace(BACKENDS["kitchen_int8"], attend=attend, **limits)
    monkeypatch.setitem(BACKENDS, "kitchen_int8", backend)
