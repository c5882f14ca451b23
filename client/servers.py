"""Knows the servers of a run: their addresses, a file that lists them, and what each can run.
What POST /prompt refuses with the input's name is left to it, such as missing inputs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

from ..errors import SettingError
from ..families.registry import member_of_file
from ..files import read_bytes
from .journal import file_state
from .scheduler import Job
from .server import Server, failure
from .settings import listed, nearest
from .transport import Address, AnswerError
from .workflow import (
    OURS,
    Graph,
    NodeInput,
    called,
    input_called,
    is_link,
    loaded_names,
    meta,
    node_inputs,
    shortened,
    source,
)

# Of `qwen-l40s fleet`'s file.
VERSION = 1
PACK = "Qwen-Image Accelerator"
NAME_A_LIST = (
    "name the servers.json of qwen-l40s fleet, or a text file with an address on each line"
)

# Tells why a server cannot run a job; None where it can.
Takes = Callable[[Job], "dict[str, Any] | None"]


@dataclass(frozen=True)
class Listed:
    """A server; `boot` says which process it is and `log` where its log is, where that is known."""

    address: Address
    boot: str = ""
    log: str = ""


@dataclass
class ServerList:
    """The servers that were named, and those of a file, which is read anew when it changes."""

    addresses: Sequence[str] = ()
    file: Path | None = None
    notify: Callable[[str], None] = lambda line: None
    headers: Mapping[str, str] = field(default_factory=dict)
    _stamp: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        self.headers = {name.strip(): value.strip() for name, value in self.headers.items()}
        for name, value in self.headers.items():
            if not name or " " in name or not (name + value).isprintable():
                raise SettingError('a header must be "Name: value", such as "X-Token: 5".')

    def read(self) -> list[Listed]:
        """Returns all servers, each once, or raises SettingError for what is wrong in the lists."""
        found = [Listed(Address.parse(text)) for text in self.addresses]
        if self.file is not None:
            self._stamp = self._changed()
            found += _file(self.file)
        once: dict[str, Listed] = {}
        for each in found:
            if each.address.base.user and "authorization" in map(str.lower, self.headers):
                raise SettingError(
                    f"{each.address} has both a password in its address and an Authorization "
                    "header: give one of them."
                )
            place = str(each.address).replace("//localhost", "//127.0.0.1")
            if place in once:
                self.notify(f"{each.address} is named twice and used once")
            once[place] = each
        return list(once.values())

    def changed(self) -> list[Listed] | None:
        """Reads all servers again where the file has changed; None where not, or it is broken."""
        if self.file is None or self._changed() == self._stamp:
            return None
        try:
            return self.read()
        except SettingError as error:
            self.notify(f"{error} The list of servers stays unchanged.")
            return None

    def _changed(self) -> tuple[int, int, int] | None:
        file: Any = self.file
        try:
            stat = file.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size


def _file(path: Path) -> list[Listed]:
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        wrong = "it is not UTF-8" if isinstance(error, UnicodeError) else error
        reason = getattr(error, "strerror", None) or wrong
        raise SettingError(f"--servers cannot be read ({reason}): {NAME_A_LIST}.", path) from error
    if not text.strip():  # most editors empty a file before they write it
        raise SettingError(f"--servers is empty: {NAME_A_LIST}.", path)
    if not text.lstrip().startswith("{"):
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        return [Listed(Address.parse(line)) for line in lines if line]
    try:
        data = json.loads(text)
        if data["version"] > VERSION:
            raise SettingError(
                "a newer version of Qwen-Image Accelerator wrote this list of servers: update this "
                "one.",
                path,
            )
        return [
            Listed(Address.parse(each["url"]), str(each["boot"]), str(each.get("log") or ""))
            for each in data["servers"]
            if each["state"] == "ready"
        ]
    except SettingError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise SettingError(f"--servers is not a list of servers: {NAME_A_LIST}.", path) from error


@dataclass
class Admitted:
    """What a server can run; `folders` are those of its models that are on this machine."""

    checker: Checker
    folders: set[Path]
    _paths: dict[str, list[Path]] = field(default_factory=dict)

    @property
    def info(self) -> Mapping[str, Any]:
        return self.checker.info

    def takes(self, job: Job) -> dict[str, Any] | None:
        """Tells why it cannot run a job; None where it can."""
        try:
            self.checker.check(job.graph)
        except SettingError as error:
            return failure("refused", str(error))
        return None

    def local_files(self, graph: Graph) -> dict[str, list[int]]:
        """Returns {path: `file_state`} of the models that a graph loads."""
        found: dict[str, list[int]] = {}
        for text in loaded_names(graph):
            # On a network disk each look takes its time.
            paths = self._paths.get(text) or [folder / text for folder in self.folders]
            here = {path: state for path in paths if (state := file_state(path))}
            if here:
                self._paths.setdefault(text, list(here))
            found |= {str(path): state for path, state in here.items()}
        return found


@dataclass
class Admission:
    """Lets servers in; those that answer /object_info alike share a checker."""

    notify: Callable[[str], None]
    versions: dict[str, set[str]] = field(default_factory=dict)  # {of ComfyUI: its servers}
    _checkers: dict[bytes, Checker] = field(default_factory=dict)
    _classes: dict[str, Any] = field(default_factory=dict)

    async def admit(self, name: str, server: Server) -> Admitted:
        data = await server.object_info()
        try:
            stats = await server.stats()
        except AnswerError:  # a proxy that lets no one see it
            stats = {}
        version = str((stats.get("system") or {}).get("comfyui_version") or "unknown")
        digest = hashlib.sha256(data).digest()
        if digest not in self._checkers:
            # Some megabytes: other servers must not be taken for dead meanwhile.
            self._checkers[digest] = Checker(await asyncio.to_thread(self._parsed, data), version)
        self._compare(name, version)
        folders = set(filter(os.path.isdir, await server.model_folders()))
        return Admitted(self._checkers[digest], folders)

    def _parsed(self, data: bytes) -> dict[str, Any]:
        """Shares the equal classes of servers that differ in a few, as by the images they list."""
        return {
            name: self._classes.setdefault(json.dumps(described), described)
            for name, described in json.loads(data).items()
        }

    def _compare(self, name: str, version: str) -> None:
        for names in self.versions.values():
            names.discard(name)
        new = version not in self.versions
        self.versions.setdefault(version, set()).add(name)
        facts = [f"{each}: {', '.join(sorted(x))}" for each, x in self.versions.items() if x]
        if new and len(facts) > 1:
            told = "; ".join(facts)
            self.notify(
                f"the servers run different versions of ComfyUI, so images may differ ({told})"
            )


class Checker:
    """Checks graphs for all servers that give the same object_info, of a version of ComfyUI."""

    def __init__(self, object_info: Mapping[str, Any], version: str = "unknown") -> None:
        self.info, self._version = object_info, version
        self._known: dict[str, dict[str, NodeInput] | None] = {}

    def check(self, graph: Graph) -> None:
        """Finds what the server lacks or ignores: nodes, files, ends of links, inputs of ours.
        Values in nodes of other packs may have rules that object_info does not show. Raises
        SettingError with a line for each problem.
        """
        problems = [
            self._missing(graph, n) for n in graph if graph[n]["class_type"] not in self.info
        ]
        waiting = [n for n in graph if self._class(graph[n]).get("output_node")]
        needed: dict[str, dict[str, NodeInput]] = {}
        while waiting:
            node = waiting.pop()
            if node in needed:
                continue
            known = needed[node] = self._inputs(graph[node]) or {}
            wired = (source(graph, v) for name, v in graph[node]["inputs"].items() if name in known)
            waiting += filter(None, wired)
        for node in graph:
            if node in needed and self._class(graph[node]):
                problems += self._problems(graph, node, needed[node])
        if problems:
            raise SettingError(self._too_old(graph) or "\n".join(problems))

    def _too_old(self, graph: Graph) -> str | None:
        """Says what needs a newer ComfyUI, before it is downloaded for this one."""
        version = _numbers(self._version)
        for node, described in graph.items():
            for name, value in described["inputs"].items():
                member = member_of_file(value) if isinstance(value, str) else None
                needs = member.family.needs if member else ""
                if version and needs and version < _numbers(needs):
                    return (
                        f"{input_called(graph, node, name)} is {value!r}, which needs ComfyUI "
                        f"{needs} or newer. The server runs {self._version}: update ComfyUI there."
                    )
        return None

    def _class(self, node: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.info.get(node["class_type"]) or {}

    def _inputs(self, node: Mapping[str, Any]) -> dict[str, NodeInput] | None:
        kind = node["class_type"]
        if kind in self._known:
            return self._known[kind]
        found = node_inputs(self.info, node)
        if not found or not any(spec.opens for spec in found.values()):
            self._known[kind] = found
        return found

    def _missing(self, graph: Graph, node: str) -> str:
        who = called(graph, node)
        if not graph[node]["class_type"].startswith(OURS):
            return (
                f"{who} is missing on the server: install the node pack that has this node, or "
                "update ComfyUI there."
            )
        if any(name.startswith(OURS) for name in self.info):
            return f"{who} is missing on the server: {_update(graph[node])}."
        return f"{who} needs {PACK}, which is missing on the server: install it there."

    def _problems(self, graph: Graph, node: str, known: Mapping[str, NodeInput]) -> Iterator[str]:
        described = graph[node]
        ours = described["class_type"].startswith(OURS)
        module = str(self._class(described).get("python_module"))
        judged = ours or not module.startswith("custom_nodes.")
        for name, value in described["inputs"].items():
            if name not in known:
                if ours:
                    yield (
                        f"{called(graph, node)} has an input {name!r} that is unknown to the "
                        f"server: {_update(described)}."
                    )
            elif is_link(value):
                if source(graph, value) is None:
                    yield (
                        f"{name!r} of {called(graph, node)} is connected to a missing node "
                        f"({value}): connect the input again."
                    )
            elif judged and known[name].kind == "FLOAT" and _is_nan(value):  # passes its bounds
                yield f"{name!r} of {called(graph, node)} is nan: give a number."
            elif judged and (problem := _not_listed(graph, node, name, value, known[name])):
                yield problem


def _update(node: Mapping[str, Any]) -> str:
    version = meta(node).get("version")
    made = f" (the workflow was made with {version})" if version else ""
    return f"update {PACK} there{made}"


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


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
    """Says where to get a file that is not listed; other values a server names by itself."""
    if not spec.closed or _takes(spec, value):
        return None
    where, path = input_called(graph, node, name), PureWindowsPath(str(value))
    choices = {choice: PureWindowsPath(choice) for choice in map(str, spec.choices)}
    same = [choice for choice, other in choices.items() if other == path]
    if same:
        choice = min(same, key=lambda choice: choices[choice].as_posix() != path.as_posix())
        return (
            f"{where} is {value!r}, which the server lists as {choice!r}: add --set "
            f'"{where}={choice}".'
        )
    elsewhere = [choice for choice, other in choices.items() if other.name == path.name]
    if len(elsewhere) == 1:
        return (
            f"{where} is {value!r}, but the server has that file in another folder, "
            f'{elsewhere[0]!r}: if this is the same model, add --set "{where}={elsewhere[0]}".'
        )
    models = meta(graph[node]).get("models")
    for model in models if isinstance(models, list) else ():
        if isinstance(model, dict) and value == model.get("name"):
            return (
                f"{where} is {value!r}, which the server lacks: download {model.get('url')} to "
                f"models/{model.get('directory')} there."
            )
    if not spec.choices:
        return (
            f"{where} is {shortened(str(value))}, but the server has no such file: put the file "
            "there."
        )
    if not spec.opens:
        return None
    # Which the server finds only when the node runs, as inputs that are missing.
    names = nearest(str(value), map(str, spec.choices))
    return f"{where} is {shortened(str(value))}, which is not a choice: use {listed(names)}."
