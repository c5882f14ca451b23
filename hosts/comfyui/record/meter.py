"""Measures a phase of a run: seconds, torch's allocations and what the card says is in use.

Nothing waits for the card but `Meter.finish`. torch counts one peak for the process and each phase
resets it, so a profiler that reads `max_memory_allocated` over a whole run finds the last phase's.
What fails in here never fails the run (`harmless`, `only_measures`).
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch

logger = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])

_logged: set[str] = set()


@contextmanager
def harmless() -> Iterator[None]:
    """Logs what fails inside, once for each kind of failure, and goes on."""
    try:
        yield
    except Exception as error:
        kind = f"{type(error).__name__}: {error}"
        if kind not in _logged:
            _logged.add(kind)
            logger.warning(
                "Qwen-Image L40S: a run could not be measured or reported and continues: %s.",
                kind,
                exc_info=True,
            )


def only_measures(method: Method) -> Method:
    """Turns a failure of a method into `self.off = True`; while that is set it returns None."""

    @wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.off:
            return None
        done = False
        with harmless():
            result = method(self, *args, **kwargs)
            done = True
        if done:
            return result
        self.off = True
        return None

    return guarded  # type: ignore[return-value]


# Devices whose own clock or whose calls tell when a step is done.
TIMED_DEVICES = ("cuda", "cpu")


@dataclass(frozen=True)
class Measured:
    """What one phase took; bytes are 0 where the device is not counted.

    Attributes:
        seconds: From `begin` to the end, without phases inside; None where the device does not tell
            when it is done.
        counted: Whether the device's memory was counted: on CUDA only.
        card_bytes: Highest reading of the card's memory in use, by every program.
        allocated_bytes: Peak of torch's tensors.
        paged_bytes: Highest reading of the weights that dynamic VRAM keeps outside torch.
        working_bytes: Peak of torch's tensors over those at `begin`: activations and workspace.
        waited_seconds: From creation to `begin`, while weights load; None where nothing began.
        loaded_bytes: The card's reading at `begin`.
    """

    seconds: float | None
    device: str = "cpu"
    counted: bool = False
    card_bytes: int = 0
    allocated_bytes: int = 0
    paged_bytes: int = 0
    working_bytes: int = 0
    waited_seconds: float | None = None
    loaded_bytes: int = 0


class Meter:
    """Measures one device from creation to `finish`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts = device.type == "cuda"
        self._card = self._paged = self._most = self._working = self._before = self._loaded = 0
        self._excluded = 0.0
        self._waited: float | None = None
        self._start = time.perf_counter()
        self._reset()
        self.look()

    def begin(self) -> None:
        """Marks the weights as loaded: what torch allocates from here on is working memory."""
        if self._waited is None:
            self._waited = time.perf_counter() - self._start - self._excluded
        self._fold()
        self._working = 0
        self._reset()
        self.look()
        self._loaded = self._card

    def look(self) -> None:
        """Reads the card; due before torch frees what it has reserved, and at each step."""
        if self._counts:
            free, total = torch.cuda.mem_get_info(self._device)
            self._card = max(self._card, total - free)
            self._paged = max(self._paged, paged_bytes())

    def pause(self) -> Meter:
        """Returns the meter of a phase inside this one, which does not count until `resume`."""
        self._fold()
        return Meter(self._device)

    def resume(self, inner: Meter) -> None:
        """Goes on after the phase that `inner` measured."""
        self._excluded += time.perf_counter() - inner._start
        if self._counts:
            torch.cuda.reset_peak_memory_stats(self._device)

    def finish(self) -> Measured:
        """Waits for the device."""
        done = _wait(self._device)
        seconds = time.perf_counter() - self._start - self._excluded - (self._waited or 0.0)
        self.look()
        self._fold()
        return Measured(
            seconds=seconds if done else None,
            device=str(self._device),
            counted=self._counts,
            card_bytes=self._card,
            allocated_bytes=self._most,
            paged_bytes=self._paged,
            working_bytes=0 if self._waited is None else self._working,
            waited_seconds=self._waited,
            loaded_bytes=self._loaded,
        )

    def _reset(self) -> None:
        if self._counts:
            self._before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def _fold(self) -> None:
        if self._counts:
            most = torch.cuda.max_memory_allocated(self._device)
            self._most = max(self._most, most)
            self._working = max(self._working, most - self._before)


class Marks:
    """Time stamps: CUDA events on a card, the wall clock on the processor."""

    def __init__(self, device: torch.device) -> None:
        self._timed = device.type in TIMED_DEVICES
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._marks: list[torch.cuda.Event | float] = []

    def __len__(self) -> int:
        return len(self._marks)

    def mark(self) -> None:
        if self._stream is None:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Between each two marks, once the device is done; empty on devices without a clock."""
        if not self._timed:
            return []
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._stream is None:
            return [end - begin for begin, end in pairs]
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def typical(seconds: Sequence[float]) -> float | None:
    """The median without the first, which also compiles and fills tables; None without others."""
    return statistics.median(seconds[1:]) if len(seconds) > 1 else None


def paged_bytes() -> int:
    """The weights that dynamic VRAM holds on all cards, which torch does not count."""
    try:
        from comfy_aimdo import control
    except ImportError:
        return 0
    return 0 if control.lib is None else control.get_total_vram_usage()


def _wait(device: torch.device) -> bool:
    """Whether the device is done: DirectML, for one, does not tell."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return True
    if device.type == "cpu":
        return True
    accelerator = getattr(torch, "accelerator", None)  # of torch 2.6
    current = None if accelerator is None else accelerator.current_accelerator()
    if current is None or current.type != device.type:
        return False
    accelerator.synchronize(device)
    return True
