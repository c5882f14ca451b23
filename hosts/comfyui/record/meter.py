"""The one guard around what only measures: nothing that fails there is a failure of the run."""

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

_told: set[str] = set()


@contextmanager
def harmless() -> Iterator[None]:
    """Ends with what fails inside, which is logged once for each kind of failure."""
    try:
        yield
    except Exception as error:
        kind = f"{type(error).__name__}: {error}"
        if kind not in _told:
            _told.add(kind)
            logger.warning(
                "Qwen-Image L40S: a run could not be measured or reported, and goes on: %s.",
                kind,
                exc_info=True,
            )


def only_measures(method: Method) -> Method:
    """A method that never fails, of an object with an attribute `off`.

    Where it would have, it sets `off`: what was measured so far is incomplete. While that is set
    nothing runs, and the method returns None.
    """

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


# What a phase takes: seconds, what torch allocates, and what its card says is in use.
#
# Nothing here waits for the card but `finish`, and a phase ends where its results are read anyway.
# torch counts its peak from the last reset, of which there is one for the process: a `Meter` resets
# it in every phase, so that another profiler that reads `max_memory_allocated` over a whole run
# finds
# the last phase's.

# Devices whose own clock or whose calls tell when a step is done.
TIMED = ("cuda", "cpu")


@dataclass(frozen=True)
class Measured:
    """What one phase took; bytes are 0 where the device is not counted.

    Attributes:
        seconds: From `begin` to its end, without what was measured `apart`; None where nothing
            tells when the device is done.
        device: Such as "cuda:0".
        counted: Whether the device's memory was counted, which is so of CUDA alone.
        card_bytes: The card's own highest reading of what is in use, by every program.
        allocated_bytes: What torch's tensors held at most.
        paged_bytes: The highest reading of the weights that dynamic VRAM holds beside torch.
        beside_bytes: What torch's tensors held at most beyond what was there at `begin`: the
            activations; 0 where nothing began.
        waited_seconds: From its making to `begin`, in which weights are loaded; None where nothing
            began.
        loaded_bytes: The card's reading at `begin`.
    """

    seconds: float | None
    device: str = "cpu"
    counted: bool = False
    card_bytes: int = 0
    allocated_bytes: int = 0
    paged_bytes: int = 0
    beside_bytes: int = 0
    waited_seconds: float | None = None
    loaded_bytes: int = 0


class Meter:
    """Measures from its making to `finish`, on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts = device.type == "cuda"
        self._card = self._paged = self._most = self._beside = self._before = self._loaded = 0
        self._apart = 0.0
        self._waited: float | None = None
        self._start = time.perf_counter()
        self._reset()
        self.look()

    def begin(self) -> None:
        """What is there now is what the work's own memory lies beside: its weights are loaded."""
        if self._waited is None:
            self._waited = time.perf_counter() - self._start - self._apart
        self._fold()
        self._beside = 0
        self._reset()
        self.look()
        self._loaded = self._card

    def look(self) -> None:
        """Reads the card, as ComfyUI does before each forward pass.

        Between two readings torch keeps what it has reserved, so that none misses its peak; before
        that is given back there has to be one.
        """
        if self._counts:
            free, total = torch.cuda.mem_get_info(self._device)
            self._card = max(self._card, total - free)
            self._paged = max(self._paged, paged_bytes())

    def apart(self) -> Meter:
        """Of a part of the phase, which until `rejoin` is no part of it."""
        self._fold()
        return Meter(self._device)

    def rejoin(self, inner: Meter) -> None:
        """Goes on after the part that `inner` measured."""
        self._apart += time.perf_counter() - inner._start
        if self._counts:
            torch.cuda.reset_peak_memory_stats(self._device)

    def finish(self) -> Measured:
        """Waits for the device."""
        done = _wait(self._device)
        seconds = time.perf_counter() - self._start - self._apart - (self._waited or 0.0)
        self.look()
        self._fold()
        return Measured(
            seconds=seconds if done else None,
            device=str(self._device),
            counted=self._counts,
            card_bytes=self._card,
            allocated_bytes=self._most,
            paged_bytes=self._paged,
            beside_bytes=0 if self._waited is None else self._beside,
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
            self._beside = max(self._beside, most - self._before)


class Marks:
    """Moments on a device's own clock: the stream's on a CUDA card, the wall's on the processor."""

    def __init__(self, device: torch.device) -> None:
        self._timed = device.type in TIMED
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._marks: list[torch.cuda.Event | float] = []

    def __len__(self) -> int:
        return len(self._marks)

    def mark(self) -> None:
        """Without a wait."""
        if self._stream is None:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Between each two marks, when the device is done; none where calls do not wait for it."""
        if not self._timed:
            return []
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._stream is None:
            return [end - begin for begin, end in pairs]
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def typical(seconds: Sequence[float]) -> float | None:
    """The median without the first, which also compiles, measures and fills; None of fewer."""
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
