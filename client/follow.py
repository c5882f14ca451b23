"""What a server tells about running prompts on its websocket: progress, and that one has ended.

It decides nothing: it may break at any time, and what ended stands in the server's history.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from .server import Server

# After a websocket was lost or refused, before the next.
PAUSE_SECONDS = 2.0
# It makes the server send no preview images in the older, larger form, should it send any.
FEATURES = {"type": "feature_flags", "data": {"supports_preview_metadata": True}}


@dataclass
class RunningPrompt:
    """How far a prompt is; `value` of `maximum` are the steps of the node that runs."""

    node: str | None = None
    value: float = 0
    maximum: float = 0
    finished: set[str] = field(default_factory=set)  # nodes that ran, or whose result was kept

    def take(self, kind: str, data: Mapping[str, Any]) -> None:
        """Takes in a message.

        Raises:
            LookupError, TypeError, ValueError, AttributeError: it has another form than ComfyUI's.
        """
        if kind == "execution_cached":
            self.finished.update(map(str, data["nodes"]))
        elif kind == "executing":
            self._at(data["node"], 0, 0)
        elif kind == "progress":
            self._at(data["node"], data["value"], data["max"])
        elif kind == "progress_state":
            for node, state in data["nodes"].items():
                # One that made others of itself runs under their ids; people know what they placed.
                node = state.get("display_node_id") or node
                if state["state"] == "finished":
                    self.finished.add(str(node))
                elif state["state"] == "running":
                    self._at(node, state["value"], state["max"])

    def _at(self, node: Any, value: Any, maximum: Any) -> None:
        if node is not None:
            self.node, self.value, self.maximum = str(node), float(value), float(maximum)


KINDS = ("execution_start", "execution_cached", "executing", "progress", "progress_state")


class Listener:
    """Listens to one server; reconnects, each time as another client.

    ComfyUI registers a socket under its client id, and drops a new one's registration when an old
    one of that id ends late (server.py, websocket_handler). With an id of its own a new socket is
    heard; what was queued before it shows no progress, and is found ended by the history.

    Args:
        changed: called when a prompt ended or failed, and when the socket was opened or lost.
        notify: gets a line where the server refuses websockets.

    Attributes:
        client_id: under which the next prompt is queued.
        connected: whether a websocket is open.
        turns: how often one was opened or lost; unseen, a server restarts only between the two.
        running: the prompts that run.
        ended: ids of prompts that ended since the reader last emptied it.
        errors: what execution_error said, by prompt id.
        tried: set once the server has said something, or refused the websocket: before it has
            registered one, prompts start unnoticed.
    """

    def __init__(
        self,
        server: Server,
        *,
        changed: Callable[[], None] = lambda: None,
        notify: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.client_id = uuid.uuid4().hex
        self.connected = False
        self.turns = 0
        self.running: dict[str, RunningPrompt] = {}
        self.ended: list[str] = []
        self.errors: dict[str, Mapping[str, Any]] = {}
        self.tried = asyncio.Event()
        self._server = server
        self._changed = changed
        self._notify = notify

    async def listen(self) -> None:
        """Keeps a websocket open until it is cancelled."""
        notified = False
        while True:
            client_id = uuid.uuid4().hex
            try:
                async with self._server.websocket(client_id) as socket:
                    await socket.send_json(FEATURES)
                    self.connected = True
                    self.turns += 1
                    async for message in socket:
                        self.client_id = client_id
                        if message.type is aiohttp.WSMsgType.TEXT:
                            self.hear(message.data)
            except aiohttp.WSServerHandshakeError as error:
                if not notified:
                    self._notify(
                        f"no websocket (the answer is {error.status}): progress is not shown, but "
                        "results are fetched"
                    )
                notified = True
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
                pass  # whether the server is there at all is for the other requests to say
            if self.connected:
                self.connected = False
                self.turns += 1
                self.running.clear()
            self.tried.set()
            self._changed()
            await asyncio.sleep(PAUSE_SECONDS)

    def hear(self, text: str) -> None:
        """Takes in one message of execution.py, comfy_execution/progress.py or main.py."""
        self.tried.set()
        # A node pack may send what it likes under any name.
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
            message = json.loads(text)
            kind, data = message["type"], message["data"]
            prompt_id = str(data["prompt_id"])
            if kind == "executing" and data["node"] is None:
                # Sent after the history has the entry; execution_success comes before.
                self.running.pop(prompt_id, None)
                self.ended.append(prompt_id)
            elif kind == "execution_error":
                self.errors[prompt_id] = data
            elif kind in KINDS:
                self.running.setdefault(prompt_id, RunningPrompt()).take(kind, data)
                return
            self._changed()
