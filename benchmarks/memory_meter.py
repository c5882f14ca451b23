"""Readings of a card in threads of their own, and what they tell of a span of time.

Times are `time.monotonic()`, which on Linux is the same clock in all processes.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable

from memory_nvml import Nvml, NvmlError, PcieCounters, PcieRates

MEMORY_SECONDS = 0.005
PCIE_SECONDS = 0.02


class Series(threading.Thread):
    """Reads a value again and again, and keeps each change with its time.

    Args:
        read: gives the value.
        seconds: between two readings.
    """

    def __init__(self, read: Callable[[], object], seconds: float) -> None:
        super().__init__(daemon=True)
        self._read, self._seconds = read, seconds
        self._values, self._times = [read()], [time.monotonic()]
        self._stop_asked = threading.Event()
        self.longest_gap = 0.0
        self.failure: str | None = None
        self.start()

    def run(self) -> None:
        last = self._times[0]
        while not self._stop_asked.wait(self._seconds):
            try:
                value = self._read()
            except Exception as error:
                self.failure = f"{type(error).__name__}: {error}"
                return
            now = time.monotonic()
            self.longest_gap = max(self.longest_gap, now - last)
            last = now
            if value != self._values[-1]:
                # In this order: whoever finds a time finds its value.
                self._values.append(value)
                self._times.append(now)

    def stop(self) -> None:
        self._stop_asked.set()
        self.join(timeout=5)

    def at(self, moment: float) -> object:
        """The last value that was read by then."""
        return self._values[max(0, bisect_right(self._times, moment) - 1)]

    def within(self, start: float, end: float) -> list:
        """The value at the start and all that followed until the end."""
        first = max(0, bisect_right(self._times, start) - 1)
        return self._values[first : max(first + 1, bisect_right(self._times, end))]


class Meter:
    """Memory in use and bytes over PCIe of one card.

    Args:
        used: gives the bytes in use where the driver's library is missing.
        uuid: the card, as CUDA names it.
    """

    def __init__(self, used: Callable[[], int], uuid: str) -> None:
        self.about: dict = {"memory": "driver", "driver": None, "pcie": None}
        nvml = None
        try:
            nvml = Nvml(uuid)
            used = nvml.used
            self.about["driver"] = nvml.driver()
        except NvmlError as error:
            self.about["memory"] = f"CUDA, asked by the ballast, since: {error}"
        self._used = Series(used, MEMORY_SECONDS)
        self._pcie = self._pcie_series(nvml)

    def _pcie_series(self, nvml: Nvml | None) -> Series | None:
        if nvml is None:
            self.about["pcie_missing"] = "no NVML"
            return None
        reasons = []
        for way in (PcieCounters, PcieRates):
            try:
                series = Series(way(nvml), PCIE_SECONDS)
            except NvmlError as error:
                reasons.append(str(error))
                continue
            self.about["pcie"] = way.source
            return series
        self.about["pcie_missing"] = "; ".join(reasons)
        return None

    def used(self) -> int:
        """The bytes in use now."""
        return self._used.at(time.monotonic())

    def peak(self, start: float, end: float) -> int:
        """The most bytes in use in this time."""
        return max(self._used.within(start, end))

    def moved(self, start: float, end: float) -> tuple[int, int] | None:
        """Bytes that the card received and sent in this time; None where nothing counts them."""
        if self._pcie is None:
            return None
        before, after = self._pcie.at(start), self._pcie.at(end)
        return after[0] - before[0], after[1] - before[1]

    def settle(self) -> None:
        """Waits until everything that has happened is read."""
        time.sleep(3 * PCIE_SECONDS)

    def health(self) -> dict:
        """The longest time between two readings, and what ended them early."""
        series = {"memory": self._used, "pcie": self._pcie}
        return {
            name: {"longest_gap_s": round(one.longest_gap, 4), "failure": one.failure}
            for name, one in series.items()
            if one is not None
        }

    def stop(self) -> None:
        for series in (self._used, self._pcie):
            if series is not None:
                series.stop()
