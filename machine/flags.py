"""torch's process-wide switches, set for the length of one run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def flags_for_a_run(tf32: bool, cudnn_benchmark: bool) -> Iterator[None]:
    """Sets what is asked for and puts back what was there; False leaves a switch alone."""
    with ExitStack() as stack:
        if tf32:
            stack.enter_context(_tf32())
        if cudnn_benchmark:
            stack.enter_context(_set(torch.backends.cudnn, "benchmark", True))
        yield


@contextmanager
def _tf32() -> Iterator[None]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    try:
        name, value, switches = "allow_tf32", True, (matmul, cudnn)
        for switch in switches:
            getattr(switch, name)
    except RuntimeError:  # somebody uses torch's newer switches, and torch takes one kind only
        name, value, switches = "fp32_precision", "tf32", (matmul, cudnn.conv)
    with ExitStack() as stack:
        for switch in switches:
            stack.enter_context(_set(switch, name, value))
        yield


@contextmanager
def _set(switch: object, name: str, value: object) -> Iterator[None]:
    before = getattr(switch, name)
    setattr(switch, name, value)
    try:
        yield
    finally:
        setattr(switch, name, before)
