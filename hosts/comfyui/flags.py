"""torch's process-wide switches, set for the length of one run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def flags_for_a_run(tf32: bool, cudnn_benchmark: bool) -> Iterator[None]:
    """Sets what is asked for and puts back what was there; False leaves a switch as it is."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    try:
        if tf32:
            matmul.allow_tf32 = cudnn.allow_tf32 = True
        if cudnn_benchmark:
            cudnn.benchmark = True
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before
