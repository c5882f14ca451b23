"""One job of a run: a graph with its own settings, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LONGEST_VALUE = 40

WAITING = "waiting"  # to be queued
QUEUED = "queued"  # the server has it
COLLECTING = "collecting"  # it ended, and its results are fetched
DONE = "done"
FAILED = "failed"
CANCELLED = "cancelled"
LOST = "lost"
OPEN = (WAITING, QUEUED, COLLECTING)


@dataclass(eq=False)
class Job:
    """Changes as the run goes on.

    Attributes:
        number: from 1, in the order of the settings.
        key: the same for the same graph in a later run.
        settings: what --set chose, by key.
        label: for people, with the settings in which the jobs differ: "job 3 (seed=3)".
        prompt_id: the server's, once the job is there.
        seconds: that the server ran it.
        error: see `client/failure.py`; None unless it failed.
        breaks: `Watch.breaks` when the server was last known to have it.
        ran: whether it was seen running since it was queued.
        crashes: how often the server went away while it ran.
    """

    number: int
    key: str
    graph: Mapping[str, Any]
    settings: Mapping[str, Any]
    label: str
    prompt_id: str = ""
    status: str = WAITING
    seconds: float | None = None
    files: list[Path] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    breaks: int = 0
    ran: bool = False
    crashes: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "prompt_id": self.prompt_id or None,
            "settings": dict(self.settings),
            "status": self.status,
            "seconds": self.seconds,
            "files": [str(path) for path in self.files],
            "texts": self.texts,
            "error": self.error,
        }


def labels(chosen: Sequence[Mapping[str, Any]]) -> list[str]:
    """For jobs with these settings."""
    first = chosen[0] if chosen else {}
    differing = [key for key in first if any(job[key] != first[key] for job in chosen)]
    found = []
    for number, job in enumerate(chosen, start=1):
        facts = ", ".join(f"{key}={_short(job[key])}" for key in differing)
        found.append(f"job {number} ({facts})" if facts else f"job {number}")
    return found


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
