"""Times, memory and kernels of a call, on a card or, to try things out, on a CPU."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..spec.formats import GIB

# More than any L2 cache; writing it also takes longer than launching what is timed after it.
FLUSHED_BYTES = 2**28


@dataclass(frozen=True)
class Timing:
    """How long the repetitions of a call took, in milliseconds and in the order they ran.

    Attributes:
        samples: From a CUDA event before the call to one after it, the card being idle before; on
            a CPU, the same as `wall`.
        wall: Until the card had finished, by the processor's clock.
        host: Until the call returned, which is what the processor was busy with.
    """

    samples: tuple[float, ...]
    wall: tuple[float, ...]
    host: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def quantile(self, part: float) -> float:
        """A quantile of the samples, interpolated between the two nearest."""
        return quantile(self.samples, part)


@dataclass(frozen=True)
class Peaks:
    """The most memory of a card that torch's allocator held during a call, in GiB.

    Attributes:
        allocated: In tensors.
        reserved: Taken from the driver.
    """

    allocated: float
    reserved: float


def quantile(samples: Sequence[float], part: float) -> float:
    """The value below which `part` (0 to 1) of the samples lie, interpolated linearly."""
    ordered = sorted(samples)
    place = part * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_calls(call: Callable[[], Any], device: torch.device, repeats: int) -> Timing:
    """Times a call that has been warmed up, each repetition alone."""
    samples, wall, host = [], [], []
    on_card = device.type == "cuda"
    for _ in range(repeats):
        begin, end = _events() if on_card else (None, None)
        synchronize(device)
        start = time.perf_counter()
        if on_card:
            begin.record()
        call()
        if on_card:
            end.record()
        host.append((time.perf_counter() - start) * 1e3)
        synchronize(device)
        wall.append((time.perf_counter() - start) * 1e3)
        samples.append(begin.elapsed_time(end) if on_card else wall[-1])
    return Timing(tuple(samples), tuple(wall), tuple(host))


def time_cold(
    call: Callable[[], Any],
    device: torch.device,
    warmup: int = 3,
    repeats: int = 20,
    flushed: int = FLUSHED_BYTES,
) -> Timing:
    """Times a call that is as short as its launch: the card's L2 cache is emptied before each
    repetition, which also hides the launch. `wall` and `host` are of all repetitions together, per
    call.
    """
    if device.type != "cuda":
        for _ in range(warmup):
            call()
        return time_calls(call, device, repeats)
    cache = torch.empty(flushed, dtype=torch.int8, device=device)
    pairs = []
    for _ in range(warmup):
        call()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        cache.zero_()
        begin, end = _events()
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    host = (time.perf_counter() - start) * 1e3 / repeats
    synchronize(device)
    wall = (time.perf_counter() - start) * 1e3 / repeats
    return Timing(tuple(begin.elapsed_time(end) for begin, end in pairs), (wall,), (host,))


def reset_peaks(device: torch.device) -> None:
    """Gives unused blocks back and starts counting anew."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peaks(device: torch.device) -> Peaks | None:
    """The peaks since `reset_peaks`; None on a CPU, whose allocations torch does not count."""
    if device.type != "cuda":
        return None
    return Peaks(
        torch.cuda.max_memory_allocated(device) / GIB, torch.cuda.max_memory_reserved(device) / GIB
    )


def allocated_gib(device: torch.device) -> float:
    """What tensors hold on a card now, in GiB; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) / GIB if device.type == "cuda" else 0.0


def device_events(call: Callable[[], Any], device: torch.device) -> list[tuple[str, float]]:
    """Runs a call under torch's profiler.

    Returns:
        (name, milliseconds) of everything that ran: on a card its kernels, copies and fills, on a
        CPU torch's operators without what they call. Empty where the driver lets nobody look.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_card = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_card else ProfilerActivity.CPU
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about cycles, of which there is one
        with profile(activities=[activity]) as profiler:
            call()
            synchronize(device)
        events = profiler.events()
    if not on_card:
        return [(event.name, event.self_cpu_time_total / 1e3) for event in events]
    return [
        (event.name, event.time_range.elapsed_us() / 1e3)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
