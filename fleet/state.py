"""Writes and reads servers.json: which servers a fleet has and their states, for `submit` and for
people; and asks servers what they do now.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SettingError
from ..files import lock, private

VERSION = 1
NAME, LOCK = "servers.json", "fleet.lock"

STARTING = "starting"  # the process is there and does not answer yet
WARMING = "warming"  # it answers, and runs the warm-up
READY = "ready"
RESTARTING = "restarting"  # it ended, and is started again after a pause
DRAINING = "draining"  # it ends its jobs and takes no more
STOPPED = "stopped"
FAILED = "failed"  # it is not started again; `error` says why

ASK_SECONDS = 5.0
HOUR = 3600.0
# Of the newest prompts: each comes with its graph, some 10 KB, and ComfyUI answers nobody else
# while it writes them.
HISTORY = 100


@dataclass
class ServerState:
    url: str
    card: str  # the index of its card, or "cpu"
    state: str = STARTING
    boot: str = ""
    pid: int = 0
    starts: int = 0
    log: str = ""
    error: str = ""
    machine: str = field(default_factory=socket.gethostname)


class StateFile:
    """Writes servers.json and tells what changed; raises SettingError for a folder in use."""

    def __init__(self, folder: Path, notify: Callable[[str], None]) -> None:
        self.path = folder / NAME
        self._notify = notify
        self._said: dict[str, str] = {}
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
        text = json.dumps({"version": VERSION, "servers": [asdict(each) for each in servers]})
        with self._writing:
            try:
                new = self.path.with_suffix(".new")
                with open(new, "w", encoding="utf-8", opener=private) as file:
                    file.write(text)
                os.replace(new, self.path)
            except OSError as error:  # a full disk ends no server
                self._notify(f"{self.path} cannot be written ({error.strerror}): free disk space.")
            for each in servers:
                place = f" on {each.machine}" if each.machine != socket.gethostname() else ""
                fault = f": {each.error}" if each.state in (RESTARTING, FAILED) else ""
                card = "CPU" if each.card == "cpu" else f"GPU {each.card}"
                words = f"{each.url}{place} ({card}) {each.state}{fault}"
                if self._said.get(each.url) != words:
                    self._said[each.url] = words
                    self._notify(words)

    def close(self) -> None:
        self._lock.close()


def get_json(url: str, seconds: float) -> Any:
    """Returns what a server answers, past any proxy, or raises OSError or ValueError."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=seconds) as answer:
        return json.load(answer)


def try_port(host: str, port: int) -> None:
    """Raises OSError or OverflowError where a server could not listen."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def is_running(path: Path) -> bool:
    """Says whether a fleet has the file, as far as this machine can tell."""
    try:
        with (path.parent / LOCK).open("rb") as file:
            return not lock(file)
    except OSError:  # of another machine, or copied
        return True


def read_states(path: Path) -> list[ServerState]:
    """Returns a file's servers, all stopped if the fleet was killed; raises SettingError."""
    try:
        servers = json.loads(path.read_text(encoding="utf-8"))["servers"]
        found = [ServerState(**each) for each in servers]
        for each in found if not is_running(path) else ():
            each.state = FAILED if each.state == FAILED else STOPPED
        return found
    except OSError as error:
        raise SettingError(
            f"there is no fleet in this folder ({error.strerror}): start one with `qwen-l40s "
            "fleet`, or name its --folder.",
            path,
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        sentence = "this is not a servers.json of this version's fleet: start the fleet anew."
        raise SettingError(sentence, path) from error


@dataclass
class ServerStatus:
    server: ServerState
    job: str = ""
    waiting: int = 0
    images_per_hour: float = 0.0  # of the last hour, or since the oldest prompt in the history
    failures: int = 0

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        return found.pop("server") | found


def ask_all(servers: Sequence[ServerState]) -> list[ServerStatus]:
    """Asks all servers at once; one that does not answer has an empty row."""
    with ThreadPoolExecutor(max(1, min(32, len(servers)))) as pool:
        return list(pool.map(ask, servers))


def ask(server: ServerState) -> ServerStatus:
    status = ServerStatus(server)
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        queue = get_json(f"{server.url}/queue", ASK_SECONDS)
        status.job = next((item[1] for item in queue["queue_running"]), "")
        status.waiting = len(queue["queue_pending"])
        history = get_json(f"{server.url}/history?max_items={HISTORY}", ASK_SECONDS)
        status.images_per_hour, status.failures = rate(history, time.time())
    return status


def rate(history: dict[str, Any], now: float) -> tuple[float, int]:
    """Counts images an hour and failures of a history; `now` is its server's time since 1970."""
    first, images, failures = now, 0, 0
    for entry in history.values():
        messages = dict(entry["status"]["messages"])
        began = messages["execution_start"]["timestamp"] / 1000
        if began < now - HOUR:
            continue
        first = min(first, began)
        failures += entry["status"]["status_str"] != "success"
        images += sum(
            item.get("type") == "output"
            for output in entry["outputs"].values()
            for item in output.get("images", ())
        )
    return (images / max(now - first, 1.0) * HOUR if images else 0.0), failures
