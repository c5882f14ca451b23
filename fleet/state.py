"""servers.json: what a fleet's servers are and how they fare, for `submit` and for people."""

from __future__ import annotations

import json
import os
import socket
import threading
import urllib.request
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SettingError
from ..files import lock

VERSION = 1
NAME, LOCK = "servers.json", "fleet.lock"

STARTING = "starting"  # the process is there and does not answer yet
WARMING = "warming"  # it answers, and runs the warm-up
READY = "ready"
RESTARTING = "restarting"  # it ended, and is started again after a pause
DRAINING = "draining"  # it ends its jobs and takes no more
STOPPED = "stopped"
FAILED = "failed"  # it is not started again; `error` says why


@dataclass
class ServerState:
    """One server.

    Attributes:
        url: its address.
        card: the index of its card, or "cpu".
        boot: another one at each start of the process.
        starts: how often it was started.
        log: path of what it prints.
        error: why it is not ready; empty while nothing is wrong.
    """

    url: str
    card: str
    state: str = STARTING
    boot: str = ""
    pid: int = 0
    starts: int = 0
    log: str = ""
    error: str = ""
    machine: str = field(default_factory=socket.gethostname)


class StateFile:
    """Writes servers.json, whole or not at all; one fleet a folder.

    Attributes:
        path: of the file.

    Raises:
        SettingError: another fleet uses the folder, or nothing can be written there.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._writing = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / LOCK).open("ab")
            free = lock(self._lock)
        except OSError as error:
            raise SettingError(
                f"--folder cannot be used ({error.strerror}): name one on a disk of this machine.",
                folder,
            ) from error
        if not free:
            self._lock.close()
            raise SettingError(
                "another fleet runs in this folder: stop it, or name another --folder.", folder
            )

    def write(self, servers: list[ServerState]) -> None:
        """Replaces the file."""
        text = json.dumps({"version": VERSION, "servers": [asdict(each) for each in servers]})
        with self._writing:
            new = self.path.with_suffix(".new")
            new.write_text(text, encoding="utf-8")
            os.replace(new, self.path)

    def close(self) -> None:
        """Lets another fleet use the folder."""
        self._lock.close()


def get_json(url: str, seconds: float) -> Any:
    """What a server of the fleet answers, past any proxy.

    Raises:
        OSError, ValueError: it does not answer in time, or not in JSON.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=seconds) as answer:
        return json.load(answer)


def try_port(host: str, port: int) -> None:
    """Raises OSError or OverflowError where a server could not listen."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def is_running(path: Path) -> bool:
    """Whether a fleet of this machine has the file; as far as this machine can tell."""
    try:
        with (path.parent / LOCK).open("rb") as file:
            return not lock(file)
    except OSError:  # of another machine, or copied
        return True


def read_states(path: Path) -> list[ServerState]:
    """The servers of a fleet's file.

    Raises:
        SettingError: there is none, or it is no such file.
    """
    try:
        servers = json.loads(path.read_text(encoding="utf-8"))["servers"]
        return [ServerState(**each) for each in servers]
    except OSError as error:
        raise SettingError(
            f"no fleet has written here ({error.strerror}): start one with `qwen-l40s fleet`, or "
            "name its --folder.",
            path,
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        raise SettingError(
            "this is not the servers.json of a fleet of this version.", path
        ) from error
