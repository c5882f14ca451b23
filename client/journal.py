"""What a run leaves in its output folder: the journal, from which a later one goes on, one JSON
object a line, one writer; and the results, fetched from a server, then given their names, once.
"""

from __future__ import annotations

import errno
import filecmp
import glob
import hashlib
import json
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import QwenL40SError, SettingError
from ..files import lock, name_file
from .scheduler import DONE
from .server import Server
from .workflow import title

SUFFIX = ".submit.jsonl"
# Version 1 had one server, and its name in the line "run" alone.
VERSION = 2
KEY_LETTERS = 16
ENDS = ("execution_success", "execution_error", "execution_interrupted")
# What a suffix of a server's file may be; another is left out.
FILE_SUFFIX = re.compile(r"\.[A-Za-z0-9]{1,8}")


class DiskError(QwenL40SError):
    """The output folder takes no more; what the servers have stays there for a later run."""


@dataclass(slots=True)
class Attempt:
    """A job that was posted to a server.

    Attributes:
        boot: which process of the server; see `feeder.Feeder.boot`.
        local: {path: `file_state`} of the models that it loads and this machine has.
    """

    prompt_id: str
    server: str = ""
    boot: str = ""
    local: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Record:
    """What the journal says of a job.

    Attributes:
        status: of the last line; "queued" while a server has it.
        local: of the attempt that ended.
        open: attempts that brought nothing yet.
    """

    status: str = ""
    prompt_id: str = ""
    server: str = ""
    seconds: float | None = None
    files: tuple[str, ...] = ()
    texts: Mapping[str, list[str]] = field(default_factory=dict)
    local: Mapping[str, Any] = field(default_factory=dict)
    open: list[Attempt] = field(default_factory=list)


