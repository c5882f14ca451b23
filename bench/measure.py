"""Times, kernels and memory of a call on a card or, to try things out, on a CPU; and the writer of
the rows that they make.
"""

from __future__ import annotations

import json
import threading
import time
import timeit
import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..cli.output import write_whole
from ..errors import UnavailableError
from ..spec.formats import GIB

Fields = dict[str, Any]
# How long triton.testing.do_bench times a call at least, in milliseconds.
LEAST_MS = 25
READ_SECONDS = 0.005
KERNELS_SHOWN, NAME_WIDTH = 20, 88
SIGNIFICANT = 5
# {field that names a row: its width}
COLUMNS = {"name": 34, "size": 11}


def times_ms(call: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Times a call that has been warmed up, by `triton.testing.do_bench` on a card.

    do_bench empties the card's L2 cache before each call and times from event to event; of short
    calls it takes more than `repeats`. Where Triton is missing, and on a CPU, it is the time until
    the device has finished.
    """
    from torch.utils.benchmark import timer  # which waits for the card

    def by_clock(count: int) -> list[float]:
        return [1e3 * s for s in timeit.repeat(call, timer=timer, repeat=count, number=1)]

    if device.type != "cuda" or find_spec("triton") is None:
        return by_clock(repeats)
    from triton.testing import do_bench

    (once,) = by_clock(1)
    whole = max(LEAST_MS, (repeats + 0.5) * once)
    return do_bench(call, warmup=0, rep=whole, return_mode="all")


def time_fields(samples: Sequence[float]) -> Fields:
    """Median and spread of milliseconds, with the samples."""
    parts = torch.tensor((0.5, 0.1, 0.9), dtype=torch.float64)
    found = torch.tensor(samples, dtype=torch.float64).quantile(parts).tolist()
    return dict(zip(("ms", "ms_p10", "ms_p90"), found, strict=True)) | {"samples_ms": list(samples)}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernel_fields(call: Callable[[], Any], device: torch.device, table: bool) -> Fields:
    """Runs a call under torch's profiler: the milliseconds of all its kernels.

    Args:
        table: Whether a table of what took longest is wanted, too; on a CPU, of torch's operators.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_card = device.type == "cuda"
    if not (on_card or table):
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about cycles, of which there is one
        with profile(activities=[ProfilerActivity.CUDA if on_card else ProfilerActivity.CPU]) as of:
            call()
            synchronize(device)
    events = of.key_averages()
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    # A driver that lets nobody look at its counters shows no kernels.
    total = sum(event.self_device_time_total for event in kernels) / 1e3
    fields: Fields = {"kernel_ms": total or None}
    if table:
        by = "self_device_time_total" if on_card else "self_cpu_time_total"
        fields["kernels"] = events.table(
            sort_by=by, row_limit=KERNELS_SHOWN, max_name_column_width=NAME_WIDTH
        )
    return fields


def reset_peaks(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """The most that tensors held since `reset_peaks`; None on a CPU, where torch does not count."""
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None


def allocated_gib(device: torch.device) -> float:
    return torch.cuda.memory_allocated(device) / GIB if device.type == "cuda" else 0.0


class NvmlCard:
    """What NVIDIA's driver says of the first card, of all processes together.

    Raises:
        UnavailableError: nvidia-ml-py is not installed, or there is no driver.
    """

    def __init__(self) -> None:
        try:
            import pynvml

            self._nvml = pynvml
            pynvml.nvmlInit()
        except ModuleNotFoundError as error:
            raise UnavailableError(
                "this measures through nvidia-ml-py, not installed here: run "
                "`pip install nvidia-ml-py`."
            ) from error
        except pynvml.NVMLError as error:
            raise UnavailableError(f"the driver does not answer: {error}.") from error
        self._card = pynvml.nvmlDeviceGetHandleByIndex(0)
        self._count: int | None = None
        self._received = 0

    def used(self) -> int:
        return self._nvml.nvmlDeviceGetMemoryInfo(self._card).used

    def received(self) -> int | None:
        """Bytes that came over PCIe since the first call; None of drivers older than 550.

        It has to be called more often than the counter wraps: one of 32 bits takes 4 GiB, which
        PCIe 5 moves in 70 ms.
        """
        field = self._nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES
        (value,) = self._nvml.nvmlDeviceGetFieldValues(self._card, [field])
        if value.nvmlReturn:
            return None
        count = value.value.ullVal
        before = count if self._count is None else self._count
        self._received += (count - before) % 2 ** (32 if max(before, count) < 2**32 else 64)
        self._count = count
        return self._received


class CardReader(threading.Thread):
    """Reads a card's memory in use and bytes over PCIe every 5 ms, with `time.monotonic()`."""

    def __init__(self, card: NvmlCard) -> None:
        super().__init__(daemon=True)
        self.card, self._failure = card, ""
        self._times = [time.monotonic()]
        self._values = [(card.used(), card.received())]
        self.start()

    def run(self) -> None:
        while not self._failure:
            time.sleep(READ_SECONDS)
            try:
                # In this order: whoever finds a time finds its value.
                self._values.append((self.card.used(), self.card.received()))
                self._times.append(time.monotonic())
            except Exception as error:  # what NVML raises once the driver is gone
                self._failure = str(error)

    def between(self, start: float, end: float, baseline: int) -> dict[str, float | None]:
        """The peak over a baseline in bytes, and what the card received.

        Raises:
            UnavailableError: the driver stopped answering.
        """
        time.sleep(2 * READ_SECONDS)
        if self._failure:
            raise UnavailableError(f"the driver stopped answering: {self._failure}.")
        first, last = (max(0, bisect_right(self._times, at) - 1) for at in (start, end))
        values = self._values[first : last + 1]
        (_, before), (_, after) = values[0], values[-1]
        received = None if after is None or before is None else (after - before) / 1e9
        peak = max(used for used, _ in values) - baseline
        return {"peak_gib": peak / GIB, "received_gb": received}


class RowWriter:
    """Prints each row as it comes, and keeps all in a JSON file, if any, that is always whole.

    Args:
        key: Of the rows in the file.
        rows: Measured before.
    """

    def __init__(
        self, conditions: Fields, path: Path | None, key: str = "rows", rows: Sequence[Fields] = ()
    ) -> None:
        self.conditions, self.rows = conditions, list(rows)
        self._path, self._key = path, key

    def add(self, row: Fields) -> None:
        self.rows.append(row)
        print(line(row), flush=True)
        if self._path is not None:
            write_whole(self._path, json.dumps(self.results(), indent=1).encode() + b"\n")

    def results(self) -> Fields:
        """The file's contents, floats with five digits."""
        return rounded({"conditions": self.conditions, self._key: self.rows})


def line(row: Fields) -> str:
    """A row's name and figures; those of one kind of row stand in the same columns."""
    shown = [f"{row[name]:{width}}" for name, width in COLUMNS.items() if name in row]
    texts = []
    for name, value in row.items():
        if isinstance(value, str) and "\n" in value:
            texts += ["", f"{name}:", *value.splitlines()]
        elif name in COLUMNS or value is None or isinstance(value, (list, dict)):
            continue
        elif isinstance(value, float):
            shown.append(f"{name} {value:<8.4g}")
        else:
            shown.append(f"{name} {value}")
    return "\n  ".join(["  ".join(shown).rstrip(), *texts])


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT}g}")
    if isinstance(value, dict):
        return {name: rounded(entry) for name, entry in value.items()}
    return [rounded(entry) for entry in value] if isinstance(value, (list, tuple)) else value
