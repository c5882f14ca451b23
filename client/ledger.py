"""The jobs of a run and its journal, from which `--resume` goes on."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SettingError

LONGEST_VALUE = 40

WAITING = "waiting"  # to be queued
QUEUED = "queued"  # the server has it
COLLECTING = "collecting"  # it ended, and its results are fetched
DONE = "done"
FAILED = "failed"
CANCELLED = "cancelled"
LOST = "lost"
OPEN = (WAITING, QUEUED, COLLECTING)
SUFFIX = ".submit.jsonl"
KEY_LETTERS = 16


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


@dataclass(frozen=True)
class JobRecord:
    """The last line about a job."""

    key: str
    prompt_id: str
    status: str
    seconds: float | None = None
    files: tuple[Path, ...] = ()
    texts: Mapping[str, list[str]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do; files may have been moved since."""
        return self.status == DONE and all(path.is_file() for path in self.files)


class Ledger:
    """The journal of one workflow in one output folder; a context manager.

    One JSON object a line, appended at once; the last line about a job holds. The line of a job is
    there before the server hears of it, so a run that is killed leaves no unknown job.

    Attributes:
        records: {job key: its last record} of earlier runs.
        client_id: of the last run, under which its jobs still report progress; None at first.

    Raises:
        SettingError: nothing can be written in the folder.
    """

    def __init__(self, folder: Path, stem: str) -> None:
        self.path = folder / f"{stem}{SUFFIX}"
        self._folder = folder
        self.client_id: str | None = None
        self.records: dict[str, JobRecord] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b", buffering=0)
            self._read()
        except OSError as error:
            raise SettingError(
                f"--output cannot be written ({error.strerror}): name another folder.", folder
            ) from error

    def _read(self) -> None:
        self._file.seek(0)
        data = self._file.read()
        for line in data.split(b"\n"):
            try:
                entry = json.loads(line)
                if entry["event"] == "run":
                    self.client_id = entry["client_id"]
                else:
                    self.records[entry["key"]] = self._record(entry)
            except (ValueError, KeyError, TypeError):
                continue  # a line that a killed run began
        self._torn = bool(data) and not data.endswith(b"\n")

    def _record(self, entry: Mapping[str, Any]) -> JobRecord:
        return JobRecord(
            entry["key"],
            entry["prompt_id"],
            entry["event"],
            entry.get("seconds"),
            tuple(self._folder / name for name in entry.get("files", ())),
            entry.get("texts", {}),
        )

    @property
    def unfinished(self) -> int:
        """How many jobs of earlier runs the server had when their run ended."""
        return sum(record.status == QUEUED for record in self.records.values())

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def run(self, client_id: str, server: str, workflow: str) -> None:
        """Begins a run."""
        self._write("run", client_id=client_id, server=server, workflow=workflow)

    def write(self, key: str, prompt_id: str, event: str, **facts: Any) -> None:
        """Notes what became of a job.

        Args:
            event: "queued" before the server hears of it, then "done", "failed", ...
            facts: `files` are names in the output folder.

        Raises:
            OSError: the disk is full; the next line is whole again.
        """
        self._write(event, key=key, prompt_id=prompt_id, **facts)

    def _write(self, event: str, **facts: Any) -> None:
        line = {"event": event, "time": round(time.time(), 3), **facts}
        data = b"\n" * self._torn + json.dumps(line).encode() + b"\n"
        self._torn = True
        if self._file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn = False


def keys_of(graphs: Iterable[Mapping[str, Any]]) -> list[str]:
    """A key for each job: the hash of what its graph computes, whatever its nodes are titled.

    The second job with the same graph, and each further one, gets a number.
    """
    seen: dict[str, int] = {}
    keys = []
    for graph in graphs:
        bare = {node: (content["class_type"], content["inputs"]) for node, content in graph.items()}
        text = json.dumps(bare, sort_keys=True, separators=(",", ":"))
        key = hashlib.sha256(text.encode()).hexdigest()[:KEY_LETTERS]
        seen[key] = seen.get(key, 0) + 1
        keys.append(key if seen[key] == 1 else f"{key}-{seen[key]}")
    return keys
