"""What is known of one prompt in a server: the card's memory, the log, the probe; and the table."""

from __future__ import annotations

import json
import re
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cli.output import write_whole
from ..errors import UnavailableError
from ..spec.formats import GIB
from .server import ComfyUIServer

MEMORY_SECONDS, PCIE_SECONDS = 0.005, 0.02
LONGEST, LOG_TAIL = 300, 40
# How the pack's own messages begin.
PACK = "Qwen-Image L40S"
# Which lines of ComfyUI's log report weights that left the card, tiles, or a lack of memory: the
# first that matches. A number in a group has to be above zero in one of the groups.
RULES = [
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("tiled", r"retrying with tiled|\btiled VAE\b"),
        ("out of memory", r"out of memory|OutOfMemory|Got an OOM|VRAM Allocation failed"),
        ("partly loaded", r"\bloaded partially"),
        ("partly unloaded", r"Unloaded partially: ([\d.]+) MB freed"),
        ("unloaded", r"(\d+) models unloaded"),
        ("unloaded", r"Unloading \w+"),
        ("freed on demand", r"AIMDO free: .*vbar_mb=([\d.]+) backups_mb=([\d.]+)"),
        ("not pinned", r"\bPin error"),
        ("leak", r"memory leak"),
        ("lowvram", r"\blowvram patches: (\d+)"),
        ("offloaded", r"([\d.]+) MB offloaded"),
        ("error", r"Exception during processing"),
    )
]
# "[2026-01-01 12:00:00,000] [INFO] ", as ComfyUI writes it into a file
PREFIX = re.compile(r"^\[[\d\- :,]+\] \[\w+\] ")
# Which of a prompt's phases a node belongs to; what is missing here is "other".
PHASES = {
    **dict.fromkeys(("UNETLoader", "CLIPLoader", "VAELoader"), "load"),
    **dict.fromkeys(("QwenL40S_LoadModel", "QwenL40S_LoadTextEncoder", "QwenL40S_LoadVAE"), "load"),
    "CLIPTextEncode": "encode",
    "KSampler": "sample",
    "VAEDecode": "decode",
    "QwenL40S_VAEDecode": "decode",
    **dict.fromkeys(("PreviewImage", "SaveImage", "QwenL40S_SaveImage"), "save"),
}
HIGHEST = ("max_allocated_gib", "max_reserved_gib", "aimdo_gib")


def kind_of(line: str) -> str | None:
    """What a line of the log reports; None where it reports nothing of this."""
    for kind, pattern in RULES:
        match = pattern.search(line)
        if match and (not match.groups() or any(float(number) > 0 for number in match.groups())):
            return kind
    return None


def findings(lines: Iterable[str]) -> list[dict]:
    """What is reported, once each: {"kind", "line", "times"}."""
    found: Counter[tuple[str, str]] = Counter()
    for line in lines:
        text = PREFIX.sub("", line.strip())
        if kind := kind_of(text):
            found[kind, text[:LONGEST]] += 1
    return [{"kind": kind, "line": line, "times": times} for (kind, line), times in found.items()]


def pack_messages(lines: Iterable[str]) -> list[str]:
    """What the pack itself logged, each message with its further lines."""
    messages: list[list[str]] = []
    for line in lines:
        start = PREFIX.match(line)
        if start:
            messages.append([line[start.end() :]])
        elif messages:
            messages[-1].append(line)
    return ["\n".join(message) for message in messages if message[0].startswith(PACK)]


def summary(found: Iterable[dict]) -> str:
    """The kinds and how often, for a table; "-" for none."""
    times: Counter[str] = Counter()
    for finding in found:
        times[finding["kind"]] += finding["times"]
    return ", ".join(f"{kind} x{number}" for kind, number in times.items()) or "-"


class Series(threading.Thread):
    """Reads a value again and again in a thread, and keeps each change with its time.

    Times are `time.monotonic()`, which on Linux is the same clock in all processes.

    Args:
        read: gives the value.
        seconds: between two readings.
    """

    def __init__(self, read: Callable[[], Any], seconds: float) -> None:
        super().__init__(daemon=True)
        self._read, self._seconds = read, seconds
        self._values, self._times = [read()], [time.monotonic()]
        self.longest_gap = 0.0
        self.failure: str | None = None
        self.start()

    def run(self) -> None:
        last = self._times[0]
        while True:
            time.sleep(self._seconds)
            try:
                value = self._read()
            except Exception as error:
                self.failure = f"{type(error).__name__}: {error}"
                return
            now = time.monotonic()
            self.longest_gap, last = max(self.longest_gap, now - last), now
            if value != self._values[-1]:
                # In this order: whoever finds a time finds its value.
                self._values.append(value)
                self._times.append(now)

    def at(self, moment: float) -> Any:
        """The last value that was read by then."""
        return self._values[max(0, bisect_right(self._times, moment) - 1)]

    def within(self, start: float, end: float) -> list:
        """The value at the start and all that followed until the end."""
        first = max(0, bisect_right(self._times, start) - 1)
        return self._values[first : max(first + 1, bisect_right(self._times, end))]


