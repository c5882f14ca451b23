"""Runs a real ComfyUI server in a process of its own, for benchmarks and tests."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UnavailableError
from ..machine.packages import find_comfyui

ROOT = Path(__file__).resolve().parent.parent
# A name with a dash and a dot, which an import path could not hold.
PACK = "comfyui-qwen-image-l40s.main"
START_SECONDS = 600  # a guard against what hangs
STOP_SECONDS = 20
# Asked rarely: the server answers in the interpreter that runs the prompt, and tells times itself.
PROMPT_SECONDS, POLL_SECONDS = 600, 0.2


def comfyui_folder() -> Any:
    """Finds ComfyUI: the folder that COMFYUI_PATH names, else as the package does."""
    named = os.environ.get("COMFYUI_PATH")
    return Path(named).expanduser() if named else find_comfyui()


class ComfyUIServerError(UnavailableError):
    """The server did not start, stopped, refused a graph or took too long; has its last lines."""


class ComfyUIServer:
    """Starts ComfyUI on a free port with this pack, and waits until it answers."""

    def __init__(
        self,
        comfyui: Path,
        python: Path | str,
        base: Path,
        *arguments: str,
        pack: str = PACK,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.base, self.log = base, base / "server.log"
        nodes = base / "custom_nodes"
        nodes.mkdir(parents=True, exist_ok=True)
        if not (nodes / pack).exists():
            (nodes / pack).symlink_to(ROOT, target_is_directory=True)
        for folder in ("diffusion_models", "text_encoders", "vae", "loras", "diffusers"):
            (base / "models" / folder).mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        command = [
            *(str(python), str(comfyui / "main.py"), "--disable-auto-launch"),
            *("--port", str(self.port), "--base-directory", str(base)),
            *("--database-url", "sqlite:///:memory:"),
            *arguments,
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=base, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        try:
            self._wait()
        except BaseException:  # nobody else can stop it
            self.stop()
            raise

    def __enter__(self) -> ComfyUIServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def ask(self, path: str, data: Any = None) -> Any:
        """Gets what a route answers, or posts to it; raises OSError where nobody answers."""
        body = None if data is None else json.dumps(data).encode()
        address = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or "null")

    def begin(self, graph: dict[str, Any]) -> str:
        """Queues a graph; returns its prompt's id, or raises ComfyUIServerError if refused."""
        try:
            return self.ask("/prompt", {"prompt": graph})["prompt_id"]
        except urllib.error.HTTPError as error:
            said = error.read().decode()[:2000]
            raise ComfyUIServerError(f"ComfyUI refuses the graph: {said}") from None

    def end(self, prompt: str) -> dict[str, Any]:
        """Waits for a prompt; returns its entry in the history, or raises ComfyUIServerError."""
        deadline = time.monotonic() + PROMPT_SECONDS
        while not (entry := self.ask(f"/history/{prompt}").get(prompt)):
            self.check_alive()
            if time.monotonic() > deadline:
                raise ComfyUIServerError(f"no answer in {PROMPT_SECONDS} s:\n{self.tail()}")
            time.sleep(POLL_SECONDS)
        if failure := dict(entry["status"]["messages"]).get("execution_error"):
            raise ComfyUIServerError(f"{failure['node_type']}: {failure['exception_message']}")
        return entry

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def check_alive(self) -> None:
        """Raises ComfyUIServerError where the process has ended."""
        code = self.process.poll()
        if code is not None:
            raise ComfyUIServerError(f"ComfyUI ended with {code}:\n{self.tail()}")

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self.ask("/system_stats")
                return
            self.check_alive()
            time.sleep(0.2)
        raise ComfyUIServerError(f"ComfyUI did not start in {START_SECONDS} s:\n{self.tail()}")


def free_port() -> int:
    """Finds a port that the system hands out to no other program meanwhile."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise ComfyUIServerError(
        "no port between 10000 and 32000 is free: end other programs that use them"
    )


def seconds_of(entry: dict[str, Any]) -> float:
    """Returns the seconds from a prompt's first node to its last, as the server reports them."""
    told = dict(entry["status"]["messages"])
    return (told["execution_success"]["timestamp"] - told["execution_start"]["timestamp"]) / 1e3
