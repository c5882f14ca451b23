"""Follows prompts on a server: messages of its websocket, its queue, and taking prompts back.

The websocket is fast and the only source of progress, but never decides what happened. ComfyUI
registers a socket under its client id and, when an old connection of that id ends late, drops the
new one's registration (server.py, websocket_handler): such a socket stays open, answers pings and
says nothing more. So `QueueWatch` looks at the queue too, and calls `renew` when it changed and no
message came.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from .ledger import QUEUED, Job
from .server import Server, ServerQueue

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 5.0
# It makes the server send no preview images in the older, larger form, should it send any.
FEATURES = {"type": "feature_flags", "data": {"supports_preview_metadata": True}}
# Messages about a prompt that runs.
KINDS = ("execution_start", "execution_cached", "executing", "progress", "progress_state")
LOOKS = 40
LOOK_SECONDS = 0.25


@dataclass
class RunningPrompt:
    """How far a prompt is; `value` of `maximum` are the steps of the node that runs."""

    node: str | None = None
    value: float = 0
    maximum: float = 0
    finished: set[str] = field(default_factory=set)  # nodes that ran, or whose result was kept

    def take(self, kind: str, data: Mapping[str, Any]) -> None:
        """Takes in a message of `KINDS`.

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
        notify: gets one line when there is no websocket, and when there is one again.

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
        self.running: dict[str, RunningPrompt] = {}
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
        """Waits until the server sent something, or refused the websocket.

        An open one alone is not enough: what is queued before the server has registered it starts
        unnoticed.
        """
        await self._tried.wait()

    async def listen(self) -> None:
        """Keeps a websocket open until it is cancelled."""
        pause, notified = FIRST_PAUSE, False
        while True:
            refused = ""
            try:
                async with self._server.websocket(self._client_id) as socket:
                    await socket.send_json(FEATURES)
                    self._socket, self.connected = socket, True
                    self.turns += 1
                    pause = FIRST_PAUSE
                    if notified:
                        self._notify("the server reports progress again")
                        notified = False
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
            if refused and not notified:
                self._notify(
                    f"no websocket ({refused}): progress is not shown, but results are fetched"
                )
                notified = True
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
            self.running.setdefault(prompt_id, RunningPrompt()).take(kind, data)
        else:
            return
        self._changed()


class QueueWatch:
    """Finds out by the server's queue where jobs are, which overrules the websocket.

    A job in neither the queue nor the history was either taken out by someone, or forgotten by a
    server that restarted; no answer of ComfyUI tells which. While no connection was lost since the
    job was last seen, the server is the same process, and the job stays out. After a lost
    connection it is the same process where its history still has an entry that it had before; else
    it was restarted, and the job is queued again.

    Attributes:
        ahead: prompts of others before the first of our jobs; None while one of ours runs.
    """

    def __init__(self, server: Server, follower: Follower) -> None:
        self.ahead: int | None = None
        self._server = server
        self._follower = follower
        self._witness: str | None = None  # a prompt in the history of the process we know
        self._places: dict[str, int] = {}
        self._heard = 0
        self._suspicious = False

    @property
    def breaks(self) -> int:
        """Grows with each connection that is lost, and with each websocket that is opened."""
        return self._server.transport.breaks + self._follower.turns

    async def begin(self) -> None:
        """Finds a witness, where the server has one."""
        self._witness = await self._server.newest()

    def ended(self, job: Job) -> None:
        """The history has the job's entry."""
        self._witness = job.prompt_id

    async def gone(self, jobs: list[Job]) -> list[Job]:
        """Those of the queued jobs that are no longer in the queue."""
        known = [job for job in jobs if job.status == QUEUED]
        breaks = self.breaks
        queue = await self._server.queue()
        here = [job for job in known if job.prompt_id in queue]
        for job in here:
            job.breaks = breaks
            job.ran = job.ran or job.prompt_id in queue.running
        self.ahead = min((queue.places[job.prompt_id] for job in here), default=0)
        if any(job.prompt_id in queue.running for job in here):
            self.ahead = None
        await self._check_socket(queue)
        return [job for job in known if job.prompt_id not in queue and job.status == QUEUED]

    async def removed(self, job: Job) -> bool:
        """Whether someone took out a job that neither the queue nor the history has; else the
        server was restarted.
        """
        # Between two websockets a restart is not seen, where they can be had at all.
        unsure = self._follower.turns > 0 and not self._follower.connected
        if self.breaks == job.breaks and not unsure:
            return True
        if self._witness is not None and await self._server.history(self._witness) is not None:
            return True
        self._witness = None
        return False

    async def _check_socket(self, queue: ServerQueue) -> None:
        """Renews a websocket that was silent although the queue changed before the last look.

        The server tells every socket when its queue changes (server.py, queue_updated).
        """
        changed = queue.places != self._places
        silent = self._follower.heard == self._heard
        if self._follower.connected and silent and self._suspicious:
            await self._follower.renew()
            changed = False
        self._suspicious = silent and (changed or self._suspicious)
        self._places, self._heard = dict(queue.places), self._follower.heard


async def withdraw(server: Server, prompt_ids: Sequence[str]) -> bool:
    """Takes the prompts out of the queue and interrupts one that runs.

    What waits goes first, so that none of it begins when the running one stops.

    Args:
        prompt_ids: as they were chosen here, or as the server calls them.

    Returns:
        Whether the server has none of them any more; a node that runs may take long to notice.

    Raises:
        ServerError: the server stayed away.
    """
    if not prompt_ids:
        return True
    await server.delete(prompt_ids)
    for _ in range(LOOKS):
        queue = await server.queue()
        names = {queue.called.get(prompt_id, prompt_id) for prompt_id in prompt_ids}
        left = [prompt_id for prompt_id in names if prompt_id in queue]
        if not left:
            return True
        waiting = [prompt_id for prompt_id in left if prompt_id not in queue.running]
        if waiting:
            await server.delete(waiting)
        # Older servers interrupt whatever runs, so they are asked only while ours does.
        for prompt_id in left:
            if prompt_id in queue.running:
                await server.interrupt(prompt_id)
        await asyncio.sleep(LOOK_SECONDS)
    return False
