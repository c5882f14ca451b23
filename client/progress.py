"""Follows how far a run is: reads servers' websockets, writes to a terminal, and handles Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

import aiohttp
from tqdm import tqdm

from ..files import printable
from .server import Server

EXIT_CODE = 130
# Between two lines about the same thing where there is no terminal.
LINE_SECONDS = 10.0
# Between two lines about the whole run there.
TOTAL_SECONDS = 60.0
# Between two drawings of a bar.
DRAW_SECONDS = 0.1
LONGEST_NAME = 28
# After a websocket was lost or refused, before the next.
PAUSE_SECONDS = 2.0
# It makes the server send no preview images in the older, larger form, should it send any.
FEATURES = {"type": "feature_flags", "data": {"supports_preview_metadata": True}}


@contextmanager
def cancelled_by_signals(task: Any) -> Iterator[None]:
    """Cancels the task at the first signal; it may then take its time to tidy up."""
    loop = asyncio.get_running_loop()
    seen = False

    def handle(*signal_and_frame: Any) -> None:
        nonlocal seen
        if seen:
            os._exit(EXIT_CODE)
        seen = True
        loop.call_soon_threadsafe(task.cancel)

    before = {}
    # Not loop.add_signal_handler, which Windows lacks.
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            before[number] = signal.signal(number, handle)
        except ValueError:  # only the main thread gets signals
            break
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def within(waiting: Coroutine[Any, Any, Any], seconds: float | None) -> None:
    """Waits so long at the most.

    Not asyncio.wait_for: before Python 3.12 it can swallow a Ctrl-C that arrives just then.
    """
    task = asyncio.create_task(waiting)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()


class Progress:
    """Shows jobs and the running node: two bars on a terminal, else now and then a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._first = (0, time.monotonic())  # jobs that were done when the run began
        self._at = {"total": ("", time.monotonic())}  # {what: (subject, when shown)}
        self._jobs: Any = None
        self._node: Any = None

    def begin(self, total: int, *, done: int = 0) -> None:
        """Shows the bars; what earlier runs did says nothing about the time that is left."""
        stream = self._stream
        self._first = (done, time.monotonic())
        if stream.isatty():
            size: dict[str, Any] = {"ncols": 80, "nrows": 24}
            with contextlib.suppress(OSError):
                # A container's terminal may be of 0 by 0, in which tqdm draws nothing.
                if all(os.get_terminal_size(stream.fileno())):
                    size = {"dynamic_ncols": True}
            layout = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
            options = {"file": stream, "leave": False, **size}
            self._jobs = tqdm(total=total, initial=done, desc="jobs", bar_format=layout, **options)
            self._node = tqdm(total=1, bar_format="{desc} |{bar}|", position=1, **options)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        for bar in (self._node, self._jobs):
            if bar is not None:
                bar.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Clears the bars while something else is written to the terminal."""
        with losable(self._stream):
            if self._jobs is None:
                yield
            else:
                with tqdm.external_write_mode(file=self._stream):
                    yield

    def say(self, text: str) -> None:
        with self.paused():
            self._stream.write(printable(text, self._stream) + "\n")

    def show(self, *, done: int, total: int, failed: int, ahead: int) -> None:
        """Shows the whole run; `ahead` are prompts of others before the first of ours."""
        facts = [f"{failed} failed"] * bool(failed)
        facts += [f"{ahead} ahead in the queue"] * bool(ahead)
        if self._jobs is not None:
            self._jobs.n, self._jobs.total = done, total
            self._jobs.set_postfix_str(", ".join(facts), refresh=False)
            self._draw()
        elif done < total and self._due("total", TOTAL_SECONDS):
            before, began = self._first
            if done > before:
                seconds = (time.monotonic() - began) / (done - before) * (total - done)
                facts.insert(0, f"about {max(1, round(seconds / 60))} min left")
            self.say(f"{done} of {total} jobs, {', '.join(facts)}".rstrip(", "))
        elif ahead and self._due("line", LINE_SECONDS, "queue"):
            self.say(f"{done}/{total} jobs, {', '.join(facts)}")

    def node(self, job: str, name: str, value: float, maximum: float, place: str) -> None:
        """Shows the node that runs, and its place among those of its graph, such as "5/7"."""
        if self._node is not None:
            steps = f" {value:g}/{maximum:g}" if maximum > 1 else ""
            name = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."
            text = f"node {place}, {name}{steps}"
            self._node.set_description_str(printable(text, self._stream), refresh=False)
            self._node.total = maximum or 1
            self._node.n = min(value, self._node.total)
            self._draw()
        elif maximum > 1 and self._due("line", LINE_SECONDS, f"{job} {name}"):
            self.say(f"{job}: {name} {value:g}/{maximum:g}")

    def _draw(self) -> None:
        if self._due("bars", DRAW_SECONDS):
            self._jobs.refresh()
            self._node.refresh()

    def _due(self, what: str, seconds: float, subject: str = "") -> bool:
        last, at = self._at.get(what, ("", -seconds))
        due = subject != last or time.monotonic() - at >= seconds
        if due:
            self._at[what] = (subject, time.monotonic())
        return due


@contextmanager
def losable(stream: TextIO) -> Iterator[None]:
    """Ends no run where writing fails: the reader left, the disk is full."""
    try:
        yield
        stream.flush()
    except OSError:
        # What is still in the buffer would fail again at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@dataclass
class RunningPrompt:
    """How far a prompt is; `value` of `maximum` are the steps of the node that runs."""

    node: str | None = None
    value: float = 0
    maximum: float = 0
    finished: set[str] = field(default_factory=set)  # nodes that ran, or whose result was kept

    def take(self, kind: str, data: Mapping[str, Any]) -> None:
        """Takes in a message; raises what Python does where it has another form than ComfyUI's."""
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
        # How often one was opened or lost; unseen, a server restarts only between the two.
        self.turns = 0
        self.running: dict[str, RunningPrompt] = {}
        self.ended: list[str] = []
        self.errors: dict[str, Mapping[str, Any]] = {}
        # Set once the server has said something, or refused the websocket: before it has registered
        # one, prompts start unnoticed.
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
                        f"no websocket (the server answered {error.status}): progress is not "
                        "shown, but results are fetched"
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
        with contextlib.suppress(
            LookupError, TypeError, ValueError, AttributeError, RecursionError
        ):
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
