"""Measures times and kernels of a call and a GPU's memory by the driver, and writes rows."""

from __future__ import annotations

import json
import threading
import time
import timeit
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import timer  # which waits for the card

from ..errors import UnavailableError
from ..files import write_whole
from ..spec.formats import GIB
from ..verdict import first_line
from .rows import BenchSetup, Inputs

Fields = dict[str, Any]
One = Callable[[Any, int, bool], Fields]
# How long triton.testing.do_bench times a call at least, in milliseconds.
LEAST_MS = 25
# Every row of a model or an operation is measured once before any is measured again.
TURNS = 2
WARM_UP = 2
READ_SECONDS = 0.005
SIGNIFICANT = 5


def times_ms(call: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Calls twice, then times by `triton.testing.do_bench`, which empties the card's L2 cache
    before each call; without Triton, and on a CPU, until the device has finished.
    """

    def by_clock(count: int) -> list[float]:
        return [1e3 * s for s in timeit.repeat(call, timer=timer, repeat=count, number=1)]

    by_clock(WARM_UP)
    if device.type != "cuda" or find_spec("triton") is None:
        return by_clock(repeats)
    from triton.testing import do_bench

    (once,) = by_clock(1)
    whole = max(LEAST_MS, (repeats + 0.5) * once)
    return do_bench(call, warmup=0, rep=whole, return_mode="all")


def kernel_ms(call: Callable[[], Any], device: torch.device) -> float | None:
    """Returns what all kernels of a call take under torch's profiler; None where it sees none."""
    if device.type != "cuda":
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about cycles, of which there is one
        with profile(activities=[ProfilerActivity.CUDA]) as of:
            call()
            torch.cuda.synchronize(device)
    kernels = [event for event in of.key_averages() if event.device_type == DeviceType.CUDA]
    # A driver that lets nobody look at its counters shows no kernels.
    return sum(event.self_device_time_total for event in kernels) / 1e3 or None


def by_turns(
    things: Sequence[Any], inputs: Inputs, one: One, setup: BenchSetup
) -> Iterator[Fields]:
    """Yields rows of things that are measured alternately; what `one` raises is an "error"."""
    found: list[Fields] = [{"samples_ms": []} for _ in things]
    turns = min(TURNS, setup.repeats)
    for turn in range(turns):
        for fields, thing in zip(found, things, strict=True):
            if "error" in fields or "left_out" in fields:
                continue
            try:
                more = one(thing, (setup.repeats + turn) // turns, turn > 0)
            except Exception as error:  # hosts, kernels, compilers and torch raise anything
                if setup.debug:
                    traceback.print_exc()
                fields["error"] = f"{type(error).__name__}: {first_line(error)}"
                continue
            fields |= more | {"samples_ms": [*fields["samples_ms"], *more.get("samples_ms", ())]}
    for fields, thing in zip(found, things, strict=True):
        if "error" in fields:
            fields = {"error": fields["error"]}
        elif samples := fields["samples_ms"]:
            fields = {"ms": median(samples)} | fields
        yield {"name": thing.name, "size": inputs.size, "batch": inputs.batch} | fields


def used_bytes() -> Callable[[], int]:
    """Returns a call that asks the driver how much of the first card all processes use."""
    try:
        import pynvml
    except ModuleNotFoundError as error:
        raise UnavailableError(
            "nvidia-ml-py, which measures memory, is missing: run `pip install nvidia-ml-py`."
        ) from error
    pynvml.nvmlInit()  # not torch's function, which starts CUDA
    card = pynvml.nvmlDeviceGetHandleByIndex(0)
    return lambda: pynvml.nvmlDeviceGetMemoryInfo(card).used


class PeakReader(threading.Thread):
    """Reads every 5 ms how much of a card is in use, more than at the beginning."""

    def __init__(self, used: Callable[[], int]) -> None:
        super().__init__(daemon=True)
        self._used, self._baseline = used, used()
        self._seen = [self._baseline]
        self.start()

    def run(self) -> None:
        while True:
            time.sleep(READ_SECONDS)
            self._seen.append(self._used())

    def peak_gib(self) -> float:
        """Returns the peak over the baseline since this was asked last."""
        seen, self._seen = self._seen, [self._baseline]
        return (max(*seen, self._used()) - self._baseline) / GIB


class RowWriter:
    """Prints each row as it comes, and keeps all in a JSON file, if any, that is always whole."""

    def __init__(self, conditions: Fields, path: Path | None, key: str = "rows") -> None:
        self.conditions = conditions
        self.rows: list[Fields] = []
        self._path, self._key = path, key

    def add(self, row: Fields) -> None:
        self.rows.append(row)
        print(line(row), flush=True)
        if self._path is not None:
            write_whole(self._path, json.dumps(self.results(), indent=1).encode() + b"\n")

    def results(self) -> Fields:
        whole = json.dumps({"conditions": self.conditions, self._key: self.rows})
        return json.loads(whole, parse_float=lambda text: float(f"{float(text):.{SIGNIFICANT}g}"))


def line(row: Fields) -> str:
    """Formats a row's figures; its lists and texts of many lines are in the JSON alone."""
    shown = []
    for name, value in row.items():
        if isinstance(value, float):
            shown.append(f"{name} {value:<8.4g}")
        elif isinstance(value, (int, str)) and "\n" not in str(value):
            shown.append(f"{value:34}" if name == "name" else f"{name} {value}")
    return "  ".join(shown).rstrip()
