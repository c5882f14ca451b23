"""Triton kernels; their plain-torch twins are in `reference.py` and `vae/flat.py`.

A function under a twin's name gives the `Launch` of its kernel, or launches in their order; one
that begins with `prepare_` prepares them. Triton is optional: import a kernel's module only where
`missing()` is empty.
"""

from __future__ import annotations

import contextlib
import sys

import torch

from ...caches import cached
from ...machine.packages import Package, check_package

# For the launches that need no other card, which are nearly all; it can be entered again and again.
_NOTHING = contextlib.nullcontext()


@cached
def missing() -> str:
    """Why the kernels cannot be imported, in one clause; empty when they can."""
    capability, module = check_package(Package("triton", "triton"))
    return "" if module is not None else f"triton: {capability.why.fact}"


def interpreted() -> bool:
    """Whether the kernels run on the CPU, in Triton's interpreter; asks a Triton that is imported
    already: one is not loaded for this alone.
    """
    knobs = getattr(sys.modules["triton"], "knobs", None) if "triton" in sys.modules else None
    return knobs is not None and knobs.runtime.interpret


def on_card(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes a card the current one: kernels are compiled for it, and launch on it alone."""
    return torch.cuda.device(device) if device.type == "cuda" else _NOTHING


def on_card_of(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """Makes the card that holds `x` the current one: kernels launch on that one alone."""
    index = x.get_device()  # -1 on the CPU
    if index < 0 or index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(index)


def sm_of(device: torch.device) -> tuple[int, int] | None:
    """Gives the compute capability of an NVIDIA card; None for any other device."""
    usable = device.type == "cuda" and torch.cuda.is_available() and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if usable else None