class DriverCard:
    """What NVIDIA's driver says of the card that torch uses, or else of the first.

    Raises:
        UnavailableError: nvidia-ml-py is not installed, or there is no driver.
    """

    def __init__(self) -> None:
        try:
            import pynvml
        except ModuleNotFoundError as error:
            raise UnavailableError(
                "this measures through nvidia-ml-py, not installed here: run "
                "`pip install nvidia-ml-py`."
            ) from error
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._card = pynvml.nvmlDeviceGetHandleByIndex(0)
        except pynvml.NVMLError as error:
            raise UnavailableError(f"the driver does not answer: {error}.") from error
        self._counts, self._totals = None, [0, 0]

    def driver(self) -> str:
        """The driver's version."""
        return self._nvml.nvmlSystemGetDriverVersion()

    def used(self) -> int:
        """The bytes in use on the card, by all processes and the driver."""
        return self._nvml.nvmlDeviceGetMemoryInfo(self._card).used

    def moved(self) -> tuple[int, int]:
        """Bytes received and sent over PCIe since the first call; drivers since 550.

        It has to be called more often than the counters wrap: one of 32 bits takes 4 GiB, which
        PCIe 5 moves in 70 ms.
        """
        fields = (
            self._nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES,
            self._nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES,
        )
        values = self._nvml.nvmlDeviceGetFieldValues(self._card, fields)
        for value in values:
            if value.nvmlReturn:
                raise self._nvml.NVMLError(value.nvmlReturn)
        counts = [value.value.ullVal for value in values]
        for index, before in enumerate(self._counts or counts):
            self._totals[index] += count_since(before, counts[index])
        self._counts = counts
        return self._totals[0], self._totals[1]


def count_since(before: int, after: int) -> int:
    """What a counter counted that may have wrapped once, at 32 bits if it never was above."""
    return (after - before) % 2 ** (32 if max(before, after) < 2**32 else 64)


class CardMeter:
    """Memory in use and bytes over PCIe of the card, read in threads."""

    def __init__(self) -> None:
        card = DriverCard()
        self.about = {"memory": "driver", "driver": card.driver(), "pcie": "driver's byte counters"}
        self._used, self._moved = Series(card.used, MEMORY_SECONDS), None
        try:
            self._moved = Series(card.moved, PCIE_SECONDS)
        except Exception as error:  # older drivers and virtual cards do not count
            self.about |= {"pcie": None, "pcie_missing": str(error)}

    def used(self) -> int:
        """The bytes in use now."""
        return self._used.at(time.monotonic())

    def between(self, start: float, end: float, baseline: int) -> dict[str, float | None]:
        """Peak over the baseline in GiB, and the GB that the card received and sent."""
        peak = (max(self._used.within(start, end)) - baseline) / GIB
        received = sent = None
        if self._moved is not None:
            ends = zip(self._moved.at(start), self._moved.at(end), strict=True)
            received, sent = ((after - before) / 1e9 for before, after in ends)
        return {"peak_gib": peak, "received_gb": received, "sent_gb": sent}

    def settle(self) -> None:
        """Waits until everything that has happened is read."""
        time.sleep(3 * PCIE_SECONDS)

    def health(self) -> dict:
        """The longest time between two readings, and what ended them early."""
        return {
            name: {"longest_gap_s": series.longest_gap, "failure": series.failure}
            for name, series in (("memory", self._used), ("pcie", self._moved))
            if series is not None
        }


@dataclass(frozen=True)
class ImageRun:
    """What came of one prompt.

    Args:
        start, end: `time.monotonic()` of the post and of the history entry.
        entry: of /history.
    """

    start: float
    end: float
    entry: dict

    @property
    def status(self) -> str:
        return self.entry["status"]["status_str"]

    @property
    def error(self) -> str | None:
        """The node and the message of what failed."""
        for kind, data in self.entry["status"]["messages"]:
            if kind == "execution_error":
                return f"{data['node_type']}: {data['exception_message'].strip()}"
        return None

    def texts(self) -> dict[str, str]:
        """{node: the text that it shows}"""
        outputs = self.entry.get("outputs", {}).items()
        return {
            node: "\n".join(map(str, shown["text"])) for node, shown in outputs if "text" in shown
        }


