"""A real ComfyUI server in a process of its own, with a base folder of its own, and a client."""

from __future__ import annotations

import json
import os
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from comfyui_host import comfyui_python
from websockets.sync.client import connect

from qwen_l40s.bench.server import PACK, ComfyUIServer
from qwen_l40s.machine.settings import NAME, VERSION

ROOT = Path(__file__).resolve().parent.parent
RUN_SECONDS = 600  # a guard against what hangs


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


class Server(ComfyUIServer):
    """Runs on the CPU in one thread.

    Args:
        arguments: more of ComfyUI's command line.
        pack: the folder name under which the pack is installed.
    """

    def __init__(self, comfyui: Path, base: Path, *arguments: str, pack: str = PACK) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        python = comfyui_python(comfyui)
        settings = base / "user" / NAME
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text(json.dumps({"version": VERSION, "cache": str(base / "cache")}))
        more = ("--cpu", *arguments)
        super().__init__(comfyui, python, base, *more, pack=pack, environment=environment)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=RUN_SECONDS)

    def stop(self) -> None:
        if hasattr(self, "client"):
            self.client.close()
        super().stop()

    def post(self, graph: dict[str, Any], client_id: str = "test") -> httpx.Response:
        return self.client.post("/prompt", json={"prompt": graph, "client_id": client_id})

    def run(self, graph: dict[str, Any], *, cancel_at: str | None = None) -> Run:
        """Posts a graph and follows it to its end.

        Args:
            cancel_at: interrupts when the first progress of this node arrives.
        """
        client_id = uuid.uuid4().hex
        address = f"ws://127.0.0.1:{self.port}/ws?clientId={client_id}"
        with connect(address, max_size=None, open_timeout=RUN_SECONDS) as socket:
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
        raise AssertionError(f"the prompt did not end:\n{self.tail()}")

    def _history(self, prompt_id: str) -> dict[str, Any]:
        # The entry is written just after the last message.
        for _ in range(100):
            entry = self.client.get(f"/history/{prompt_id}").json().get(prompt_id)
            if entry:
                return entry
            time.sleep(0.05)
        raise AssertionError(f"no history of {prompt_id}")

    def image(self, run: Run, node: str) -> bytes:
        entry = run.history["outputs"][node]["images"][0]
        answer = self.client.get("/view", params=entry)
        answer.raise_for_status()
        return answer.content
