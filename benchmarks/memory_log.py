"""Which lines of ComfyUI's log report weights that left the card, tiles, or a lack of memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

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
