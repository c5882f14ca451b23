"""Joint attention over text and image tokens: `backends` compute it, `choice` lists these and picks
one, `chosen` keeps it for a run.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...machine.card import Capability, InstalledCards, State
from ...machine.packages import check_package
from .backends import AttentionRequest, Backend, aligned_mask
from .choice import (
    BACKENDS,
    FAST,
    Attention,
    choose_attention,
    refusal,
)
from .chosen import MOST_ERROR, ChosenAttention, attend_causal, is_lossy

__all__ = [
    "BACKENDS",
    "FAST",
    "MOST_ERROR",
    "Attention",
    "AttentionRequest",
    "ChosenAttention",
    "aligned_mask",
    "attend_causal",
    "check_backends",
    "choose_attention",
    "is_lossy",
    "refusal",
]


def check_backends(cards: InstalledCards) -> tuple[Capability, ...]:
    """Says what each backend does for Qwen-Image's heads in bf16, on the first GPU, or without
    one on the CPU.
    """
    device = torch.device("cuda", 0) if cards.usable else torch.device("cpu")
    return tuple(_capability(backend, device) for backend in BACKENDS.values())


def _capability(backend: Backend, device: torch.device) -> Capability:
    name = f"attention {backend.name}"
    request = AttentionRequest(device, torch.bfloat16, 1, 24, 128, 4096)
    reason = refusal(backend.name, request)
    if reason:
        return State.NOT_USABLE.of(name, str(reason))
    masked = refusal(backend.name, replace(request, masked=True))
    clauses = ["exact" if backend.exact else "quantized, by name or with fast"]
    clauses.append(f"not with a mask: {masked}" if masked else "with and without a mask")
    if backend.package is not None:
        clauses.insert(0, check_package(backend.package)[0].why.fact)
    return (State.LIMITED if masked else State.USABLE).of(name, "; ".join(clauses))
