"""A ComfyUI server: what a client asks of it, one method a call, what it tells of running prompts
on its websocket, and why a job failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from .transport import Address, AnswerError, ServerAnswer, ServerError, Transport
from .workflow import called, title

# Pings, whose missing answers tell of a connection that died without a word.
HEARTBEAT_SECONDS = 20.0
# After a websocket was lost or refused, before the next.
PAUSE_SECONDS = 2.0
# It makes the server send no preview images in the older, larger form, should it send any.
FEATURES = {"type": "feature_flags", "data": {"supports_preview_metadata": True}}
# Prompts that are withdrawn are looked for so many times, after so long each.
LOOKS, LOOK_SECONDS = 40, 0.25


def failure(kind: str, message: str) -> dict[str, Any]:
    """Describes a failure that no node caused."""
    return {"type": kind, "message": message, "nodes": []}


def of_validation(graph: Mapping[str, Any], body: Any) -> dict[str, Any]:
    """Reads the answer to POST /prompt: a 400, or a 200 that leaves nodes out (server.py)."""
    if not isinstance(body, Mapping):
        return failure("refused", f"the server refuses the workflow: {body}")
    nodes = [
        _node(graph, node, " ".join(_sentence(error) for error in found.get("errors", ())))
        for node, found in (body.get("node_errors") or {}).items()
    ]
    error = body.get("error")
    if nodes:
        kind = error.get("type", "refused") if isinstance(error, Mapping) else "node_errors"
        return {"type": kind, "message": _lines(graph, nodes), "nodes": nodes}
    if isinstance(error, Mapping):
        return failure(error.get("type", "refused"), _sentence(error))
    return failure("refused", f"the server refuses the workflow: {error}")


def of_execution(graph: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the message execution_error (execution.py, handle_execution_error)."""
    message = str(data.get("exception_message", "")).strip() or "it gave no reason"
    node = _node(graph, str(data.get("node_id")), message)
    node["class_type"] = data.get("node_type", node["class_type"])
    kind = data.get("exception_type", "execution_error")
    return {"type": kind, "message": _lines(graph, [node]), "nodes": [node]}


def _node(graph: Mapping[str, Any], node: str, message: str) -> dict[str, Any]:
    return {
        "id": node,
        "title": title(graph, node),
        "class_type": graph[node]["class_type"] if node in graph else None,
        "message": message,
    }


def _lines(graph: Mapping[str, Any], nodes: list[dict[str, Any]]) -> str:
    return "\n".join(f"{called(graph, node['id'])}: {node['message']}" for node in nodes)


def _sentence(error: Mapping[str, Any]) -> str:
    """Reads `message`, the rule, and `details`, the input; or there what a node raised."""
    message, details = str(error.get("message", "")), str(error.get("details") or "")
    if details and str(error.get("type", "")).startswith("exception_during_"):
        return details
    return f"{message}: {details}." if details else f"{message}."


@dataclass(frozen=True)
class ServerQueue:
    """The prompts of every client that run or wait."""

    places: Mapping[str, int]  # {prompt id: how many are before it}
    running: frozenset[str]

    def __contains__(self, prompt_id: object) -> bool:
        return prompt_id in self.places


