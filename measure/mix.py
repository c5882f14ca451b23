"""Times calls of several kinds that run in turns, once the card's clocks have settled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

# The part of the time in which clocks settle, which does not count.
SETTLING = 0.3
# The card is waited for after so long, and all the time so that no more launches are ahead of it.
ROUND_SECONDS, MOST_AHEAD = 0.2, 3


class MixPart(NamedTuple):
    """One call of a mix.

    Attributes:
        name: What its figure is called.
        call: Runs it.
        work: Its operations, or its bytes.
    """

    name: str
    call: Callable[[], Any]
    work: float


class MixSum:
    """Work and the seconds it took."""

    def __init__(self) -> None:
        self.work = self.seconds = 0.0

    def add(self, work: float, seconds: float) -> None:
        self.work += work
        self.seconds += seconds

    @property
    def rate(self) -> float:
        """Work in a second."""
        return self.work / self.seconds


def run_mix(parts: Sequence[MixPart], device: torch.device, seconds: float) -> dict[str, MixSum]:
    """Runs the parts in their order, again and again, until the time is up.

    Returns:
        What the parts of each name did and took, without the beginning.
    """
    for part in parts:  # libraries choose their kernels, Triton compiles
        part.call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    settled = begin + SETTLING * seconds
    sums = {part.name: MixSum() for part in parts}
    while True:
        start = time.perf_counter()
        counts = start >= settled
        for part, taken in _round(parts, device):
            if counts:
                sums[part.name].add(part.work, taken)
        if counts and time.perf_counter() - begin >= seconds:
            return sums


def _round(parts: Sequence[MixPart], device: torch.device) -> Iterable[tuple[MixPart, float]]:
    """Each part with the seconds of each of its runs in one round."""
    end = time.perf_counter() + ROUND_SECONDS
    if device.type != "cuda":
        return list(_on_processor(parts))
    marks = [torch.cuda.Event(enable_timing=True)]
    marks[0].record()
    while time.perf_counter() < end:
        for part in parts:
            part.call()
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        if len(marks) > MOST_AHEAD * len(parts):
            marks[-MOST_AHEAD * len(parts)].synchronize()
    marks[-1].synchronize()
    times = [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]
    return [(parts[index % len(parts)], taken) for index, taken in enumerate(times)]


def _on_processor(parts: Sequence[MixPart]) -> Iterator[tuple[MixPart, float]]:
    for part in parts:
        begin = time.perf_counter()
        part.call()
        yield part, time.perf_counter() - begin
