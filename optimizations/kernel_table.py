"""What the kernels of a call are for, told from their names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

# In this order: the first that a name matches. Names are those of ComfyUI's, diffusers' and this
# package's kernels, of cuBLAS, cuDNN and CUTLASS, of torch's own, and on a CPU of its operators.
GROUPS = (
    ("attention", r"flash|fmha|sdpa|sage|attention|attn"),
    ("rope", r"rope|rotary|view_as_complex|fused.*_polar"),
    ("GEMM", r"gemm|nvjet|xmma|cutlass|cublas|splitk|gemv|scaled_mm|addmm|::(_int_|b)?mm\b"),
    ("quantize", r"quant|amax|absmax|float8|fp8"),
    ("norm+modulate", r"norm|adaln|addcmul|modulate|residual"),
    ("copies", r"copy|memcpy|memset|catarray|fused_cat|fillfunctor|::(cat|fill_|zero_)$"),
)
OTHER = "other"


class Kernel(NamedTuple):
    """All launches of one kernel: `ms` is their sum."""

    name: str
    group: str
    ms: float
    count: int


def group_of(name: str) -> str:
    """One of `GROUPS`' names, or "other"."""
    lowered = name.lower()
    return next((group for group, pattern in GROUPS if re.search(pattern, lowered)), OTHER)


def kernel_table(events: Iterable[tuple[str, float]]) -> list[Kernel]:
    """Sums (name, milliseconds) by name, the longest first."""
    times: dict[str, list[float]] = defaultdict(list)
    for name, ms in events:
        times[name].append(ms)
    kernels = [Kernel(name, group_of(name), sum(each), len(each)) for name, each in times.items()]
    return sorted(kernels, key=lambda kernel: -kernel.ms)


def group_sums(kernels: Iterable[Kernel]) -> dict[str, float]:
    """{group: milliseconds}, of every group, in the order of `GROUPS`."""
    sums = dict.fromkeys([*(group for group, _ in GROUPS), OTHER], 0.0)
    for kernel in kernels:
        sums[kernel.group] += kernel.ms
    return sums
