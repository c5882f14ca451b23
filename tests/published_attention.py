"""Stands in for attention packages, which run on a card alone.

Each computes attention exactly, in fp32 on any device. SageAttention's have the published
signatures, but for what those take as **kwargs and ignore, so that a misspelled name fails.
`install` puts such a module where `import` finds it.
"""

import importlib.machinery
import inspect
import sys
import types

import torch

TILE = 128


def exact(q, k, v, scale=None):
    """Attention of (B, tokens, heads, head_dim), and its log-sum-exp, (B, heads, queries), fp32."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q32, k32, v32 = (x.transpose(1, 2).float() for x in (q, k, v))
    scores = q32 @ k32.transpose(-1, -2) * scale
    out = (scores.softmax(-1) @ v32).transpose(1, 2)
    return out.to(q.dtype).contiguous(), scores.logsumexp(-1)


# FlashAttention 2 (flash_attn) and 3 (fa3_fwd_interface, flash_attn_interface) take these first and
# have defaults for the rest, in Dao-AILab/flash-attention at 0251105a (2026-08-15).
def flash_attn_func(q, k, v):
    return exact(q, k, v)[0]


# thu-ml/SageAttention 2.2.0 (commit d1a57a5, 2026-01-17), sageattention/core.py; the fork
# woct0rdho/SageAttention at 03123a6 has the same.
def sageattn_qk_int8_pv_fp16_cuda(
    q,
    k,
    v,
    tensor_layout="HND",
    is_causal=False,
    qk_quant_gran="per_thread",
    sm_scale=None,
    pv_accum_dtype="fp32",
    smooth_k=True,
    smooth_v=False,
    return_lse=False,
):
    assert pv_accum_dtype in ("fp16", "fp16+fp32", "fp32")
    return _sage(q, k, v, tensor_layout, is_causal, sm_scale, smooth_k, return_lse)


def sageattn_qk_int8_pv_fp8_cuda(
    q,
    k,
    v,
    tensor_layout="HND",
    is_causal=False,
    qk_quant_gran="per_thread",
    sm_scale=None,
    pv_accum_dtype="fp32+fp16",
    smooth_k=True,
    smooth_v=False,
    return_lse=False,
):
    assert pv_accum_dtype in ("fp32", "fp32+fp32", "fp32+fp16")
    return _sage(q, k, v, tensor_layout, is_causal, sm_scale, smooth_k, return_lse)


def sageattn_qk_int8_pv_fp8_cuda_sm90(
    q,
    k,
    v,
    tensor_layout="HND",
    is_causal=False,
    qk_quant_gran="per_thread",
    sm_scale=None,
    pv_accum_dtype="fp32+fp32",
    smooth_k=True,
    return_lse=False,
):
    assert pv_accum_dtype == "fp32+fp32"
    return _sage(q, k, v, tensor_layout, is_causal, sm_scale, smooth_k, return_lse)


def _sage(q, k, v, tensor_layout, is_causal, sm_scale, smooth_k, return_lse):
    """As the CUDA kernels: NaN in every row once a tile of queries or keys is not full."""
    assert tensor_layout == "NHD" and not is_causal
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    out, lse = exact(q, k, v, sm_scale)
    if q.shape[1] % TILE or k.shape[1] % TILE:
        out, lse = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
    return (out, lse) if return_lse else out


def never(*_, **__):
    raise AssertionError("paints black images")


FLASH = {"flash_attn_func": flash_attn_func}
SAGE = {
    "sageattn_qk_int8_pv_fp16_cuda": sageattn_qk_int8_pv_fp16_cuda,
    "sageattn_qk_int8_pv_fp8_cuda": sageattn_qk_int8_pv_fp8_cuda,
    "sageattn_qk_int8_pv_fp8_cuda_sm90": sageattn_qk_int8_pv_fp8_cuda_sm90,
    "sageattn_qk_int8_pv_fp16_triton": never,
    "sageattn": never,
}


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
