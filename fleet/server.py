"""Runs one ComfyUI server of a fleet: starts, warms up, watches, restarts and drains it.

The kernel kills the process when the thread that started it ends, so that no orphan holds the GPU.
What its nodes have started is found by a variable of the environment, and ends with the server.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SettingError
from ..files import private
from .state import (
    DRAINING,
    FAILED,
    READY,
    RESTARTING,
    STARTING,
    STOPPED,
    WARMING,
    ServerState,
    get_json,
    try_port,
)

PACK = Path(__file__).resolve().parent.parent
# Importing torch from a cold disk takes minutes.
START_SECONDS = 600.0
# A server that loads a model holds Python's lock and answers late; one that is stopped never does.
SILENT_SECONDS = 120.0
# Probing more often has been seen to slow servers that restart.
PROBE_SECONDS, START_PROBE_SECONDS = 10.0, 0.5
# Between two starts; doubled for each further one, and the first again after a time of health.
FIRST_PAUSE, LONGEST_PAUSE, HEALTHY_SECONDS = 1.0, 60.0, 300.0
# A server that was never ready is not started more often.
MOST_STARTS = 3
# In the environment of a server and of what its nodes start: its folder.
MARK = "QWEN_L40S_FLEET"
TICK_SECONDS = 0.2
END_SECONDS = 20.0
# A queue stays empty for this long before its server ends: clients fetch their last images.
SETTLED_SECONDS = 5.0
# What runs before ComfyUI, in the same process. It is a program of its own, not code between fork
# and exec, where a fleet of many threads, or Ray's, could hang.
GUARD = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
os.setpgid(0, 0)
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):  # it ended just before
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class ServerPlan:
    comfyui: Path
    python: Path
    folder: Path
    arguments: Sequence[str] = ()
    warm_up: Path | None = None  # a workflow in API form, run before the server is ready
    settings: Sequence[str] = ()
    drain: float = 600.0  # seconds to wait for a server's jobs before it is stopped

    def command(self, port: int, card: str) -> list[str]:
        """Writes ComfyUI's for a card: an index, "cpu", or empty for what the environment shows."""
        own = self.folder / str(port)
        where = {"cpu": ["--cpu"], "": []}.get(card, ["--cuda-device", card])
        return [
            *(str(self.python), str(self.comfyui / "main.py")),
            "--disable-auto-launch",
            *("--port", str(port), "--output-directory", str(own / "output")),
            *("--temp-directory", str(own / "temp"), "--database-url", "sqlite:///:memory:"),
            *where,
            *self.arguments,
        ]

    def warm_up_command(self, url: str, output: str) -> list[str]:
        """Writes `submit` in ComfyUI's Python; samplers take one step."""
        warm_up: Any = self.warm_up
        graph = json.loads(warm_up.read_text(encoding="utf-8"))
        steps = [
            f"{node}.steps=1"
            for node, described in graph.items()
            if isinstance(described.get("inputs", {}).get("steps"), int)
        ]
        settings = [part for each in (*steps, *self.settings) for part in ("--set", each)]
        command = [str(self.python), str(PACK), "submit", str(self.warm_up), "--server", url]
        return [*command, "--output", output, *settings]


