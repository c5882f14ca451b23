"""Records a run in a journal, from which a later run goes on: a JSON object a line, one writer."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import stat
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import QwenL40SError, SettingError
from ..files import lock, private
from .scheduler import DONE, NOTHING

SUFFIX = ".submit.jsonl"
VERSION = 2
LONGEST_RUN = 1e9  # seconds
LONGEST_LINE = 2**24  # bytes; what follows is no line that a run wrote


class DiskError(QwenL40SError):
    """The output folder takes no more; what the servers have stays there for a later run."""


@dataclass(slots=True)
class Attempt:
    """A job that was posted to a process (`Feeder.boot`) of a server."""

    prompt_id: str
    server: str = ""
    boot: str = ""
    # {path: `file_state`} of the models that it loads and this machine has.
    local: Mapping[str, Any] = field(default_factory=lambda: NOTHING)


@dataclass(slots=True)
class Record:
    status: str = ""
    prompt_id: str = ""
    server: str = ""
    seconds: float | None = None
    files: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    kept: bool = False  # whether the server may have results that could not be fetched
    texts: Mapping[str, list[str]] = field(default_factory=lambda: NOTHING)
    local: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    open: Sequence[Attempt] = ()  # attempts that brought nothing yet


class Journal:
    """The journal of one workflow in one output folder; a context manager. A job's line is there
    before a server hears of it, and its files' line before they have names. So a killed run leaves
    no unknown job and no result twice. Raises SettingError where the folder or the journal cannot
    be used, or there is none to `resume`.
    """

    def __init__(self, folder: Path, stem: str, *, resume: bool = False) -> None:
        self.path = folder / f"{stem}{SUFFIX}"
        # {job key: what is known of it}, from earlier runs and this one.
        self.records: dict[str, Record] = {}
        if resume and not self.path.is_file():
            raise SettingError(
                "there is no run to resume here: check --output and the workflow's name, or leave "
                "out --resume.",
                self.path,
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b", buffering=0, opener=private)  # noqa: SIM115
        except OSError as error:
            raise SettingError(
                f"--output cannot be written ({error.strerror}): name another folder.", folder
            ) from error
        self._part = f".{stem}."
        self.unsynced = False
        self._version = VERSION
        self._loaded: dict[tuple[str, str], Any] = {}  # {(server, path): state}
        try:
            self._lock()
            self._read()
            # Left by a killed run; `*` would take those of "name.v2" for those of "name".
            for left in folder.glob(f"{glob.escape(self._part)}{'[0-9a-f]' * 32}.part"):
                left.unlink(missing_ok=True)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.sync()
        self._file.close()

    def sync(self) -> None:
        """Makes lines, and the names of files, outlast a power cut; in whatever thread."""
        self.unsynced = False
        with contextlib.suppress(OSError):  # what the disk cannot do; a write says what is wrong
            os.fsync(self._file.fileno())
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def part(self) -> Path:
        """Names a file in the output folder that is not complete yet."""
        return self.path.parent / f"{self._part}{uuid.uuid4().hex}.part"

    def finished(self, key: str) -> Record | None:
        """Returns the record of a job that is done and whose files are all here, and whole."""
        record = self.records.get(key)
        if record is None or record.status != DONE:
            return None
        found = [file_state(os.path.join(self.path.parent, name)) for name in record.files]
        whole = zip(found, record.sizes, strict=True)
        there = all(state and state[0] == size for state, size in whole)
        return record if there else None

    def attempts(self, key: str) -> list[Attempt]:
        """Says where a server may still have the job, or its results that are not here."""
        record = self.records.get(key, Record())
        left = record.kept or record.status == DONE
        return [*record.open, *[Attempt(record.prompt_id, record.server)] * left]

    def changed(self, key: str) -> set[str]:
        """Returns the paths of local files that were replaced since the job was posted."""
        record = self.records.get(key, Record())
        posted = [record.local, *(attempt.local for attempt in record.open)]
        return {
            path
            for local in posted
            for path, state in local.items()
            if file_state(path) not in (None, state)  # None: this is another machine
        }

    def kept(self, server: str, local: Mapping[str, Any]) -> set[str]:
        """Returns those of the files of which the server, by its last job, has another state."""
        loaded = self._loaded
        return {path for path in local if loaded.get((server, path)) not in (None, local[path])}

    def forget(self, key: str) -> Sequence[Attempt]:
        """Notes that a job runs again; returns the attempts that servers may still have."""
        record = self.records.get(key)
        if record is None:
            return []
        self._write("again", key=key)
        return record.open

    def begin(self, workflow: str, servers: list[str]) -> None:
        self._write("run", version=VERSION, workflow=workflow, servers=servers)

    def queued(self, key: str, attempt: Attempt) -> None:
        """Notes a job before its server hears of it; after a DiskError the next line is whole."""
        self._write(
            "queued",
            key=key,
            prompt_id=attempt.prompt_id,
            server=attempt.server,
            boot=attempt.boot,
            **({"local": attempt.local} if attempt.local else {}),
        )

    def ended(self, event: str, key: str, prompt_id: str, **facts: Any) -> None:
        """Notes what became of an attempt: "done", "failed", ..., "late" for a dropped result."""
        facts = {name: value for name, value in facts.items() if value}
        self._write(event, key=key, prompt_id=prompt_id, **facts)

    def _lock(self) -> None:
        try:
            free = lock(self._file)
        except OSError as error:
            raise SettingError(
                f"this folder's disk does not lock files ({error.strerror}), as some network "
                "disks: name an --output on a local disk.",
                self.path,
            ) from error
        if not free:
            raise SettingError(
                "another run writes this journal: wait for it, or name another --output.",
                self.path,
            )

    def _read(self) -> None:
        last = b""
        with self.path.open("rb") as lines:
            while line := lines.readline(LONGEST_LINE):
                last = line
                if len(line) == LONGEST_LINE:
                    continue
                try:
                    self._take(json.loads(line))
                except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                    continue  # a line that a killed run began
        self._torn = bool(last) and not last.endswith(b"\n")
        if self._version > VERSION:
            raise SettingError(
                "a newer version of Qwen-Image Accelerator wrote this journal: update this one, or "
                "name another --output.",
                self.path,
            )

    def _take(self, entry: Mapping[str, Any]) -> None:
        if entry["event"] == "run":
            self._version = max(self._version, entry["version"])
        elif entry["event"] == "again":
            self.records.pop(entry["key"], None)
        else:
            self._note(self.records.setdefault(entry["key"], Record()), entry["event"], entry)

    def _note(self, record: Record, event: str, entry: Mapping[str, Any]) -> None:
        prompt_id = str(entry["prompt_id"])
        if event == "queued":
            server, boot = (sys.intern(str(entry[name])) for name in ("server", "boot"))
            local = dict(entry.get("local", {})) or NOTHING
            record.open = (*record.open, Attempt(prompt_id, server, boot, local))
            for path, state in local.items():
                self._loaded[server, path] = state
        else:
            ended = [each for each in record.open if each.prompt_id == prompt_id]
            record.open = tuple(each for each in record.open if each.prompt_id != prompt_id)
            if event == "late" or (record.status == DONE and event != DONE):
                return
            files, sizes = tuple(entry.get("files", ())), tuple(entry.get("sizes", ()))
            if any(os.path.basename(name) != name for name in files) or len(sizes) != len(files):
                record.status = "damaged"  # a line that no run wrote
                return
            record.local = ended[-1].local if ended else record.local
            record.prompt_id = prompt_id
            record.server = sys.intern(str(entry["server"]))
            seconds, record.kept = entry.get("seconds"), bool(entry.get("kept"))
            known = isinstance(seconds, int | float) and abs(seconds) < LONGEST_RUN
            record.seconds = seconds if known else None
            texts = entry.get("texts", NOTHING)
            record.texts = {name: [*map(str, x)] for name, x in texts.items()} or NOTHING
            record.files, record.sizes = files, sizes
        record.status = event

    def _write(self, event: str, **facts: Any) -> None:
        line = {"event": event, "time": round(time.time(), 3), **facts}
        data = b"\n" * self._torn + json.dumps(line, separators=(",", ":")).encode() + b"\n"
        self._torn = True
        try:
            if self._file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise DiskError(
                f"the journal cannot be written ({error.strerror}): free disk space, then "
                f"continue with --resume ({self.path})."
            ) from error
        self._torn = False
        self.unsynced = True
        self._take(line)


def file_state(path: Path | str) -> list[int] | None:
    """Returns size in bytes and time of change in ns; None where there is no file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # ValueError: a zero byte in the name
        return None
    return [found.st_size, found.st_mtime_ns] if stat.S_ISREG(found.st_mode) else None