class Server:
    """An async context manager; every method raises ServerError when the server stays away.

    Args:
        headers, wait, notify: see `Transport`.
    """

    def __init__(
        self,
        address: Address,
        *,
        headers: Mapping[str, str],
        wait: float,
        notify: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.address = address
        self.transport = Transport(address, headers=headers, wait=wait, notify=notify)

    async def __aenter__(self) -> Server:
        await self.transport.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.transport.close()

    async def object_info(self) -> bytes:
        """The JSON of every node class of the server with its inputs.

        Raises:
            ServerError: what answers is no ComfyUI.
        """
        try:
            found = (await self.transport.call("GET", "object_info")).body
        except AnswerError as error:
            if error.status not in (404, 405):
                raise
            found = b""
        if b'"SaveImage"' not in found:
            raise ServerError(
                f"what answers at {self.address} is not ComfyUI, for it has no list of nodes: give "
                "--server the address of ComfyUI's page."
            )
        return found

    async def stats(self) -> dict[str, Any]:
        """Asks for ComfyUI's version, the memory and the cards (GET /system_stats)."""
        return await self._json("GET", "system_stats")

    async def model_folders(self) -> set[Path]:
        """Asks where the server looks for models, on its own disk; empty where it does not tell."""
        try:
            found = await self._json("GET", "experiment/models")
            return {Path(folder) for kind in found for folder in kind["folders"]}
        except (AnswerError, LookupError, TypeError):  # an older ComfyUI, or a proxy
            return set()

    async def queue(self) -> ServerQueue:
        found = await self._json("GET", "queue")
        running, pending = found["queue_running"], found["queue_pending"]
        # The pending ones come as a heap: only sorted do they stand in the order of their turn.
        items = [*running, *sorted(pending, key=lambda item: (item[0], item[1]))]
        return ServerQueue(
            {item[1]: place for place, item in enumerate(items)},
            frozenset(item[1] for item in running),
        )

    async def history(self, prompt_id: str) -> dict[str, Any] | None:
        """Asks for the entry of a prompt that ended; None while it waits or runs, or is unknown."""
        return (await self._json("GET", f"history/{prompt_id}")).get(prompt_id)

    async def newest(self) -> str | None:
        """Asks for the id of the prompt that ended last; None with an empty history."""
        return next(iter(await self._json("GET", "history", params={"max_items": "1"})), None)

    async def has(self, prompt_id: str) -> bool:
        """Asks whether the prompt waits, runs or has ended."""
        return prompt_id in await self.queue() or await self.history(prompt_id) is not None

    async def submit(
        self, graph: Mapping[str, Any], prompt_id: str, client_id: str
    ) -> Mapping[str, Any]:
        """Queues a graph under an id of ours, once, even when the answer gets lost.

        Returns:
            The nodes that the server left out, with their errors.

        Raises:
            AnswerError: the server refuses the graph.
            ServerError: it chooses the id itself.
        """
        body = {
            "prompt": graph,
            "prompt_id": prompt_id,
            "client_id": client_id,
            # Nobody looks at previews here, and drawing them takes time from the run.
            "extra_data": {"preview_method": "none"},
        }

        async def already() -> dict[str, Any] | None:
            return {} if await self.has(prompt_id) else None

        answer = await self.transport.call("POST", "prompt", before_retry=already, json=body)
        if not isinstance(answer, ServerAnswer):
            return answer
        content = self._parsed(answer, "POST /prompt")
        if content.get("prompt_id") != prompt_id:
            raise ServerError(
                f"{self.address} chooses the ids of prompts itself, as ComfyUI before 0.33 may: "
                "update ComfyUI there."
            )
        return content.get("node_errors") or {}

    async def upload(self, path: Path, name: str) -> str:
        """Puts an image into the server's input folder; the same bytes again change nothing.

        Args:
            name: subfolder/name there.

        Returns:
            What the server calls it, should it have another file of that name.

        Raises:
            AnswerError: the server does not take it.
        """
        data, (subfolder, _, file) = path.read_bytes(), name.rpartition("/")

        def form() -> aiohttp.FormData:
            fields = aiohttp.FormData()
            fields.add_field("image", data, filename=file)
            fields.add_field("subfolder", subfolder)
            return fields

        content = await self._json("POST", "upload/image", form=form)
        folder = content.get("subfolder")
        return f"{folder}/{content['name']}" if folder else content["name"]

    async def download(self, image: Mapping[str, str], target: Path) -> None:
        """Writes a file that an output names into `target`.

        Raises:
            OSError: of the local file.
        """
        await self.transport.download("view", image, target)

    async def withdraw(self, prompt_ids: Sequence[str]) -> bool:
        """Takes prompts out of the queue, and interrupts one that runs; others are left alone.

        What waits goes first, so that none of it begins when the running one stops.

        Returns:
            Whether the server has none of them any more; a node may take long to notice.
        """
        left = list(prompt_ids)
        for _ in range(LOOKS):
            if not left:
                break
            await self.transport.call("POST", "queue", json={"delete": left})
            queue = await self.queue()
            left = [prompt_id for prompt_id in left if prompt_id in queue]
            for prompt_id in queue.running.intersection(left):
                await self.transport.call("POST", "interrupt", json={"prompt_id": prompt_id})
            if left:
                await asyncio.sleep(LOOK_SECONDS)
        return not left

    async def free(self) -> None:
        """Makes the server drop its models, and what its nodes keep, before the next prompt."""
        await self.transport.call("POST", "free", json={"free_memory": True})
        # ComfyUI does so after a prompt. An idle one may miss the call until the next prompt has
        # run: of 12 jobs whose LoRA was replaced, one got the old one.
        blank = {"blank": {"class_type": "PreviewAny", "inputs": {"source": ""}}}
        await self.submit(blank, str(uuid.uuid4()), "")

    def websocket(self, client_id: str) -> Any:
        """Opens the connection on which the server tells about this client."""
        # A preview of another client's request may be larger than aiohttp's limit of 4 MiB.
        return self.transport.session.ws_connect(
            self.address.websocket(client_id), heartbeat=HEARTBEAT_SECONDS, max_msg_size=0
        )

    async def _json(self, method: str, path: str, **arguments: Any) -> Any:
        answer = await self.transport.call(method, path, **arguments)
        return self._parsed(answer, f"{method} /{path}")

    def _parsed(self, answer: ServerAnswer, call: str) -> Any:
        try:
            return json.loads(answer.body)
        except ValueError as error:  # such as the page by which a proxy asks for a sign-in
            raise AnswerError(
                f"{self.address} answered {call} with {answer.content_type} and not with JSON: "
                "check --server, and whether a sign-in needs a --header.",
                200,
                answer.body.decode("utf-8", "replace"),
            ) from error


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
