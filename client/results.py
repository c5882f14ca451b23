"""Fetches the files that a prompt's history names, checks them and names them here."""

from __future__ import annotations

import asyncio
import filecmp
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..files import name_file
from .journal import DiskError, Journal
from .scheduler import Job
from .server import Server, failure, fault, files_of, of_execution, seconds_of, texts_of
from .transport import AwayError, GoneError, ServerError
from .workflow import JOB_ID, Graph, job_id, key_of, png_texts

# What a suffix of a server's file may be; another is left out.
FILE_SUFFIX = re.compile(r"\.[A-Za-z0-9]{1,8}")
# How files begin (and from which byte on) and end, of what ComfyUI 0.33 and common packs save.
KINDS = {
    suffix: (place, start, end)
    for suffixes, place, start, end in (
        (".png", 0, b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"),
        (".jpg .jpeg", 0, b"\xff\xd8\xff", b"\xff\xd9"),
        (".webp", 8, b"WEBP", b""),
        (".gif", 0, b"GIF8", b";"),
        (".exr", 0, b"v/1\x01", b""),
        (".mp4 .mov .m4a", 4, b"ftyp", b""),
        (".webm .mkv", 0, b"\x1aE\xdf\xa3", b""),
        (".flac", 0, b"fLaC", b""),
        (".opus .ogg", 0, b"OggS", b""),
        (".wav", 8, b"WAVE", b""),
        (".glb", 0, b"glTF", b""),
        (".ply", 0, b"ply", b""),
        (".spz", 0, b"\x1f\x8b", b""),
        (".usdz", 0, b"PK\x03\x04", b""),
        (".svg", 0, b"", b"</svg>"),
    )
    for suffix in suffixes.split()
}
# Their length, in bytes 4 to 7 and 8 to 11, little-endian; RIFF counts from byte 8.
LENGTHS = {".webp": (4, 8), ".wav": (4, 8), ".glb": (8, 0)}
# Of a sound that was written before its length was known.
STREAMED = 0xFFFFFFFF + 8
# What core's SaveText writes, also of an empty text.
TEXTS = (".txt", ".csv", ".md", ".json")
# Results of one prompt: fetched so often, in so long a time, with pauses that grow from the first.
FETCHES, FETCH_SECONDS, FETCH_PAUSE = 10, 600.0, 1.0
# From one server at a time.
DOWNLOADS = 2
# At its end; packs append some bytes of their own.
TAIL_BYTES = 4096


class ResultError(ServerError):
    """What came is not the result of the job, or the server no longer has it (`lost`)."""

    def __init__(self, message: str, *, lost: bool = False) -> None:
        super().__init__(message)
        self.lost = lost


class ResultFile(NamedTuple):
    """A whole file under a temporary name."""

    path: Path
    suffix: str
    size: int
    sha256: str


@dataclass
class Fetched:
    parts: list[ResultFile] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    seconds: float | None = None
    error: dict[str, Any] | None = None
    interrupted: bool = False
    doubtful: bool = False  # whether nothing tells that a file is this job's

    def discard(self) -> None:
        """Removes what has not been given a name."""
        for part in self.parts:
            part.path.unlink(missing_ok=True)


async def fetch(
    server: Server,
    graph: Graph,
    entry: Mapping[str, Any],
    part: Callable[[], Path],
    fetched: Fetched,
    *,
    most: float,
    owns: Callable[[Mapping[str, str], Path], bool | None],
) -> None:
    """Fetches what an ended prompt made; of a failed one too, as far as it is there. `part` makes a
    temporary name, and `owns` says whether a file is this job's, None where nothing tells. Raises
    ServerError, ResultError for another file, and DiskError.
    """
    status = entry["status"]
    messages = dict(status["messages"])
    fetched.seconds = seconds_of(messages)
    fetched.interrupted = "execution_interrupted" in messages
    if fetched.interrupted:
        return
    fetched.texts = texts_of(entry, graph)
    if "execution_error" in messages:
        fetched.error = of_execution(graph, messages["execution_error"])
    elif status["status_str"] != "success":
        told = (
            f"{server.address} reports that the job failed, without a reason: see the server's log."
        )
        fetched.error = failure("execution_error", told)
    for item in files_of(entry, graph):
        path, suffix = part(), Path(item["filename"]).suffix
        named = f"{server.address} gives {item['filename']!r}, which"
        fetched.parts.append(ResultFile(path, "", 0, ""))
        try:
            size, sha256 = await server.download(item, path, most)
            fault = fault_of(path, suffix.lower(), size)
            if fault is None:
                await asyncio.to_thread(_sync, path)
        except OSError as error:
            raise no_room(error, path.parent) from error
        if fault is not None:
            raise ResultError(f"{named} {fault}: check any proxy before the server.")
        own = owns(item, path)
        if own is False:
            raise ResultError(f"{named} is the image of another job.", lost=True)
        fetched.doubtful |= own is None
        suffix = suffix if FILE_SUFFIX.fullmatch(suffix) else ""
        fetched.parts[-1] = ResultFile(path, suffix, size, sha256)


def fault_of(path: Path, suffix: str, size: int) -> str | None:
    """Says by first and last bytes why a file is not what its suffix says; None if it may be."""
    if not size:
        return None if suffix in TEXTS else "is empty"
    with path.open("rb") as file:
        head = file.read(64)
        file.seek(max(0, size - TAIL_BYTES))
        tail = file.read()
    place, start, end = KINDS.get(suffix, (0, b"", b""))
    if head[place : place + len(start)] != start:
        return f"is no {suffix[1:]} file (it begins with {head[:16]!r})"
    at, more = LENGTHS.get(suffix, (0, -8))
    told = int.from_bytes(head[at : at + 4], "little") + more if suffix in LENGTHS else 0
    whole = told <= size or told == STREAMED
    return None if end in tail and whole else "is cut off"


def owned(path: Path, key: str, keys: Collection[str]) -> bool | None:
    """Returns whether a PNG is that of the job `key`; None where its text `prompt` does not tell.
    The ids of jobs in that graph decide, else the graph, where it is one of `keys`.
    """
    try:
        with path.open("rb") as file:
            graph = json.loads(png_texts(file)["prompt"])
        texts = [str(text) for node in graph.values() for text in node["inputs"].values()]
        ids = tuple(found[1] for text in texts if (found := JOB_ID.search(text)))
        if ids:
            return key.startswith(ids)
        of = key_of(graph)
        return of == key or (False if of in keys else None)
    except Exception:  # no such text, or a damaged one
        return None


def place(
    parts: Sequence[ResultFile], folder: Path, key: str, told: Callable[[list[Path]], None]
) -> list[Path]:
    """Gives the files their names, `<key>_<n>.png` from 1, and replaces none but the beginning of
    the same file; `told` gets the names before. A file with the same content is the result. Raises
    DiskError.
    """
    numbers = itertools.count(1)

    def free(part: ResultFile) -> Path:
        names = (folder / f"{key}_{number}{part.suffix}" for number in numbers)
        return next(path for path in names if not _taken(part.path, path))

    try:
        found = [free(part) for part in parts]
        told(found)
        for part, path in zip(parts, found, strict=True):
            try:
                name_file(part.path, path)
            except FileExistsError:
                if not filecmp.cmp(part.path, path, shallow=False):  # another run was faster
                    raise
    except OSError as error:
        raise no_room(error, folder) from error
    return found


def no_room(error: OSError, folder: Path) -> DiskError:
    return DiskError(
        f"results cannot be written ({error.strerror or error}): free disk space, then fetch them "
        "with --resume.",
        folder,
    )


def _taken(part: Path, path: Path) -> bool:
    """Removes a file that is the beginning of the same one, as a power cut leaves."""
    try:
        with path.open("rb") as there, part.open("rb") as new:
            size = os.fstat(there.fileno()).st_size
            if size < os.fstat(new.fileno()).st_size and there.read() == new.read(size):
                path.unlink()
                return False
    except FileNotFoundError:
        return False
    return not filecmp.cmp(part, path, shallow=False)


def _sync(path: Path) -> None:
    with path.open("r+b") as file:  # Windows syncs no file that is open for reading alone
        os.fsync(file.fileno())


@dataclass
class Missing:
    fault: ServerError
    tries: int
    lost: bool  # whether the server has them no more; else it went away
    last: bool  # whether they were asked for often enough


class Collector:
    """Brings what the prompts of one server made; `downloads` limits those of all servers."""

    def __init__(self, server: Server, most: float, downloads: asyncio.Semaphore) -> None:
        self._server, self._most = server, most
        self._here, self._everywhere = asyncio.Semaphore(DOWNLOADS), downloads

    async def collect(
        self,
        job: Job,
        prompt_id: str,
        entry: Mapping[str, Any],
        journal: Journal,
        late: Callable[[ServerError], None],
    ) -> Fetched | Missing:
        """Asks for the results, under temporary names, until they are here or gone, or were
        asked for often enough. Raises DiskError. A job that another server ended brings nothing.
        """
        pause, began = FETCH_PAUSE, time.monotonic()
        tries = 0
        while True:
            tries += 1
            found = await self._try(job, entry, journal)
            if isinstance(found, Fetched):
                return found
            if tries == 1:
                late(found)
            last = tries == FETCHES or time.monotonic() - began > FETCH_SECONDS
            lost = getattr(found, "lost", False) or getattr(found, "status", 0) == 404
            away = isinstance(found, GoneError)
            if not (last or lost or away):
                await asyncio.sleep(pause)
                pause *= 2
                try:
                    now = await self._server.history(prompt_id)
                    lost = now is None and prompt_id not in await self._server.queue()
                    entry = now or entry
                except ServerError as error:  # if it answers, it does so wrongly, as before
                    away = isinstance(error, AwayError)
            if last or lost or away:
                return Missing(found, tries, lost, last)

    async def _try(
        self, job: Job, entry: Mapping[str, Any], journal: Journal
    ) -> Fetched | ServerError:
        fetched = Fetched()
        owns = partial(_owns, job, journal.records)
        try:
            async with self._here, self._everywhere:
                if job.open:  # else another server was first
                    taken = self._server, job.graph, entry, journal.part, fetched
                    await fetch(*taken, most=self._most, owns=owns)
        except BaseException as error:
            fetched.discard()
            if isinstance(error, DiskError) or not isinstance(error, Exception):
                raise
            return fault(self._server.address, error)
        return fetched


def _owns(job: Job, keys: Collection[str], item: Mapping[str, str], path: Path) -> bool | None:
    # A preview may be that of an earlier job, which ComfyUI has not made again.
    if item["type"] == "temp":
        return True
    name = f"{item['subfolder']}/{item['filename']}"
    own = owned(path, job.key, keys) if name.lower().endswith(".png") else None
    if job.alone or job_id(job.key) in name:
        return own is not False
    return own or None  # where that of another job was kept, the node runs again