class Journal:
    """The journal of one workflow in one output folder; a context manager.

    Lines are appended at once. The line of a job is there before a server hears of it, so a run
    that is killed leaves no unknown job.

    Args:
        resume: there has to be one from an earlier run.

    Attributes:
        records: {job key: what is known of it}, from earlier runs and this one.

    Raises:
        SettingError: nothing can be written in the folder, another run has the journal, a newer
            version wrote it, or there is none to resume.
    """

    def __init__(self, folder: Path, stem: str, *, resume: bool = False) -> None:
        self.path = folder / f"{stem}{SUFFIX}"
        self.records: dict[str, Record] = {}
        if resume and not self.path.is_file():
            raise SettingError(
                "there is no run to resume here: check --output and the workflow's name, or leave "
                "out --resume.",
                self.path,
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b", buffering=0)
        except OSError as error:
            raise SettingError(
                f"--output cannot be written ({error.strerror}): name another folder.", folder
            ) from error
        self._part = f".{stem}."
        self._server, self._version = "", 1
        self._loaded: dict[tuple[str, str], Any] = {}  # {(server, path): state}
        try:
            self._lock()
            self._read()
            for left in folder.glob(f"{glob.escape(self._part)}*.part"):  # by a killed run
                left.unlink(missing_ok=True)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def part(self) -> Path:
        """Names a file in the output folder that is not complete yet."""
        return self.path.parent / f"{self._part}{uuid.uuid4().hex}.part"

    def finished(self, key: str) -> Record | None:
        """Returns the record of a job that is done and whose files are all here."""
        record = self.records.get(key)
        if record is None or record.status != DONE:
            return None
        there = all((self.path.parent / name).is_file() for name in record.files)
        return record if there else None

    def attempts(self, key: str) -> list[Attempt]:
        """Says where a server may still have the job, or its results that are not here."""
        record = self.records.get(key, Record())
        done = [Attempt(record.prompt_id, record.server)] if record.status == DONE else []
        return record.open + done

    def changed(self, key: str) -> set[str]:
        """Returns the paths of local files that were replaced since the job was posted."""
        record = self.records.get(key, Record())
        posted = [record.local, *(attempt.local for attempt in record.open)]
        return {
            path
            for local in posted
            for path, state in local.items()
            if file_state(Path(path)) not in (None, state)  # None: this is another machine
        }

    def kept(self, server: str, local: Mapping[str, Any]) -> set[str]:
        """The paths of these files of which the server, by its last job of them, has another
        state.
        """
        loaded = self._loaded
        return {path for path in local if loaded.get((server, path)) not in (None, local[path])}

    def forget(self, key: str) -> list[Attempt]:
        """Notes that a job runs again, whatever became of it; its files stay.

        Returns:
            Attempts that brought nothing yet, which servers may still have.
        """
        record = self.records.get(key)
        if record is None:
            return []
        self._write("again", key=key)
        return record.open

    def begin(self, workflow: str, servers: list[str]) -> None:
        """Notes that a run begins."""
        self._write("run", version=VERSION, workflow=workflow, servers=servers)

    def queued(self, key: str, attempt: Attempt) -> None:
        """Notes a job before its server hears of it.

        Raises:
            DiskError: no room; the next line is whole again.
        """
        self._write(
            "queued",
            key=key,
            prompt_id=attempt.prompt_id,
            server=attempt.server,
            boot=attempt.boot,
            **({"local": attempt.local} if attempt.local else {}),
        )

    def ended(self, event: str, key: str, prompt_id: str, **facts: Any) -> None:
        """Notes what became of an attempt: "done", "failed", ..., "late" for a dropped result.

        Args:
            facts: `files` are names in the output folder.

        Raises:
            DiskError: no room.
        """
        facts = {name: value for name, value in facts.items() if value}
        self._write(event, key=key, prompt_id=prompt_id, **facts)

    def _lock(self) -> None:
        try:
            free = lock(self._file)
        except OSError as error:
            raise SettingError(
                f"this folder's disk locks no files ({error.strerror}), as some network disks do: "
                "name an --output on a disk of this machine.",
                self.path,
            ) from error
        if not free:
            raise SettingError(
                "another run writes this journal: wait for it, or name another --output.",
                self.path,
            )

    def _read(self) -> None:
        line = b""
        with self.path.open("rb") as lines:
            for line in lines:
                try:
                    self._take(json.loads(line))
                except (ValueError, LookupError, TypeError, AttributeError):
                    continue  # a line that a killed run began
        self._torn = bool(line) and not line.endswith(b"\n")
        if self._version > VERSION:
            raise SettingError(
                "a newer version of Qwen-Image L40S wrote this journal: update this one, or name "
                "another --output.",
                self.path,
            )

    def _take(self, entry: Mapping[str, Any]) -> None:
        if entry["event"] == "run":
            self._server = str(entry.get("server", ""))
            self._version = max(self._version, entry.get("version", 1))
        elif entry["event"] == "again":
            self.records.pop(entry["key"], None)
        else:
            self._note(self.records.setdefault(entry["key"], Record()), entry["event"], entry)

    def _note(self, record: Record, event: str, entry: Mapping[str, Any]) -> None:
        prompt_id = str(entry["prompt_id"])
        if event == "queued":
            server, boot = entry.get("server", self._server), entry.get("boot", "")
            local = dict(entry.get("local", {}))
            record.open.append(Attempt(prompt_id, server, boot, local))
            self._loaded |= {(server, path): state for path, state in local.items()}
        else:
            ended = [each for each in record.open if each.prompt_id == prompt_id]
            record.open = [each for each in record.open if each.prompt_id != prompt_id]
            if record.status == DONE or event == "late":
                return
            record.local = ended[-1].local if ended else {}
            record.prompt_id, record.server = prompt_id, entry.get("server", "")
            record.seconds, record.files = entry.get("seconds"), tuple(entry.get("files", ()))
            record.texts = entry.get("texts", {})
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
                f"the journal cannot be written ({error.strerror}): make room, then --resume goes "
                f"on ({self.path})."
            ) from error
        self._torn = False
        self._take(line)


def key_of(graph: Mapping[str, Any]) -> str:
    """Hashes what a graph computes, whatever its nodes are titled."""
    bare = {node: (content["class_type"], content["inputs"]) for node, content in graph.items()}
    text = json.dumps(bare, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LETTERS]


def file_state(path: Path) -> list[int] | None:
    """Returns size in bytes and time of change in ns; None where there is no file."""
    try:
        found = path.stat()
    except (OSError, ValueError):  # ValueError: a zero byte in the name
        return None
    return [found.st_size, found.st_mtime_ns] if stat.S_ISREG(found.st_mode) else None


