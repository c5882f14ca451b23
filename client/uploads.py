"""Images on this machine that a workflow names, to be uploaded before it is queued."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

from ..errors import SettingError
from .graph import Graph, with_inputs
from .image_files import check_image
from .node_inputs import NodeInput, node_inputs
from .titles import called, input_called
from .values import shortened

# How ComfyUI marks a file by the server's folder that it lies in.
SERVER_FOLDERS = ("[input]", "[output]", "[temp]")


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
        f"{where} is {shortened(value)}, which is neither among the server's images nor a file "
        f'here: name one with --set "{where}=photo.png"; of one in a subfolder of the server write '
        f"'subfolder/photo.png [{folder}]'."
    )
