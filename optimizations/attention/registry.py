"""Every attention backend, why one cannot run, and what all of them are for the doctor."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch

from ...caches import cached
from ...machine.card import Capability, InstalledCards, State
from ...machine.packages import Package, check_package
from ..verdict import Verdict, try_once
from .backends import (
    FLASH_ATTN_2,
    FLASH_ATTN_3,
    MATH,
    SDPA_CUDNN,
    SDPA_EFFICIENT,
    SDPA_FLASH,
    SLICED,
    AttentionRequest,
    Backend,
    sm_of,
)
from .quantized import INT8, INT8_FP8, SAGE_2

BACKENDS = {
    backend.name: backend
    for backend in (
        *(SDPA_FLASH, SDPA_CUDNN, SDPA_EFFICIENT, FLASH_ATTN_2, FLASH_ATTN_3),
        *(INT8, INT8_FP8, SAGE_2, SLICED, MATH),
    )
}

# No multiple of a tile, and more than two of the largest.
TRIAL_TOKENS = 333
# How far from the result in float64, relative. PyTorch's CPU kernels come to 0.0022, 0.0003 and
# 5e-7 on the trial's inputs; a card may compute fp32 in TF32.
EXACT_ERROR = {torch.bfloat16: 0.01, torch.float16: 0.002, torch.float32: 0.002}
# SageAttention and int8_fp8 are off by 0.038 on an H200. A tail of 77 in 333 keys that is left out
# or counted twice is off by 0.3 and more.
LOSSY_ERROR = 0.08


def limits_of(name: str, request: AttentionRequest) -> Verdict | None:
    """Says why a request is outside a backend's limits; launches nothing."""
    backend, sm = BACKENDS[name], sm_of(request.device)
    on_cpu = request.device.type == "cpu"
    limits = backend.card if sm is not None else backend.cpu if on_cpu else backend.other
    if limits is None:
        other = f"{request.device} is not an NVIDIA card that torch can use"
        return Verdict("needs an NVIDIA card" if on_cpu else other, final=True)
    fact = limits.refusal(request, sm)
    return Verdict(fact, final=True) if fact else None


def refusal(name: str, request: AttentionRequest, tried: bool = False) -> Verdict | None:
    """Says why a backend cannot run a request; None when it can.

    The last thing asked is a trial against float64, once per card, dtype, head and mask: which
    builds, compilers and drivers can, and which packages work, is declared nowhere. None is needed
    where backends were `tried` here for such a request before.
    """
    backend = BACKENDS[name]
    if found := limits_of(name, request):
        return found
    fact = "" if backend.package is None else _missing(backend.package)
    if not fact and backend.further is not None:
        fact = backend.further(request)
    if fact:
        return Verdict(fact, final=True)
    if tried:
        return None
    kind = name, request.device, request.dtype, request.head_dim, request.masked
    return try_once((refusal, *kind), lambda: _trial(*kind))


def check_backends(cards: InstalledCards) -> tuple[Capability, ...]:
    """Says what each backend does for Qwen-Image's heads in bf16, on the first card, or without one
    on the processor.
    """
    device = torch.device("cuda", 0) if cards.usable else torch.device("cpu")
    return tuple(_capability(backend, device) for backend in BACKENDS.values())


def _capability(backend: Backend, device: torch.device) -> Capability:
    name = f"attention {backend.name}"
    request = AttentionRequest(device, torch.bfloat16, 1, 24, 128, 4096)
    reason = refusal(backend.name, request)
    if reason:
        unproven = f"; {backend.unproven}" if backend.unproven else ""
        return Capability(name, State.NOT_USABLE, f"{reason}{unproven}")
    masked = refusal(backend.name, replace(request, masked=True))
    clauses = ["exact" if backend.exact else "quantized, by name or with fast"]
    clauses.append(f"not with a mask: {masked}" if masked else "with and without a mask")
    if backend.package is not None:
        clauses.insert(0, check_package(backend.package)[0].reason)
    if backend.unproven:
        clauses.append(f"{backend.unproven}, agrees here with PyTorch in a trial")
    return Capability(name, State.LIMITED if masked else State.USABLE, "; ".join(clauses))


@cached
def _missing(package: Package) -> str:
    capability, module = check_package(package)
    return "" if module is not None else f"{capability.name} {capability.reason}"


def _trial(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool) -> str:
    backend = BACKENDS[name]
    q, k, v, mask = _trial_inputs(dtype, head_dim, masked)
    expected = attend_float64(q, k, v, mask)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # PyTorch tells with several what its error says
        # Views of one tensor, as the blocks have them.
        q, k, v = torch.stack((q, k, v), dim=2).to(device).unbind(2)
        mask = None if mask is None else mask.to(device)
        out = backend.attend(q, k, v, mask)
        if out.dtype != dtype or out.shape != expected.shape:
            return f"a trial gave {tuple(out.shape)} in {out.dtype}"
        out = out.cpu().double()
    if not out.isfinite().all():
        return "a trial gave values that are not finite"
    error = ((out - expected).norm() / expected.norm()).item()
    most = EXACT_ERROR[dtype] if backend.exact else LOSSY_ERROR
    return "" if error <= most else f"a trial was off by {error:.2g} of the result"


def _trial_inputs(
    dtype: torch.dtype, head_dim: int, masked: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    shape = (3, 2, TRIAL_TOKENS, 2, head_dim)
    q, k, v = torch.randn(shape, generator=generator).to(dtype)
    if not masked:
        return q, k, v, None
    mask = torch.zeros(2, 1, 1, TRIAL_TOKENS, dtype=dtype)
    mask[0, ..., ::3] = -1
    mask[1, ..., 20:60] = -torch.inf  # as the text padding of the shorter prompt
    return q, k, v, mask


def attend_float64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Computes what every backend does, (B, tokens, heads * head_dim), written down plainly."""
    q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask.double()
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
