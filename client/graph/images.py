"""Images of this machine that a graph names: found, read once, and named for the server."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

from PIL import Image, UnidentifiedImageError

from ...errors import SettingError
from .inputs import NodeInput, node_inputs, shortened
from .workflow import Graph, called, input_called, with_inputs

# What is asked of Pillow, so that a file cannot reach its readers of documents and video.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# How ComfyUI marks a file by the server's folder that it lies in.
SERVER_FOLDERS = ("[input]", "[output]", "[temp]")
# Of the server's input folder, so that uploads do not mix with what people put there.
SUBFOLDER = "qwen-l40s-submit"
NAME_LETTERS = 40
HASH_LETTERS = 16


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
    """A copy of the graph with what the server called each path: `name`, or `subfolder/name`."""
    return with_inputs(graph, {(each.node, each.input): names[each.path] for each in uploads})


def renamed(graph: Graph, names: Mapping[str, str]) -> Graph:
    """The graph with the names that a server gave to uploaded images, by those that it holds."""
    given = {name: to for name, to in names.items() if name != to}
    values = {
        (node, key): given[value]
        for node, described in graph.items()
        for key, value in described["inputs"].items()
        if isinstance(value, str) and value in given
    }
    return with_inputs(graph, values)


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


def check_image(path: Path, used_by: str) -> None:
    """Reads the first picture of a file to its end.

    Args:
        used_by: the node that wants it, for the message.

    Raises:
        SettingError: the file is missing, empty, no image, damaged, cut off or too large.
    """
    Image.init()
    formats = [name for name in IMAGE_FORMATS if name in Image.OPEN]
    try:
        with warnings.catch_warnings():
            # From 89 megapixels Pillow warns, and cameras make those; from 179 it refuses.
            warnings.simplefilter("ignore")
            with Image.open(path, formats=formats) as image:
                image.load()
        return
    except UnidentifiedImageError as error:
        cause: Exception = error
        what = "is not a readable image"
        remedy = f"give a {', '.join(IMAGE_FORMATS[:-1])} or {IMAGE_FORMATS[-1]}"
        if not path.stat().st_size:
            what, remedy = "is empty", "give another"
    except Image.DecompressionBombError as error:
        cause, what, remedy = error, f"is too large ({error})", "scale it down"
    except Exception as error:  # a damaged file makes Pillow's readers fail in many ways
        cause, what, remedy = error, f"cannot be read ({error})", "save it again"
    raise SettingError(f"the picture for {used_by} {what}: {remedy}.", path) from cause


def server_name(path: Path) -> str:
    """What the server calls an image: by its content, so that two files of one name never meet."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:HASH_LETTERS]
    stem = re.sub(r"[^A-Za-z0-9]+", "-", path.stem).strip("-")[:NAME_LETTERS] or "image"
    return f"{SUBFOLDER}/{stem}-{digest}{path.suffix.lower()}"
