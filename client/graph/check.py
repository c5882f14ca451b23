"""Checks, before anything is queued, what a server would not say of a graph, or not so well; and
the images of this machine that a graph names: found, read once, and named for the server.

What POST /prompt refuses with the input's name is left to it: missing inputs, numbers out of their
bounds, values of a list, links of the wrong type.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

from PIL import Image, UnidentifiedImageError

from ...errors import SettingError
from .inputs import NodeInput, listed, nearest, node_inputs, shortened
from .workflow import Graph, called, input_called, is_link, meta, source, with_inputs

OURS = "QwenL40S_"
PACK = "Qwen-Image L40S"
# What is asked of Pillow, so that a file cannot reach its readers of documents and video.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# How ComfyUI marks a file by the server's folder that it lies in.
SERVER_FOLDERS = ("[input]", "[output]", "[temp]")
# Of the server's input folder, so that uploads do not mix with what people put there.
SUBFOLDER = "qwen-l40s-submit"
NAME_LETTERS = 40
HASH_LETTERS = 16


class Checker:
    """Checks graphs for one server, or for all that give the same object_info.

    What inputs a class has is worked out once for thousands of jobs.
    """

    def __init__(self, object_info: Mapping[str, Any]) -> None:
        self._info = object_info
        self._known: dict[str, dict[str, NodeInput] | None] = {}

    def check(self, graph: Graph) -> None:
        """Finds what the server lacks or ignores: nodes, files, ends of links, inputs of ours.

        As the server does, it looks at the nodes that lead to an output, and at the class of every
        one. The values in nodes of other packs are left to the server: they may have rules of their
        own, which object_info does not show.

        Raises:
            SettingError: something is wrong; one sentence for each problem, on lines of their own.
        """
        problems = [
            self._missing(graph, node)
            for node in graph
            if graph[node]["class_type"] not in self._info
        ]
        outputs = [
            node
            for node, described in graph.items()
            if self._info.get(described["class_type"], {}).get("output_node")
        ]
        for node, known in self._needed(graph, outputs):
            problems += self._problems(graph, node, known)
        if problems:
            raise SettingError("\n".join(problems))

    def _inputs(self, node: Mapping[str, Any]) -> dict[str, NodeInput] | None:
        kind = node["class_type"]
        if kind in self._known:
            return self._known[kind]
        found = node_inputs(self._info, node)
        if not found or not any(spec.opens for spec in found.values()):
            self._known[kind] = found
        return found

    def _missing(self, graph: Graph, node: str) -> str:
        who = called(graph, node)
        if not graph[node]["class_type"].startswith(OURS):
            return (
                f"{who} is missing on the server: install the pack that has it, or update ComfyUI "
                "there."
            )
        if any(name.startswith(OURS) for name in self._info):
            return f"{who} is missing on the server: {_update(graph[node])}."
        return f"{who} needs {PACK}, which the server lacks: install it there."

    def _needed(
        self, graph: Graph, outputs: Iterable[str]
    ) -> list[tuple[str, dict[str, NodeInput]]]:
        found = {}
        waiting = list(outputs)
        while waiting:
            node = waiting.pop()
            if node in found:
                continue
            found[node] = known = self._inputs(graph[node]) or {}
            for name, value in graph[node]["inputs"].items():
                feeder = source(graph, value)
                if feeder is not None and name in known:
                    waiting.append(feeder)
        return [
            (node, found[node])
            for node in graph
            if node in found and graph[node]["class_type"] in self._info
        ]

    def _problems(self, graph: Graph, node: str, known: Mapping[str, NodeInput]) -> Iterator[str]:
        described = graph[node]
        ours = described["class_type"].startswith(OURS)
        module = str(self._info[described["class_type"]].get("python_module"))
        judged = ours or not module.startswith("custom_nodes.")
        for name, value in described["inputs"].items():
            if name not in known:
                if ours:
                    yield (
                        f"{called(graph, node)} has an input {name!r} that the server does not "
                        f"know: {_update(described)}."
                    )
            elif is_link(value):
                if source(graph, value) is None:
                    yield (
                        f"{name!r} of {called(graph, node)} is wired to a node that is not there "
                        f"({value}): wire it again."
                    )
            elif judged and (problem := _value_problem(graph, node, name, value, known[name])):
                yield problem


def _update(node: Mapping[str, Any]) -> str:
    version = meta(node).get("version")
    made = f" (the workflow was made with {version})" if version else ""
    return f"update {PACK} there{made}"


def _value_problem(graph: Graph, node: str, name: str, value: Any, spec: NodeInput) -> str | None:
    if spec.kind == "FLOAT" and _is_nan(value):  # which passes the server's bounds
        return f"{name!r} of {called(graph, node)} is nan and must be a number."
    if spec.kind == "COMBO" and spec.closed and not _takes(spec, value):
        return _not_listed(graph, node, name, value, spec)
    return None


def _is_nan(value: Any) -> bool:
    try:
        return math.isnan(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def _takes(spec: NodeInput, value: Any) -> bool:
    if isinstance(value, dict) and "__value__" in value:
        value = value["__value__"]
    several = value if spec.rules.get("multiselect") and isinstance(value, list) else [value]
    return all(each in spec.choices for each in several)


def _not_listed(graph: Graph, node: str, name: str, value: Any, spec: NodeInput) -> str | None:
    """Says where to get a file that is not listed; other values the server names itself."""
    where = input_called(graph, node, name)
    for choice in map(str, spec.choices):
        if _file_name(choice) == _file_name(str(value)):
            return (
                f"{where} is {value!r}, which the server has as {choice!r}: add --set "
                f'"{where}={choice}".'
            )
    models = meta(graph[node]).get("models")
    for model in models if isinstance(models, list) else ():
        if isinstance(model, dict) and value == model.get("name"):
            return (
                f"{where} is {value!r}, which the server does not have: download it from "
                f"{model.get('url')} to models/{model.get('directory')} there."
            )
    if not spec.choices:
        return (
            f"{where} is {shortened(str(value))}, but the server has no file for it: put one there."
        )
    if not spec.opens:
        return None
    # Which the server finds only when the node runs, as inputs that are missing.
    names = nearest(str(value), map(str, spec.choices))
    return f"{where} is {shortened(str(value))} and must be one of {listed(names)}."


def _file_name(choice: str) -> str:
    return re.split(r"[/\\]", choice)[-1]


def local_images(
    graph: Graph, object_info: Mapping[str, Any], folder: Path
) -> dict[tuple[str, str], Path]:
    """Finds the images that the server lacks and this machine has, each read once to its end.

    A name that the server lists is the server's file; `./name` is the one here. A name that ends
    with `[input]`, `[output]` or `[temp]` is a file in that folder of the server. Anything else is
    a path from the working directory, or else from `folder`.

    Args:
        folder: of the workflow file.

    Returns:
        {(node id, input): absolute path}.

    Raises:
        SettingError: a name is neither the server's nor a file here, or the file is damaged or no
            image.
    """
    found: dict[tuple[str, str], Path] = {}
    for node, name, spec, value in image_inputs(graph, object_info):
        if _on_server(value, spec):
            continue
        path = _local_file(value, folder)
        if path is None:
            raise SettingError(_neither(input_called(graph, node, name), value, spec))
        if path not in found.values():
            check_image(path, called(graph, node))
        found[node, name] = path
    return found


def image_inputs(
    graph: Graph, object_info: Mapping[str, Any]
) -> Iterator[tuple[str, str, NodeInput, str]]:
    """Yields (node id, input, what the server says of it, name of the image)."""
    for node, described in graph.items():
        for name, spec in (node_inputs(object_info, described) or {}).items():
            value = described["inputs"].get(name)
            if spec.takes_image and isinstance(value, str):
                yield node, name, spec, value


def renamed(graph: Graph, names: Mapping[str, str]) -> Graph:
    """Copies the graph with the names that a server gave to uploaded images."""
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
    """Names an image by its content, so that two files of one name never meet."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:HASH_LETTERS]
    stem = re.sub(r"[^A-Za-z0-9]+", "-", path.stem).strip("-")[:NAME_LETTERS] or "image"
    return f"{SUBFOLDER}/{stem}-{digest}{path.suffix.lower()}"
