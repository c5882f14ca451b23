"""The results of a job, fetched from its server."""

from __future__ import annotations

import filecmp
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .graph.workflow import title
from .ledger import CANCELLED, DONE, FAILED, Job
from .server import Server, failure, of_execution
from .transport import AnswerError

ENDS = ("execution_success", "execution_error", "execution_interrupted")
# What Windows forbids in a name, and what steers a terminal.
FORBIDDEN = re.compile(r'[<>:"|?*\x00-\x1f\x7f]')


async def collect(
    server: Server,
    job: Job,
    entry: Mapping[str, Any],
    folder: Path,
    reported: Mapping[str, Any] | None = None,
) -> tuple[str, dict[str, Any] | None]:
    """Fetches what an ended job made; files and texts of a failed one too, as far as they are.

    Args:
        entry: of the server's history.
        reported: an execution_error of the websocket, which the history may not have.

    Returns:
        The job's status, and why it failed; see `server.failure`.

    Raises:
        ServerError: the server went away.
    """
    messages = dict((entry.get("status") or {}).get("messages", ()))
    job.seconds = _seconds(messages)
    if "execution_interrupted" in messages:
        return CANCELLED, failure("interrupted", "someone interrupted it on the server.")
    job.texts = texts_of(entry, job.graph)
    broken = messages.get("execution_error", reported)
    error = None if broken is None else of_execution(job.graph, broken)
    for image in files_of(entry):
        try:
            job.files.append(await download(server, image, folder))
        except AnswerError as refused:
            message = f"{image['filename']} cannot be fetched: {refused}"
            error = error or failure("download", message)
        except OSError as full:
            message = (
                f"{image['filename']} cannot be written ({full.strerror or full}): make room, "
                "then --resume fetches it."
            )
            error = error or failure("download", message)
    return (DONE if error is None else FAILED), error


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


async def download(server: Server, image: Mapping[str, str], folder: Path) -> Path:
    """Downloads a file into `folder`, whole or not at all, and replaces nothing.

    Returns:
        Its path: the server's subfolder and name, with a number where another file has that name.

    Raises:
        ServerError: the server does not give it.
        OSError: the folder cannot take it.
    """
    target = folder.joinpath(*_safe_parts(image["subfolder"]), _safe_name(image["filename"]))
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.parent / f".{uuid.uuid4().hex}.part"
    try:
        await server.download(image, part)
        return _placed(part, target)
    finally:
        part.unlink(missing_ok=True)


def _placed(part: Path, target: Path) -> Path:
    """Gives a complete file its name without replacing another; the same file stays one."""
    path, number = target, 1
    while True:
        if path.is_file() and filecmp.cmp(part, path, shallow=False):
            return path
        try:
            _rename_new(part, path)
            return path
        except FileExistsError:
            number += 1
            path = target.with_name(f"{target.stem}-{number}{target.suffix}")


def _rename_new(part: Path, path: Path) -> None:
    try:
        os.link(part, path)  # unlike a rename it never replaces a file
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(path) from None
        part.rename(path)


def _safe_parts(subfolder: str) -> list[str]:
    """Of a server on Windows or Linux; none that leads out of the folder."""
    return [_safe_name(part) for part in re.split(r"[/\\]", subfolder) if part.strip(". ")]


def _safe_name(name: str) -> str:
    name = FORBIDDEN.sub("_", re.split(r"[/\\]", name)[-1]).strip()
    return name if name.strip(". ") else "_"


def _seconds(messages: Mapping[str, Mapping[str, Any]]) -> float | None:
    """That the run took, by the server's clock; None where it does not say."""
    start = messages.get("execution_start", {}).get("timestamp")
    end = next((messages[kind].get("timestamp") for kind in messages if kind in ENDS), None)
    return None if start is None or end is None else round((end - start) / 1000, 3)