class FleetServer:
    """Keeps one server running, in a thread of its own."""

    def __init__(
        self,
        plan: ServerPlan,
        port: int,
        card: str,
        *,
        host: str = "127.0.0.1",
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        # stopping: set to drain the server and end the thread.
        # hurry: set to end without draining.
        self.stopping, self.hurry = threading.Event(), threading.Event()
        self._plan, self._port = plan, port
        self._changed = changed
        own = plan.folder / str(port)
        own.mkdir(parents=True, exist_ok=True)
        self.state = ServerState(f"http://{host}:{port}", card, log=str(own / "server.log"))
        self._process: subprocess.Popen[bytes] | None = None
        self._probe = self._heard = 0.0
        self._thread = threading.Thread(target=self._keep, name=f"server {port}")

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float | None = None) -> bool:
        """Waits; returns whether the thread has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _keep(self) -> None:
        pause, was_ready = FIRST_PAUSE, False
        try:
            while not self.stopping.is_set():
                since = time.monotonic()
                try:
                    self._start()
                    self._warm_up()
                    if not self.stopping.is_set():
                        was_ready, since = True, time.monotonic()
                        self._set(READY, error="")
                    self._watch()
                except SettingError as error:  # of the warm-up: the next one would fail too
                    self._end()
                    self._set(FAILED, error=str(error))
                    return
                except ServerEndedError as fault:
                    self._end()
                    if not was_ready and self.state.starts >= MOST_STARTS:
                        self._set(FAILED, error=str(fault))
                        return
                    self._set(RESTARTING, error=str(fault))
                if time.monotonic() - since > HEALTHY_SECONDS:
                    pause = FIRST_PAUSE
                self.stopping.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            self._drain()
        except Exception as error:  # nobody else would say it
            self._set(FAILED, error=repr(error))
            raise
        finally:
            self._end()
            if self.state.state != FAILED:
                self._set(STOPPED)

    def _start(self) -> None:
        log = Path(self.state.log)
        end_left(log.parent)
        command = self._plan.command(self._port, self.state.card)
        self.state.starts += 1
        # Another program there would answer in the server's place.
        host, _, port = self.state.url.removeprefix("http://").rpartition(":")
        try:
            try_port(host, int(port))
        except OSError as error:
            raise ServerEndedError(f"port {port} is in use ({error.strerror}).") from error
        with contextlib.suppress(FileNotFoundError):  # which says why the last one ended
            log.replace(log.with_suffix(".log.1"))
        with open(log, "wb", opener=private) as file:
            pipes = {"stdout": file, "stderr": subprocess.STDOUT}
            # The numbers of nvidia-smi; by itself CUDA counts the fastest card first.
            environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ}
            environment[MARK] = str(log.parent)
            self._process = _guarded(command, cwd=log.parent, env=environment, **pipes)
        self.state.boot, self.state.pid = uuid.uuid4().hex, self._process.pid
        self._set(STARTING)
        give_up = time.monotonic() + START_SECONDS
        while not self.ask("/system_stats", 2.0):
            self._check_alive()
            if time.monotonic() > give_up:
                raise ServerEndedError(
                    f"the server did not answer within {START_SECONDS:.0f} s ({log})."
                )
            if self.stopping.wait(START_PROBE_SECONDS):
                return
        self._probe = self._heard = time.monotonic()

    def _warm_up(self) -> None:
        if self._plan.warm_up is None or self.stopping.is_set():
            return
        self._set(WARMING)
        # A folder of its own each time: `submit` does not run a job again whose images are there.
        with tempfile.TemporaryDirectory(prefix="warm-up-") as output:
            command = self._plan.warm_up_command(self.state.url, output)
            with tempfile.TemporaryFile() as errors:
                submit = _guarded(command, stdout=subprocess.DEVNULL, stderr=errors)
                try:
                    while submit.poll() is None and not self.hurry.wait(TICK_SECONDS):
                        self._listen()
                finally:
                    _end(submit)
                errors.seek(0)
                said = errors.read().decode("utf-8", "replace").strip()
        self._check_alive()
        if submit.returncode in (1, 2):
            raise SettingError(f"the warm-up failed: {said.removeprefix('qwen-l40s: error: ')}")
        if submit.returncode and not self.hurry.is_set():
            raise ServerEndedError(f"the warm-up ended early: {said}")

    def _watch(self) -> None:
        while not self.stopping.wait(TICK_SECONDS):
            self._listen()

    def _listen(self) -> None:
        self._check_alive()
        now = time.monotonic()
        if now >= self._probe:
            if self.ask("/system_stats", PROBE_SECONDS):
                self._heard = time.monotonic()
            elif now - self._heard > SILENT_SECONDS:
                raise ServerEndedError(f"the server did not answer for {now - self._heard:.0f} s.")
            self._probe = time.monotonic() + PROBE_SECONDS

    def _drain(self) -> None:
        self._set(DRAINING)
        busy = time.monotonic()
        give_up = busy + self._plan.drain
        while self._process is not None and self._process.poll() is None:
            answer = self.ask("/prompt", 5.0)
            if answer is None or answer["exec_info"]["queue_remaining"]:
                busy = time.monotonic()
            idle = time.monotonic() - busy > SETTLED_SECONDS
            if idle or time.monotonic() > give_up or self.hurry.wait(TICK_SECONDS):
                return

    def _end(self) -> None:
        if self._process is not None:
            _end(self._process)
            end_left(Path(self.state.log).parent)

    def _check_alive(self) -> None:
        if self._process is not None and _has_ended(self._process):
            _end(self._process)
            code = self._process.returncode
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise ServerEndedError(
                f"the server ended with {how}: {self._last_line()} ({self.state.log})."
            )

    def _last_line(self) -> str:
        text = re.sub(
            r"\x1b\[[\d;]*m", "", Path(self.state.log).read_text(errors="replace")[-4000:]
        )
        lines = text.splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")

    def ask(self, path: str, seconds: float) -> Any:
        """Asks for JSON; returns None where the server does not answer."""
        with contextlib.suppress(OSError, ValueError):
            return get_json(f"{self.state.url}{path}", seconds)
        return None

    def _set(self, state: str, *, error: str | None = None) -> None:
        self.state.state = state
        if error is not None:
            self.state.error = error
        self._changed()


def end_left(folder: Path) -> None:
    """Ends what a server has started and left, or each of a fleet, in folders named by ports."""
    mark = re.compile(re.escape(os.fsencode(f"{MARK}={folder}")) + rb"(/\d+)?")
    for process in {*Path("/proc").glob("[0-9]*")} - {Path(f"/proc/{os.getpid()}")}:
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for variable in (process / "environ").read_bytes().split(b"\0"):
                if mark.fullmatch(variable):
                    os.kill(int(process.name), signal.SIGKILL)


class ServerEndedError(Exception):
    """The server ended or hangs; it is started again."""


def _guarded(command: Sequence[str], **pipes: Any) -> subprocess.Popen[bytes]:
    guard = [sys.executable, "-I", "-S", "-c", GUARD, str(os.getpid()), *command]
    return subprocess.Popen(guard, stdin=subprocess.DEVNULL, **pipes)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Leaves its number taken, so that it is no other group's."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is not None:
        return
    _signal(process, signal.SIGTERM)
    give_up = time.monotonic() + END_SECONDS
    while not _has_ended(process) and time.monotonic() < give_up:
        time.sleep(TICK_SECONDS)
    _signal(process, signal.SIGKILL)  # also a stopped one
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:  # it has not made its group yet
        process.send_signal(number)