@dataclass
class Fetched:
    """What a prompt made.

    Attributes:
        parts: complete files under temporary names, and their suffixes.
        texts: {title of a node: the texts that it shows}.
        seconds: that the run took, by the server's clock; None where it does not say.
        broken: what execution_error said; None without an error.
        interrupted: whether someone stopped it.
    """

    parts: list[tuple[Path, str]] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    seconds: float | None = None
    broken: Mapping[str, Any] | None = None
    interrupted: bool = False

    def discard(self) -> None:
        """Removes what has not been given a name."""
        for part, _ in self.parts:
            part.unlink(missing_ok=True)


async def fetch(
    server: Server,
    graph: Mapping[str, Any],
    entry: Mapping[str, Any],
    part: Callable[[], Path],
    fetched: Fetched,
) -> None:
    """Fetches what an ended prompt made; of a failed one too, as far as it is there.

    Args:
        entry: of the server's history.
        part: makes a temporary name on the disk of the results.
        fetched: is filled.

    Raises:
        ServerError: the server went away, or does not give a file.
        DiskError: the folder takes no more.
    """
    messages = dict((entry.get("status") or {}).get("messages", ()))
    fetched.seconds = _seconds(messages)
    fetched.interrupted = "execution_interrupted" in messages
    if fetched.interrupted:
        return
    fetched.texts = texts_of(entry, graph)
    fetched.broken = messages.get("execution_error")
    for image in files_of(entry):
        suffix = Path(image["filename"]).suffix
        path = part()
        fetched.parts.append((path, suffix if FILE_SUFFIX.fullmatch(suffix) else ""))
        try:
            await server.download(image, path)
        except OSError as error:
            raise _no_room(error, path.parent) from error


def place(fetched: Fetched, folder: Path, key: str) -> list[Path]:
    """Gives the files their names, `<key>_<n>.png` from 1, and replaces none.

    A file that is there with the same content, from a run that was killed before it noted the job
    as done, is the result.

    Raises:
        DiskError: the folder takes no names.
    """
    found = []
    number = 1
    for part, suffix in fetched.parts:
        path = folder / f"{key}_{number}{suffix}"
        try:
            while not _linked(part, path):
                number += 1
                path = folder / f"{key}_{number}{suffix}"
        except OSError as error:
            raise _no_room(error, folder) from error
        number += 1
        found.append(path)
    fetched.discard()
    return found


def files_of(entry: Mapping[str, Any]) -> list[dict[str, str]]:
    """What /view takes, for each file of a history entry, once.

    Files that the server deletes at its next start (type temp) count only where there are no
    others: they are the previews of a workflow that also saves.
    """
    found = [
        {name: str(item.get(name, "")) for name in ("filename", "subfolder", "type")}
        for output in entry.get("outputs", {}).values()
        for items in output.values()
        if isinstance(items, list)
        for item in items
        if isinstance(item, dict) and item.get("filename")
    ]
    once = list({tuple(item.values()): item for item in found}.values())
    return [item for item in once if item["type"] == "output"] or once


def texts_of(entry: Mapping[str, Any], graph: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns {title of a node: the texts that it shows}."""
    texts: dict[str, list[str]] = {}
    for node, output in entry.get("outputs", {}).items():
        shown = output.get("text")
        lines = [shown] if isinstance(shown, str) else shown
        if isinstance(lines, list) and any(lines):
            texts.setdefault(title(graph, node), []).extend(str(line) for line in lines)
    return texts


def _linked(part: Path, path: Path) -> bool:
    try:
        name_file(part, path)
    except FileExistsError:
        return filecmp.cmp(part, path, shallow=False)
    return True


def _no_room(error: OSError, folder: Path) -> DiskError:
    return DiskError(
        f"results cannot be written ({error.strerror or error}): make room, then --resume fetches "
        "them.",
        folder,
    )


def _seconds(messages: Mapping[str, Mapping[str, Any]]) -> float | None:
    start = messages.get("execution_start", {}).get("timestamp")
    end = next((messages[kind].get("timestamp") for kind in messages if kind in ENDS), None)
    return None if start is None or end is None else round((end - start) / 1000, 3)
