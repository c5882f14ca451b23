"""The results of a prompt: fetched from its server, then given their names, once."""

from __future__ import annotations

import filecmp
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import name_file
from .graph.workflow import title
from .journal import DiskError
from .server import Server

ENDS = ("execution_success", "execution_error", "execution_interrupted")
# What a suffix of a server's file may be; another is left out.
SUFFIX = re.compile(r"\.[A-Za-z0-9]{1,8}")


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
        fetched.parts.append((path, suffix if SUFFIX.fullmatch(suffix) else ""))
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
    """{title of a node: the texts that it shows}."""
    texts: dict[str, list[str]] = {}
    for node, output in entry.get("outputs", {}).items():
        shown = output.get("text")
        lines = [shown] if isinstance(shown, str) else shown
        if isinstance(lines, list) and any(lines):
            texts.setdefault(title(graph, node), []).extend(str(line) for line in lines)
    return texts


def _linked(part: Path, path: Path) -> bool:
    """Whether the file has the name now, or had it."""
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
