"""A real ComfyUI server in a process of its own, with a base folder of its own, and a client.

The pack is linked into its custom_nodes under a name with a dash and a dot, which an import path
could not hold, unless a test names the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from comfyui_host import comfyui_python
from websockets.sync.client import connect

ROOT = Path(__file__).resolve().parent.parent
PACK = "comfyui-qwen-image-l40s.main"
START_SECONDS = 150
RUN_SECONDS = 150
STOP_SECONDS = 20


@dataclass
class Run:
    """What came of one prompt: websocket messages in order, and the history entry."""

    prompt_id: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    history: dict[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> str:
        return self.history["status"]["status_str"]

    @property
    def executed(self) -> list[str]:
        """The nodes that really ran, not those whose result was kept."""
        return [
            message["data"]["node"]
            for message in self.messages
            if message["type"] == "executing" and message["data"].get("node")
        ]

    @property
    def error(self) -> dict[str, Any]:
        return next(m["data"] for m in self.messages if m["type"] == "execution_error")

    def text(self, node: str) -> str:
        return self.history["outputs"][node]["text"][0]


class Server:
    """Starts ComfyUI on a free port; `base` holds custom_nodes, models, input and output.

    Args:
        arguments: more of ComfyUI's command line.
        pack: the folder name under which the pack is installed.
    """

    def __init__(self, comfyui: Path, base: Path, *arguments: str, pack: str = PACK) -> None:
        self.base = base
        nodes = base / "custom_nodes"
        nodes.mkdir(parents=True, exist_ok=True)
        if not (nodes / pack).exists():
            (nodes / pack).symlink_to(ROOT, target_is_directory=True)
        for folder in ("diffusion_models", "text_encoders", "vae", "loras", "diffusers"):
            (base / "models" / folder).mkdir(parents=True, exist_ok=True)
        self.port = _free_port()
        self.log = base / "server.log"
        command = [
            str(comfyui_python(comfyui)),
            str(comfyui / "main.py"),
            "--cpu",
            "--disable-auto-launch",
            *("--port", str(self.port), "--base-directory", str(base)),
            *("--database-url", "sqlite:///:memory:"),
            *arguments,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=base, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30)
        try:
            self._wait()
        except BaseException:  # nobody else can stop it
            self.stop()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"ComfyUI stopped:\n{self.log.read_text()[-4000:]}"
            try:
                self.client.get("/system_stats").raise_for_status()
                return
            except httpx.TransportError:
                time.sleep(0.2)
        raise AssertionError(f"ComfyUI did not start:\n{self.log.read_text()[-4000:]}")

    def stop(self) -> None:
        self.client.close()
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def post(self, graph: dict[str, Any], client_id: str = "test") -> httpx.Response:
        return self.client.post("/prompt", json={"prompt": graph, "client_id": client_id})

    def run(self, graph: dict[str, Any], *, cancel_at: str | None = None) -> Run:
        """Posts a graph and follows it to its end.

        Args:
            cancel_at: interrupts when the first progress of this node arrives.
        """
        client_id = uuid.uuid4().hex
        address = f"ws://127.0.0.1:{self.port}/ws?clientId={client_id}"
        with connect(address, max_size=None, open_timeout=20) as socket:
            answer = self.post(graph, client_id)
            assert answer.status_code == 200, answer.text
            assert answer.json()["node_errors"] == {}, answer.text
            run = Run(answer.json()["prompt_id"])
            self._follow(socket, run, cancel_at)
        run.history = self._history(run.prompt_id)
        return run

    def _follow(self, socket: Any, run: Run, cancel_at: str | None) -> None:
        deadline = time.monotonic() + RUN_SECONDS
        while time.monotonic() < deadline:
            frame = socket.recv(timeout=RUN_SECONDS)
            if isinstance(frame, bytes):
                continue
            message = json.loads(frame)
            data = message.get("data", {})
            if data.get("prompt_id") != run.prompt_id:
                continue
            run.messages.append(message)
            if message["type"] == "progress" and data["node"] == cancel_at:
                self.client.post("/interrupt", json={"prompt_id": run.prompt_id})
                cancel_at = None
            if message["type"] in (
                "execution_success",
                "execution_error",
                "execution_interrupted",
            ):
                return
        raise AssertionError(f"the prompt did not end:\n{self.log.read_text()[-4000:]}")

    def _history(self, prompt_id: str) -> dict[str, Any]:
        # The entry is written just after the last message.
        for _ in range(100):
            entry = self.client.get(f"/history/{prompt_id}").json().get(prompt_id)
            if entry:
                return entry
            time.sleep(0.05)
        raise AssertionError(f"no history of {prompt_id}")

    def image(self, run: Run, node: str) -> bytes:
        """The first image that a SaveImage or PreviewImage node wrote."""
        entry = run.history["outputs"][node]["images"][0]
        answer = self.client.get("/view", params=entry)
        answer.raise_for_status()
        return answer.content


def _free_port() -> int:
    """Not one that the system gives to whoever asks for any: until the server takes it, seconds
    pass in which another could get it.
    """
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")
