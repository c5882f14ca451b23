"""What a client asks of a ComfyUI server, one method a call, and why a job failed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from .graph.workflow import called, title
from .transport import Address, AnswerError, ServerAnswer, ServerError, Transport

# Pings, whose missing answers tell of a connection that died without a word.
HEARTBEAT_SECONDS = 20.0
# In extra_data of a prompt: finds it on a server that chooses the prompt id itself.
TAG = "qwen_l40s_submit"
# Finished prompts among which a lost answer's one is looked for by its tag.
RECENT = 100


def failure(kind: str, message: str) -> dict[str, Any]:
    """One that no node caused."""
    return {"type": kind, "message": message, "nodes": []}


def of_validation(graph: Mapping[str, Any], body: Any) -> dict[str, Any]:
    """Of the answer to POST /prompt: a 400, or a 200 that leaves nodes out (server.py)."""
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
    """Of the message execution_error (execution.py, handle_execution_error)."""
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
    """ComfyUI puts the rule in `message` and the input in `details`, or there what a node "
    "raised."""
    message, details = str(error.get("message", "")), str(error.get("details") or "")
    if details and str(error.get("type", "")).startswith("exception_during_"):
        return details
    return f"{message}: {details}." if details else f"{message}."


@dataclass(frozen=True)
class ServerQueue:
    """The prompts of every client that run or wait."""

    places: Mapping[str, int]  # {prompt id: how many are before it}
    running: frozenset[str]
    called: Mapping[str, str]  # {the id that a client of ours chose: the server's}

    def __contains__(self, prompt_id: object) -> bool:
        return prompt_id in self.places


@dataclass(frozen=True)
class Accepted:
    """What POST /prompt took: the id that the server uses, and the nodes that it left out."""

    prompt_id: str
    node_errors: Mapping[str, Any]


class Server:
    """An async context manager; every method raises ServerError when the server stays away.

    Args:
        url: http(s)://host:port/prefix, or host:port.
        headers, wait, notify: see `Transport`.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        wait: float | None = None,
        notify: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.address = Address.parse(url)
        self.transport = Transport(self.address, headers=headers or {}, wait=wait, notify=notify)

    async def __aenter__(self) -> Server:
        await self.transport.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.transport.close()

    async def object_info(self) -> dict[str, Any]:
        """Every node class of the server with its inputs.

        Raises:
            ServerError: what answers is no ComfyUI.
        """
        try:
            found = await self._json("GET", "object_info")
        except AnswerError as error:
            if error.status not in (200, 404, 405):
                raise
            found = None
        if not isinstance(found, dict) or "SaveImage" not in found:
            raise ServerError(
                f"what answers at {self.address} is not ComfyUI, for it has no list of nodes: give "
                "--server the address of ComfyUI's page."
            )
        return found

    async def queue(self) -> ServerQueue:
        found = await self._json("GET", "queue")
        running, pending = found["queue_running"], found["queue_pending"]
        # The pending ones come as a heap: only sorted do they stand in the order of their turn.
        items = [*running, *sorted(pending, key=lambda item: (item[0], item[1]))]
        return ServerQueue(
            {item[1]: place for place, item in enumerate(items)},
            frozenset(item[1] for item in running),
            {item[3][TAG]: item[1] for item in items if TAG in item[3]},
        )

    async def history(self, prompt_id: str) -> dict[str, Any] | None:
        """The entry of a prompt that ended; None while it waits or runs, and of an unknown id."""
        return (await self._json("GET", f"history/{prompt_id}")).get(prompt_id)

    async def newest(self) -> str | None:
        """The id of the prompt that ended last; None with an empty history."""
        return next(iter(await self._json("GET", "history", params={"max_items": "1"})), None)

    async def find(self, chosen: str) -> str | None:
        """The server's id of the prompt that was posted with this one; None where it has none."""
        queue = await self.queue()
        if chosen in queue or chosen in queue.called:
            return queue.called.get(chosen, chosen)
        if await self.history(chosen) is not None:
            return chosen
        recent = await self._json("GET", "history", params={"max_items": str(RECENT)})
        for prompt_id, entry in recent.items():
            if entry["prompt"][3].get(TAG) == chosen:
                return prompt_id
        return None

    async def submit(self, graph: Mapping[str, Any], prompt_id: str, client_id: str) -> Accepted:
        """Queues a graph under an id of ours, once, even when the answer gets lost.

        Raises:
            AnswerError: the server refuses the graph.
        """
        body = {
            "prompt": graph,
            "prompt_id": prompt_id,
            "client_id": client_id,
            # Nobody looks at previews here, and drawing them takes time from the run.
            "extra_data": {TAG: prompt_id, "preview_method": "none"},
        }

        async def already() -> Accepted | None:
            known = await self.find(prompt_id)
            return None if known is None else Accepted(known, {})

        answer = await self.transport.call("POST", "prompt", before_retry=already, json=body)
        if isinstance(answer, Accepted):
            return answer
        content = self._parsed(answer, "POST /prompt")
        return Accepted(content.get("prompt_id", prompt_id), content.get("node_errors") or {})

    async def upload(self, data: bytes, name: str, subfolder: str) -> str:
        """Puts an image into the server's input folder; the same bytes again change nothing.

        Returns:
            What an image input takes: subfolder/name.
        """

        def form() -> aiohttp.FormData:
            fields = aiohttp.FormData()
            fields.add_field("image", data, filename=name)
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

    async def delete(self, prompt_ids: Sequence[str]) -> None:
        """Takes prompts out of the queue; those that run or ended are left alone."""
        await self.transport.call("POST", "queue", json={"delete": list(prompt_ids)})

    async def interrupt(self, prompt_id: str) -> None:
        """Stops the prompt if it runs."""
        await self.transport.call("POST", "interrupt", json={"prompt_id": prompt_id})

    def websocket(self, client_id: str) -> Any:
        """A context manager of the connection on which the server tells about this client."""
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
