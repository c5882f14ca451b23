"""What the server tells about our prompts on a websocket, while it can be had.

The websocket is the fast way to know and the only source of progress, but never the judge of what
happened. ComfyUI registers a socket under its client id and, when an old connection of that id ends
late, drops the new one's registration (server.py, websocket_handler): such a socket stays open,
answers pings and says nothing more. So `client/watch.py` looks at the queue too, and
calls `renew` when it changed and nothing was told.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from .server import Server

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 5.0
# It makes the server send no preview images in the older, larger form, should it send any.
FEATURES = {"type": "feature_flags", "data": {"supports_preview_metadata": True}}
# Of messages: what they tell of a prompt that runs.
KINDS = ("execution_start", "execution_cached", "executing", "progress", "progress_state")


@dataclass
class Running:
    """How far a prompt is; `value` of `maximum` are the steps of the node that runs."""

    node: str | None = None
    value: float = 0
    maximum: float = 0
    finished: set[str] = field(default_factory=set)  # nodes that ran, or whose result was kept

    def take(self, kind: str, data: Mapping[str, Any]) -> None:
        """Takes in what a message of `KINDS` tells.

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


class Follower:
    """Listens as one client; reconnects under the same id, so that the server goes on telling.

    Args:
        changed: called after each message that changed something.
        notify: told in one line when there is no websocket, and when there is one again.

    Attributes:
        running: the prompts that run.
        started: ids of all that ran.
        ended: ids of those that ended since the reader last emptied it.
        errors: what execution_error said, by prompt id.
        connected: whether a websocket is open.
        turns: how often one was opened or lost; unseen, a server restarts only between the two.
        heard: messages so far.
    """

    def __init__(
        self,
        server: Server,
        client_id: str,
        *,
        changed: Callable[[], None] = lambda: None,
        notify: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.running: dict[str, Running] = {}
        self.started: set[str] = set()
        self.ended: list[str] = []
        self.errors: dict[str, Mapping[str, Any]] = {}
        self.connected = False
        self.turns = 0
        self.heard = 0
        self._server = server
        self._client_id = client_id
        self._changed = changed
        self._notify = notify
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._tried = asyncio.Event()

    async def first_try(self) -> None:
        """Waits until the server told something, or refused the websocket.

        An open one alone is not enough: what is queued before the server has registered it starts
        untold.
        """
        await self._tried.wait()

    async def listen(self) -> None:
        """Keeps a websocket open until it is cancelled."""
        pause, told = FIRST_PAUSE, False
        while True:
            refused = ""
            try:
                async with self._server.websocket(self._client_id) as socket:
                    await socket.send_json(FEATURES)
                    self._socket, self.connected = socket, True
                    self.turns += 1
                    pause = FIRST_PAUSE
                    if told:
                        self._notify("the server tells about progress again")
                        told = False
                    async for message in socket:
                        if message.type is aiohttp.WSMsgType.TEXT:
                            self.hear(message.data)
            except aiohttp.WSServerHandshakeError as error:
                refused = f"the answer is {error.status}"
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
                pass  # whether the server is there at all is for the other requests to say
            if self.connected:
                self.connected = False
                self.turns += 1
                self.running.clear()
            if refused and not told:
                self._notify(f"no websocket ({refused}): progress is not told, results still are")
                told = True
            self._tried.set()
            self._changed()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def renew(self) -> None:
        """Closes a socket that says nothing any more; `listen` opens another."""
        if self._socket is not None:
            await self._socket.close()

    def hear(self, text: str) -> None:
        """Takes in one message of execution.py, comfy_execution/progress.py or main.py."""
        self.heard += 1
        self._tried.set()
        # A node pack may send what it likes under any name.
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
            message = json.loads(text)
            self._take(message["type"], message["data"])

    def _take(self, kind: str, data: Mapping[str, Any]) -> None:
        prompt_id = str(data["prompt_id"])
        if kind == "executing" and data["node"] is None:
            # Sent after the history has the entry; execution_success comes before.
            self.running.pop(prompt_id, None)
            self.ended.append(prompt_id)
        elif kind == "execution_error":
            self.errors[prompt_id] = data
        elif kind in KINDS:
            self.started.add(prompt_id)
            self.running.setdefault(prompt_id, Running()).take(kind, data)
        else:
            return
        self._changed()
