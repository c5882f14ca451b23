"""What the driver tells of a card, through ctypes: memory in use and bytes over PCIe.

Numbers and structures are those of NVIDIA's nvml.h.
"""

from __future__ import annotations

import ctypes
import time

LIBRARY = "libnvidia-ml.so.1"
# NVML_FI_DEV_PCIE_COUNT_TX_BYTES and _RX_BYTES, both seen from the card; drivers since 550.
SENT_BYTES, RECEIVED_BYTES = 197, 198
# nvmlPcieUtilCounter_t
SENT, RECEIVED = 0, 1


class NvmlError(RuntimeError):
    """The driver does not answer; the message is its own."""


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _FieldValue(ctypes.Structure):
    _fields_ = [
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency_us", ctypes.c_longlong),
        ("type", ctypes.c_int),
        ("result", ctypes.c_int),
        # A union of all number types; unsigned ones read alike in it.
        ("value", ctypes.c_ulonglong),
    ]


class Nvml:
    """One card.

    Args:
        uuid: as CUDA tells it; where the driver does not know it, the first card is taken.

    Raises:
        NvmlError: there is no library, driver or card.
    """

    def __init__(self, uuid: str = "") -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise NvmlError(str(error)) from error
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        self._call("nvmlInit_v2")
        self._card = ctypes.c_void_p()
        name = f"GPU-{uuid.removeprefix('GPU-')}".encode()
        try:
            self._call("nvmlDeviceGetHandleByUUID", name, ctypes.byref(self._card))
        except NvmlError:
            self._call("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self._card))

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise NvmlError(f"the driver is too old for {name}")
        self._check(name, function(*arguments))

    def _check(self, name: str, code: int) -> None:
        if code:
            raise NvmlError(f"{name}: {self._library.nvmlErrorString(code).decode()}")

    def driver(self) -> str:
        """The driver's version."""
        text = ctypes.create_string_buffer(96)
        self._call("nvmlSystemGetDriverVersion", text, len(text))
        return text.value.decode()

    def used(self) -> int:
        """The bytes in use on the card, by all processes and the driver."""
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", self._card, ctypes.byref(memory))
        return memory.used

    def pcie_counts(self) -> tuple[int, int]:
        """The counters of bytes that the card received and sent; they may wrap."""
        values = (_FieldValue * 2)(_FieldValue(RECEIVED_BYTES), _FieldValue(SENT_BYTES))
        self._call("nvmlDeviceGetFieldValues", self._card, 2, values)
        for value in values:
            self._check("the PCIe byte counters", value.result)
        return values[0].value, values[1].value

    def pcie_rate(self, direction: int) -> float:
        """Bytes a second in the last 20 ms, which the call takes to find out."""
        kib = ctypes.c_uint()
        self._call("nvmlDeviceGetPcieThroughput", self._card, direction, ctypes.byref(kib))
        return kib.value * 1024.0


class PcieCounters:
    """Bytes received and sent since the first call, from the driver's counters.

    It has to be called more often than the counters wrap: one of 32 bits takes 4 GiB, which PCIe 5
    moves in 70 ms.
    """

    source = "driver's byte counters"

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._last = nvml.pcie_counts()
        self._totals = (0, 0)

    def __call__(self) -> tuple[int, int]:
        counts = self._nvml.pcie_counts()
        steps = map(count_since, self._last, counts)
        self._totals = tuple(total + step for total, step in zip(self._totals, steps, strict=True))
        self._last = counts
        return self._totals


def count_since(before: int, after: int) -> int:
    """What a counter counted that may have wrapped once, at 32 bits if it never was above."""
    return (after - before) % 2 ** (32 if max(before, after) < 2**32 else 64)


class PcieRates:
    """The same from the driver's rates over 20 ms, each taken for the time since the last."""

    source = "driver's rates over 20 ms, integrated"

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        nvml.pcie_rate(RECEIVED)
        self._totals, self._time = (0.0, 0.0), time.monotonic()

    def __call__(self) -> tuple[int, int]:
        rates = self._nvml.pcie_rate(RECEIVED), self._nvml.pcie_rate(SENT)
        now = time.monotonic()
        elapsed, self._time = now - self._time, now
        received, sent = self._totals
        self._totals = received + rates[0] * elapsed, sent + rates[1] * elapsed
        return int(self._totals[0]), int(self._totals[1])
