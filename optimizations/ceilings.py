"""What a card reaches at most, measured: the figures beside which a program's own are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .hardware import first_line
from .measure import time_cold

# Tokens of a 1024x1024 image with 200 text tokens, and the MLP's first layer.
M, K, N = 4296, 3072, 12288
COPIED_BYTES = 2**31
# On a CPU these sizes only show that the code runs.
SMALL = 256


def measure_ceilings(device: torch.device) -> tuple[dict[str, float], dict[str, str]]:
    """Multiplies 4296 x 3072 by 3072 x 12288 in every format, and copies 2 GiB on the card.

    Returns:
        {name with unit: figure}, copies counted as read and written.
        {name with unit: reason} of what does not run on this device.
    """
    m, k, n = (M, K, N) if device.type == "cuda" else (SMALL, SMALL, SMALL)
    copied = COPIED_BYTES if device.type == "cuda" else 2**20
    flops = 2 * m * k * n / 1e9
    cases: dict[str, tuple[Callable[[], Callable[[], Any]], float]] = {
        "bf16 GEMM TFLOP/s": (lambda: _bf16(m, k, n, device), flops),
        "fp8 rowwise GEMM TFLOP/s": (lambda: _fp8(m, k, n, device), flops),
        "int8 GEMM TFLOP/s": (lambda: _int8(m, k, n, device), flops),
        "copy GB/s": (lambda: _copy(copied, device), 2 * copied / 1e6),
    }
    figures, missing = {}, {}
    for name, (make, work) in cases.items():
        try:
            figures[name] = work / time_cold(make(), device).median
        except Exception as error:  # which formats a build and a card multiply is declared nowhere
            missing[name] = first_line(error)
    return figures, missing


def _bf16(m: int, k: int, n: int, device: torch.device) -> Callable[[], Any]:
    x, weight = _random(m, k, device), _random(n, k, device)
    return lambda: F.linear(x, weight)


def _fp8(m: int, k: int, n: int, device: torch.device) -> Callable[[], Any]:
    x, weight = (_random(rows, k, device).to(torch.float8_e4m3fn) for rows in (m, n))
    scale_a, scale_b = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)
    # Fast accumulation is Hopper's ceiling, whatever one thinks of its sums.
    return lambda: torch._scaled_mm(
        x,
        weight.t(),
        scale_a=scale_a,
        scale_b=scale_b,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _int8(m: int, k: int, n: int, device: torch.device) -> Callable[[], Any]:
    x, weight = (
        torch.randint(-127, 127, (rows, k), device=device, dtype=torch.int8) for rows in (m, n)
    )
    return lambda: torch._int_mm(x, weight.t())


def _copy(count: int, device: torch.device) -> Callable[[], Any]:
    source = torch.empty(count, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _random(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
