"""What a fleet's servers do now, by servers.json and their own answers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from .state import READY, ServerState, get_json

ASK_SECONDS = 5.0
HOUR = 3600.0
# Of the newest prompts: each comes with its graph, some 10 KB, and ComfyUI answers nobody else
# while it writes them.
HISTORY = 100


@dataclass
class ServerStatus:
    """One row.

    Attributes:
        job: id of the prompt that runs; empty when none does.
        waiting: prompts in its queue.
        images_per_hour: of the last hour, or of the time since the oldest prompt in the history.
        failures: prompts that failed in that time.
    """

    server: ServerState
    job: str = ""
    waiting: int = 0
    images_per_hour: float = 0.0
    failures: int = 0

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        return found.pop("server") | found


def ask_all(servers: Sequence[ServerState]) -> list[ServerStatus]:
    """Asks all servers at once; one that does not answer has an empty row."""
    with ThreadPoolExecutor(max(1, min(32, len(servers)))) as pool:
        return list(pool.map(ask, servers))


def ask(server: ServerState) -> ServerStatus:
    """Asks one server."""
    status = ServerStatus(server)
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        queue = get_json(f"{server.url}/queue", ASK_SECONDS)
        status.job = next((item[1] for item in queue["queue_running"]), "")
        status.waiting = len(queue["queue_pending"])
        history = get_json(f"{server.url}/history?max_items={HISTORY}", ASK_SECONDS)
        status.images_per_hour, status.failures = rate(history, time.time())
    return status


def rate(history: dict[str, Any], now: float) -> tuple[float, int]:
    """Images an hour and failures of a ComfyUI's history.

    Args:
        now: seconds since 1970, by the server's clock.
    """
    first, images, failures = now, 0, 0
    for entry in history.values():
        messages = dict(entry["status"]["messages"])
        began = messages["execution_start"]["timestamp"] / 1000
        if began < now - HOUR:
            continue
        first = min(first, began)
        failures += entry["status"]["status_str"] != "success"
        images += sum(
            item.get("type") == "output"
            for output in entry["outputs"].values()
            for item in output.get("images", ())
        )
    return (images / max(now - first, 1.0) * HOUR if images else 0.0), failures


def table(rows: Sequence[ServerStatus]) -> str:
    """The rows in columns, and a line with their sum."""
    heads = ("server", "card", "state", "job", "waiting", "images/h", "failures")
    cells = [heads] + [
        (
            row.server.url,
            row.server.card,
            row.server.state,
            row.job[:8] or "-",
            str(row.waiting),
            f"{row.images_per_hour:.0f}",
            str(row.failures),
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    lines += [f"{row.server.url}: {row.server.error}" for row in rows if row.server.error]
    ready = sum(row.server.state == READY for row in rows)
    images = sum(row.images_per_hour for row in rows)
    lines.append(f"{ready} of {len(rows)} servers ready, {images:.0f} images an hour")
    return "\n".join(lines)
