"""Times attention backends against each other on the card at hand, in under two seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from ...machine.card import first_line
from ...machine.store import AttentionTimings
from ..kernels import on_card_of
from .backend import AttentionRequest
from .registry import BACKENDS

# No further backend is begun after so long; the first call of one can take some tenths.
BUDGET_S = 1.2
# One backend's runs after the first two: at most so many, and so many milliseconds of them.
REPEATS, SHARE_MS = 6, 200
# A backend whose first run takes so many times the best is not run again.
HOPELESS = 3
# More work than this is cut to fewer items and heads, not tokens: every card is full long before.
MOST_FLOP = 4e12


def measure(
    names: Iterable[str], request: AttentionRequest, budget_s: float = BUDGET_S
) -> tuple[AttentionTimings | None, list[str]]:
    """Milliseconds of each backend for one request.

    Args:
        names: What to time, the one that is expected to be the fastest first.

    Returns:
        The times, None when there is none; and for each backend without one "not NAME: why".
    """
    request = cut(request)
    times: dict[str, float] = {}
    without = []
    end = time.monotonic() + budget_s
    try:
        inputs = _inputs(request)
        flushed = torch.empty(_l2_bytes(request.device), dtype=torch.int8, device=request.device)
    except torch.cuda.OutOfMemoryError:
        return None, ["no memory is free to measure"]
    with on_card_of(flushed), torch.no_grad():
        for name in names:
            if times and time.monotonic() > end:
                without.append(f"not {name}: the time to measure was up")
                continue
            best = min(times.values(), default=float("inf"))
            try:
                times[name] = _median_ms(BACKENDS[name].attend, inputs, flushed, best)
            except Exception as error:  # as in a trial: a shape can be what a kernel fails at
                without.append(f"not {name}: {first_line(error)}")
    if not times:
        return None, without
    ordered = dict(sorted(times.items(), key=lambda entry: entry[1]))
    return AttentionTimings(request.tokens, ordered), without


def cut(request: AttentionRequest) -> AttentionRequest:
    """The request with so few items and heads that one call does no more than `MOST_FLOP`."""
    flop = 4 * request.head_dim * request.tokens**2  # of one head
    pairs = max(int(MOST_FLOP / flop), 1)
    if pairs >= request.batch * request.heads:
        return request
    return replace(request, batch=1, heads=min(request.heads, pairs))


def _median_ms(call: Callable, inputs: tuple, flushed: torch.Tensor, best: float) -> float:
    call(*inputs)  # cuDNN makes its plan for the shape, packages load their code
    first = timed_ms(call, inputs, flushed)
    if first > HOPELESS * best:
        return first
    repeats = min(REPEATS, int(SHARE_MS / first))
    times = [first, *(timed_ms(call, inputs, flushed) for _ in range(repeats))]
    return sorted(times)[len(times) // 2]


def timed_ms(call: Callable, inputs: tuple, flushed: torch.Tensor) -> float:
    """The card's time for one call, without the inputs in its L2 cache.

    Writing `flushed` also takes longer than launching what is timed after it.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flushed.zero_()
    begin.record()
    call(*inputs)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _inputs(request: AttentionRequest) -> tuple:
    """q, k, v and the mask; torch's own random numbers, which a seed is for, are left alone."""
    generator = torch.Generator(request.device).manual_seed(0)
    shape = (3, request.batch, request.tokens, request.heads, request.head_dim)
    about = {"dtype": request.dtype, "device": request.device}
    q, k, v = torch.randn(shape, generator=generator, **about)
    if not request.masked:
        return q, k, v, None
    mask = torch.zeros(request.batch, 1, 1, request.tokens, **about)
    mask[..., : request.tokens // 100] = -torch.inf
    return q, k, v, mask


def _l2_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    # An L40S has 96 MiB; torch tells since 2.6.
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 96 * 2**20)
