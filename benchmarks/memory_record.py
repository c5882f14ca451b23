"""Puts together what is known of one prompt, and prints all of them as a table."""

from __future__ import annotations

import json
from pathlib import Path

from memory_cases import PHASES
from memory_log import findings, of_pack, summary
from memory_meter import Meter
from memory_server import Answer, Server

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
