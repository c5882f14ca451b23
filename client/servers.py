"""The servers of a run: their addresses, a file that lists them, and what each of them can run."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SettingError
from .graph.check import Checker
from .graph.workflow import Graph, loaded_names
from .journal import file_state
from .scheduler import Job
from .server import Server, failure
from .transport import Address, AnswerError

# Of `qwen-l40s fleet`'s file.
VERSION = 1


# Tells why a server cannot run a job; None where it can.
Takes = Callable[[Job], "dict[str, Any] | None"]


@dataclass(frozen=True)
class Listed:
    """A server by its address.

    Attributes:
        boot: which process it is, where the file says so; else empty.
        log: the path of its log; empty where it is not known.
    """

    address: Address
    boot: str = ""
    log: str = ""


@dataclass
class ServerList:
    """The servers that were named, and those of a file, which is read anew when it changes.

    Attributes:
        addresses: as typed.
        file: JSON of `qwen-l40s fleet`, or a text with an address on each line; None for none.
        notify: gets a line for an address that is named twice.
    """

    addresses: Sequence[str] = ()
    file: Path | None = None
    notify: Callable[[str], None] = lambda line: None
    _stamp: tuple[int, int] | None = None

    def read(self) -> list[Listed]:
        """All servers, each once.

        Raises:
            SettingError: an address or the file is wrong.
        """
        found = [Listed(Address.parse(text)) for text in self.addresses]
        if self.file is not None:
            self._stamp = self._changed()
            found += _file(self.file)
        once: dict[str, Listed] = {}
        for each in found:
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
            self.notify(f"{error} The servers stay as they were.")
            return None

    def _changed(self) -> tuple[int, int] | None:
        try:
            stat = self.file.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino


def _file(path: Path) -> list[Listed]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise SettingError(
            f"--servers cannot be read ({reason}): name the servers.json of qwen-l40s fleet, or a "
            "text with an address on each line.",
            path,
        ) from error
    if not text.lstrip().startswith("{"):
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        return [Listed(Address.parse(line)) for line in lines if line]
    try:
        data = json.loads(text)
        if data["version"] > VERSION:
            raise SettingError(
                "a newer version of Qwen-Image L40S wrote this list of servers: update this one.",
                path,
            )
        return [
            Listed(Address.parse(each["url"]), str(each["boot"]), str(each.get("log") or ""))
            for each in data["servers"]
            if each["state"] == "ready"
        ]
    except SettingError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SettingError(
            "--servers is no list of servers: name the servers.json of qwen-l40s fleet, or a text "
            "with an address on each line.",
            path,
        ) from error


@dataclass
class Admission:
    """Lets servers in, and says which jobs each of them can run.

    Servers that answer /object_info alike are checked once.

    Attributes:
        headers: sent with every request.
        versions: {ComfyUI version: servers that have it}.
    """

    headers: Mapping[str, str] = field(default_factory=dict)
    notify: Callable[[str], None] = lambda line: None
    versions: dict[str, set[str]] = field(default_factory=dict)
    _checkers: dict[bytes, tuple[Mapping[str, Any], Checker]] = field(default_factory=dict)
    _classes: dict[str, Any] = field(default_factory=dict)
    _of: dict[str, bytes] = field(default_factory=dict)
    _folders: dict[str, set[Path]] = field(default_factory=dict)
    _paths: dict[tuple[str, str], list[Path]] = field(default_factory=dict)

    def object_info(self, name: str) -> Mapping[str, Any]:
        """Returns what a server that was let in answered."""
        return self._checkers[self._of[name]][0]

    def local_files(self, name: str, graph: Graph) -> dict[str, list[int]]:
        """{path: `file_state`} of the models that a graph loads on a server that was let in, where
        its folders are on this machine.
        """
        found = {}
        for text in loaded_names(graph):
            # On a network disk each look takes its time.
            paths = self._paths.get((name, text)) or [f / text for f in self._folders[name]]
            here = {path: state for path in paths if (state := file_state(path))}
            if here:
                self._paths.setdefault((name, text), list(here))
            found |= {str(path): state for path, state in here.items()}
        return found

    async def admit(self, name: str, server: Server) -> Takes:
        """What tells why a server cannot run a job; None where it can.

        Raises:
            ServerError: it does not answer, or is no ComfyUI.
        """
        data = await server.object_info()
        digest = self._of[name] = hashlib.sha256(data).digest()
        if digest not in self._checkers:
            # Some megabytes: other servers must not be taken for dead meanwhile.
            info = await asyncio.to_thread(self._parsed, data)
            self._checkers[digest] = (info, Checker(info))
        checker = self._checkers[digest][1]
        try:
            stats = await server.stats()
        except AnswerError:  # a proxy that lets no one see it
            stats = {}
        self._compare(name, stats)
        self._folders[name] = set(filter(os.path.isdir, await server.model_folders()))

        def takes(job: Job) -> dict[str, Any] | None:
            try:
                checker.check(job.graph)
            except SettingError as error:
                return failure("refused", str(error))
            return None

        return takes

    def _parsed(self, data: bytes) -> dict[str, Any]:
        """Shares the equal classes of servers that differ in a few, as by the images they list."""
        return {
            name: self._classes.setdefault(json.dumps(described), described)
            for name, described in json.loads(data).items()
        }

    def _compare(self, name: str, stats: Mapping[str, Any]) -> None:
        version = str((stats.get("system") or {}).get("comfyui_version") or "unknown")
        for names in self.versions.values():
            names.discard(name)
        new = version not in self.versions
        self.versions.setdefault(version, set()).add(name)
        others = {each: names for each, names in self.versions.items() if names}
        if new and len(others) > 1:
            facts = "; ".join(
                f"{each}: {', '.join(sorted(names))}" for each, names in others.items()
            )
            self.notify(f"the servers run different ComfyUIs, whose images may differ ({facts})")
