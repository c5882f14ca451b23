"""Files of a run: local images that go to the server, and results that come from it."""

from __future__ import annotations

import filecmp
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

from ..errors import SettingError
from .inputs import NodeInput, node_inputs, shortened
from .ledger import CANCELLED, DONE, FAILED, Job
from .server import Server, failure, of_execution
from .transport import AnswerError
from .workflow import Graph, called, check_image, input_called, title, with_inputs

# How ComfyUI marks a file by the server's folder that it lies in.
SERVER_FOLDERS = ("[input]", "[output]", "[temp]")
ENDS = ("execution_success", "execution_error", "execution_interrupted")
# What Windows forbids in a name, and what steers a terminal.
FORBIDDEN = re.compile(r'[<>:"|?*\x00-\x1f\x7f]')


@dataclass(frozen=True)
class Upload:
    """An input that names a local image.

    Attributes:
        path: absolute, so that an image named twice has one path.
    """

    node: str
    input: str
    path: Path


def local_images(graph: Graph, object_info: Mapping[str, Any], folder: Path) -> list[Upload]:
    """The images that the server lacks and this machine has, each read once to its end.

    A name that the server lists is the server's file; `./name` is the one here. A name that ends
    with `[input]`, `[output]` or `[temp]` is a file in that folder of the server. Anything else is
    a path from the working directory, or else from `folder`.

    Args:
        folder: of the workflow file.

    Raises:
        SettingError: a name is neither the server's nor a file here, or the file is damaged or no
            image.
    """
    uploads = []
    read = set()
    for node, name, spec, value in image_inputs(graph, object_info):
        if _on_server(value, spec):
            continue
        path = _local_file(value, folder)
        if path is None:
            raise SettingError(_neither(input_called(graph, node, name), value, spec))
        if path not in read:
            check_image(path, called(graph, node))
            read.add(path)
        uploads.append(Upload(node, name, path))
    return uploads


def image_inputs(
    graph: Graph, object_info: Mapping[str, Any]
) -> Iterator[tuple[str, str, NodeInput, str]]:
    """(node id, input, what the server says of it, name of the image) of those that name one."""
    for node, described in graph.items():
        for name, spec in (node_inputs(object_info, described) or {}).items():
            value = described["inputs"].get(name)
            if spec.takes_image and isinstance(value, str):
                yield node, name, spec, value


def with_uploaded(graph: Graph, uploads: Iterable[Upload], names: Mapping[Path, str]) -> Graph:
    """A copy of the graph that names the uploaded files as the server does.

    Args:
        uploads: of this graph, by `local_images`.
        names: what the server called each path: `name`, or `subfolder/name`.
    """
    return with_inputs(
        graph, {(upload.node, upload.input): names[upload.path] for upload in uploads}
    )


def _on_server(value: str, spec: NodeInput) -> bool:
    # A text that may name an image, as a painted mask's does, may also be empty.
    return (
        value in spec.choices
        or value.endswith(SERVER_FOLDERS)
        or (spec.kind == "STRING" and not value)
    )


def _local_file(value: str, folder: Path) -> Path | None:
    tries = [value]
    if os.sep == "/" and "\\" in value:  # a workflow that Windows wrote
        tries.append(PureWindowsPath(value).as_posix())
    for text in tries:
        try:
            path = Path(text).expanduser()
            for place in (Path.cwd() / path, folder / path):
                if place.exists() and not place.is_dir():
                    return place.resolve()
        except (OSError, RuntimeError, ValueError):  # too long, no such user, a zero byte
            continue
    return None


def _neither(where: str, value: str, spec: NodeInput) -> str:
    folder = spec.rules.get("image_folder", "input")
    return (
        f"{where} is {shortened(value)}, a picture that neither the server nor this machine has: "
        f'give one with --set "{where}=photo.png", or write one in a subfolder of the server as '
        f"'subfolder/photo.png [{folder}]'."
    )


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
