"""What a phase takes: seconds, what torch allocates, and what its card says is in use.

Nothing here waits for the card but `finish`, and a phase ends where its results are read anyway.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Measured:
    """What one phase took; bytes are 0 where the device is not counted.

    Attributes:
        seconds: From its beginning to its end, without what was measured `apart`.
        counted: Whether the device's memory was counted, which a processor's is not.
        card_bytes: The card's own highest reading of what is in use, by every program.
        allocated_bytes: What torch's tensors held at most.
        paged_bytes: The highest reading of the weights that dynamic VRAM holds beside torch.
        beside_bytes: What torch's tensors held at most beyond what was there at `begin`: the
            activations, where weights were loaded before.
    """

    seconds: float
    counted: bool = False
    card_bytes: int = 0
    allocated_bytes: int = 0
    paged_bytes: int = 0
    beside_bytes: int = 0


class Meter:
    """Measures from its making to `finish`, on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts = device.type == "cuda"
        self._card = self._paged = self._most = self._beside = self._before = 0
        self._apart = 0.0
        self._start = time.perf_counter()
        self._reset()
        self.look()

    def begin(self) -> None:
        """What is there now is what the work's own memory lies beside: its weights are loaded."""
        self._fold()
        self._beside = 0
        self._reset()
        self.look()

    def look(self) -> None:
        """Reads the card, as ComfyUI does before each forward pass.

        Between two readings torch keeps what it has reserved, so that none misses its peak.
        """
        if self._counts:
            free, total = torch.cuda.mem_get_info(self._device)
            self._card = max(self._card, total - free)
            self._paged = max(self._paged, paged_bytes())

    @property
    def beside_bytes(self) -> int:
        """What was allocated at most since `begin`, beyond what was there; 0 if not counted."""
        self._fold()
        return self._beside

    @contextmanager
    def apart(self) -> Iterator[Meter]:
        """Measures a part of the phase on its own, which then is no part of this phase."""
        self._fold()
        inner = Meter(self._device)
        try:
            yield inner
        finally:
            self._apart += time.perf_counter() - inner._start
            if self._counts:
                torch.cuda.reset_peak_memory_stats(self._device)

    def finish(self) -> Measured:
        """Waits for the device."""
        if self._counts:
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - self._start - self._apart
        self.look()
        self._fold()
        return Measured(seconds, self._counts, self._card, self._most, self._paged, self._beside)

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
    """Moments on a device's own clock: the stream's on a card, the wall's elsewhere."""

    def __init__(self, device: torch.device) -> None:
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
        """Between each two marks; the device has to be done."""
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