def record_of(
    server: ComfyUIServer,
    run: ImageRun,
    kinds: dict[str, str],
    meter: CardMeter | None,
    baseline: int,
    log: list[str],
) -> dict:
    """One prompt.

    Args:
        kinds: {node: class} of its graph.
        meter: None where there is no card.
        baseline: bytes in use on the card before the server began.
        log: the lines that it wrote.
    """

    def of_card(start: float, end: float) -> dict:
        if meter is None:
            return {"peak_gib": None, "received_gb": None, "sent_gb": None}
        return meter.between(start, end, baseline)

    probed = server.get_json("/l40s_probe")
    nodes = probed["nodes"]
    for node in nodes:
        node["class"] = kinds.get(node["node"], "")
        # The question itself closes the last one.
        start, end = node.pop("start"), min(node.pop("end"), run.end)
        node |= {"seconds": end - start, **of_card(start, end)}
    record = {
        "status": run.status,
        "error": run.error,
        "seconds": run.end - run.start,
        **of_card(run.start, run.end),
        **{name: _over(max, nodes, name) for name in HIGHEST},
        "phases": phases_of(nodes),
        "models": probed["models"],
        "host_gib": host_gib(server.process.pid),
        "findings": findings(log),
        "reports": run.texts(),
        "pack_log": pack_messages(log),
        "nodes": nodes,
    }
    if run.status != "success":
        record["log_tail"] = log[-LOG_TAIL:]
    return record


def phases_of(nodes: list[dict]) -> dict[str, dict]:
    """{phase: its time, peaks and what moved}"""
    grouped: dict[str, list[dict]] = {}
    for node in nodes:
        grouped.setdefault(PHASES.get(node["class"], "other"), []).append(node)
    return {
        phase: {
            "seconds": sum(node["seconds"] for node in members),
            "received_gb": _over(sum, members, "received_gb"),
            **{name: _over(max, members, name) for name in ("peak_gib", *HIGHEST)},
        }
        for phase, members in grouped.items()
    }


def _over(function: Callable, members: list[dict], name: str) -> float | None:
    values = [member[name] for member in members if member.get(name) is not None]
    return function(values) if values else None


def host_gib(pid: int) -> dict[str, float]:
    """What a process holds of the machine's memory, in GiB, by kind; empty off Linux."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    kinds = ("RssAnon", "RssFile", "RssShmem", "VmPin", "VmLck")
    pairs = (line.split(":") for line in lines)
    return {name: int(rest.split()[0]) / 2**20 for name, rest in pairs if name in kinds}


class MemoryResults:
    """Everything that was found, written to a file after each addition."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.conditions: dict = {}
        self.records: list[dict] = []

    def add(self, record: dict) -> None:
        self.records.append(record)
        if self._path is not None:
            found = rounded({"conditions": self.conditions, "records": self.records})
            write_whole(self._path, json.dumps(found, indent=1).encode() + b"\n")

    def table(self) -> str:
        """A line for each prompt; GiB are over what was in use before the server began."""
        head = ["mode", "case", "size", "image", "status", "s", "peak", "sample", "decode"]
        head += ["torch", "reserved", "aimdo", "GB in", "on card", "log"]
        rows = [head, *(_row(record) for record in self.records)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


def _row(record: dict) -> list[str]:
    def shown(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    phases = record.get("phases", {})
    texts = [str(record[name]) for name in ("mode", "case", "size", "image", "status")]
    numbers = [shown(record.get("seconds"), 1), shown(record.get("peak_gib"))]
    numbers += [shown(phases.get(name, {}).get("peak_gib")) for name in ("sample", "decode")]
    numbers += [shown(record.get(name)) for name in HIGHEST]
    numbers.append(shown(record.get("received_gb"), 1))
    models = record.get("models") or []
    largest = max(models, key=lambda model: model["gib"], default=None)
    on_card = f"{largest['loaded_gib']:.1f}/{largest['gib']:.1f}" if largest else "-"
    return [*texts, *numbers, on_card, summary(record.get("findings", []))]


def rounded(value: Any) -> Any:
    """The same with every float at four decimals."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list) else value
