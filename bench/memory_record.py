"""Which lines of ComfyUI's log report weights that left the card, tiles, or a lack of memory."""

from __future__ import annotations

import json
import re
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from .memory_cases import PHASES
from .memory_nvml import Nvml, NvmlError, PcieCounters, PcieRates
from .memory_server import Answer, Server

# First that matches. A number in a group has to be above zero in one of the groups.
RULES = [
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
]
_RULES = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in RULES]
# "[2026-01-01 12:00:00,000] [INFO] ", as ComfyUI writes it into a file
_PREFIX = re.compile(r"^\[[\d\- :,]+\] \[\w+\] ")
LONGEST = 300
# How its messages begin.
PACK = "Qwen-Image L40S"


def kind_of(line: str) -> str | None:
    """What a line reports; None for one that reports nothing of this."""
    for kind, pattern in _RULES:
        match = pattern.search(line)
        if match and (not match.groups() or any(float(number) > 0 for number in match.groups())):
            return kind
    return None


def findings(lines: Iterable[str]) -> list[dict]:
    """What is reported, once each: {"kind", "line", "times"}."""
    found: Counter[tuple[str, str]] = Counter()
    for line in lines:
        text = _PREFIX.sub("", line.strip())
        kind = kind_of(text)
        if kind:
            found[kind, text[:LONGEST]] += 1
    return [{"kind": kind, "line": line, "times": times} for (kind, line), times in found.items()]


def of_pack(lines: Iterable[str]) -> list[str]:
    """What the pack itself reported, each message with its further lines."""
    messages: list[list[str]] = []
    for line in lines:
        start = _PREFIX.match(line)
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


# Readings of a card in threads of their own, and what they tell of a span of time.
#
# Times are `time.monotonic()`, which on Linux is the same clock in all processes.

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


# Puts together what is known of one prompt, and prints all of them as a table.

GIB = 2**30
LOG_TAIL = 40


def record_of(
    server: Server,
    answer: Answer,
    kinds: dict[str, str],
    meter: Meter | None,
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
    probed = server.get("/l40s_probe")
    nodes = probed["nodes"]
    for node in nodes:
        node["class"] = kinds.get(node["node"], "")
        # The last one is closed by the question.
        start, end = node.pop("start"), min(node.pop("end"), answer.end)
        node["seconds"] = end - start
        node |= of_card(meter, start, end, baseline)
    record = {
        "status": answer.status,
        "error": answer.error,
        "seconds": answer.end - answer.start,
        **of_card(meter, answer.start, answer.end, baseline),
        **highest(nodes),
        "phases": phases_of(nodes),
        "models": probed["models"],
        "host_gib": server.host_gib(),
        "findings": findings(log),
        "reports": answer.texts(),
        "pack_log": of_pack(log),
        "nodes": nodes,
    }
    if answer.status != "success":
        record["log_tail"] = log[-LOG_TAIL:]
    return record


def of_card(meter: Meter | None, start: float, end: float, baseline: int) -> dict:
    """Peak over the baseline in GiB, and the GB that the card received and sent."""
    if meter is None:
        return {"peak_gib": None, "received_gb": None, "sent_gb": None}
    moved = meter.moved(start, end)
    received, sent = (None, None) if moved is None else (count / 1e9 for count in moved)
    peak = (meter.peak(start, end) - baseline) / GIB
    return {"peak_gib": peak, "received_gb": received, "sent_gb": sent}


def highest(nodes: list[dict]) -> dict:
    """The highest of what torch and dynamic VRAM had in any node."""
    return {
        name: max((node[name] for node in nodes if node.get(name) is not None), default=None)
        for name in ("max_allocated_gib", "max_reserved_gib", "aimdo_gib")
    }


def phases_of(nodes: list[dict]) -> dict[str, dict]:
    """{phase: its time, peaks and what moved}"""
    grouped: dict[str, list[dict]] = {}
    for node in nodes:
        grouped.setdefault(PHASES.get(node["class"], "other"), []).append(node)
    return {
        phase: {
            "seconds": sum(node["seconds"] for node in members),
            "peak_gib": _over(max, members, "peak_gib"),
            "received_gb": _over(sum, members, "received_gb"),
            **highest(members),
        }
        for phase, members in grouped.items()
    }


def _over(function, members: list[dict], name: str) -> float | None:
    values = [member[name] for member in members if member[name] is not None]
    return function(values) if values else None


class Results:
    """Everything that was found, written to a file after each addition."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.conditions: dict = {}
        self.records: list[dict] = []

    def add(self, record: dict) -> None:
        self.records.append(record)
        self.save()

    def save(self) -> None:
        if self._path is not None:
            found = {"conditions": self.conditions, "records": self.records}
            part = self._path.with_name(f".{self._path.name}.part")
            part.write_text(json.dumps(rounded(found), indent=1) + "\n", encoding="utf-8")
            part.replace(self._path)

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
    kept = ("max_allocated_gib", "max_reserved_gib", "aimdo_gib")
    numbers += [shown(record.get(name)) for name in kept]
    numbers.append(shown(record.get("received_gb"), 1))
    return [*texts, *numbers, on_card(record), summary(record.get("findings", []))]


def on_card(record: dict) -> str:
    """How much of the largest loaded model ComfyUI says is on the card in the end."""
    models = record.get("models") or []
    if not models:
        return "-"
    largest = max(models, key=lambda model: model["gib"])
    return f"{largest['loaded_gib']:.1f}/{largest['gib']:.1f}"


def rounded(value):
    """The same with every float at four decimals."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list) else value
