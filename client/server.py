"""Talks to one ComfyUI server, and reads a prompt's files and texts, or why it failed."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from .transport import AbsentError, Answer, AnswerError, ForeignIdError, ServerError, Transport
from .workflow import Graph, called, shortened, title

# Pings, whose missing answers tell of a connection that died without a word.
HEARTBEAT_SECONDS = 20.0
# Of what a node says; some print their input.
LONGEST_MESSAGE = 2000
ENDS = ("execution_success", "execution_error", "execution_interrupted")
# Prompts that are withdrawn are looked for so many times, after so long each.
LOOKS, LOOK_SECONDS = 40, 0.25


# What is read of answers: {key: its value's shape, ...: that of all}, [that of all], a list that
# begins with (these), or a type.
QUEUE = {"queue_running": [(int | float, str)], "queue_pending": [(int | float, str)]}
STATUS = {"status_str": str, "messages": [(str, {})]}
NODE_ERRORS: dict[Any, Any] = {...: {"errors": [{}]}}
ENTRY = {"outputs": {...: {}}, "status": STATUS}


class ShapeError(ServerError):
    """An answer is JSON of another form than ComfyUI's."""


def fits(value: Any, shape: Any) -> bool:
    """Returns whether JSON has at least the parts of a shape."""
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(
            all(fits(some, each) for some in value.values())
            if key is ...
            else key in value and fits(value[key], each)
            for key, each in shape.items()
        )
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(each, shape[0]) for each in value)
    if isinstance(shape, tuple):
        enough = isinstance(value, list) and len(value) >= len(shape)
        return enough and all(map(fits, value, shape))
    return isinstance(value, shape)


def failure(kind: str, message: str) -> dict[str, Any]:
    """Describes a failure that no node caused."""
    return {"type": kind, "message": message, "nodes": []}


def fault(address: object, error: Exception) -> ServerError:
    """Gives whatever the answers of one server raise as its fault, which ends its turn alone."""
    if isinstance(error, ServerError):
        return error
    return ServerError(
        f"{address} does not answer as ComfyUI does ({type(error).__name__}: "
        f"{shortened(str(error), 100)}): update ComfyUI there, and check any proxy between."
    )


def of_validation(graph: Mapping[str, Any], body: Any) -> dict[str, Any]:
    """Reads the answer to POST /prompt: a 400, or a 200 that leaves nodes out (server.py)."""
    if not isinstance(body, Mapping):
        return failure("refused", f"the server refuses the workflow: {body}")
    error, found = body.get("error"), body.get("node_errors") or {}
    if found and fits(found, NODE_ERRORS):
        nodes = [
            _node(graph, node, " ".join(map(_sentence, each["errors"])))
            for node, each in found.items()
        ]
        kind = str(error.get("type", "refused")) if isinstance(error, Mapping) else "node_errors"
        return {"type": kind, "message": _lines(graph, nodes), "nodes": nodes}
    if isinstance(error, Mapping):
        return failure(str(error.get("type", "refused")), _sentence(error))
    return failure("refused", f"the server refuses the workflow: {error or found}")


def of_execution(graph: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the message execution_error (execution.py, handle_execution_error)."""
    message = str(data.get("exception_message", "")).strip() or "no reason was given"
    node = _node(graph, str(data.get("node_id")), message)
    node["class_type"] = data.get("node_type", node["class_type"])
    kind = str(data.get("exception_type") or "execution_error")
    return {"type": kind, "message": _lines(graph, [node]), "nodes": [node]}


def _node(graph: Mapping[str, Any], node: str, message: str) -> dict[str, Any]:
    if len(message) > LONGEST_MESSAGE:
        left = len(message) - LONGEST_MESSAGE
        message = f"{message[:LONGEST_MESSAGE]}... ({left} more characters in the server's log)"
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


class Server(Transport):
    """Every method raises ServerError when the server stays away."""

    async def object_info(self) -> bytes:
        """Returns every node class with its inputs; AbsentError where this is no ComfyUI."""
        try:
            _, found = await self.call("GET", "object_info")
        except AnswerError as error:
            if error.status not in (404, 405, 410):
                raise
            found = b""
        if b'"SaveImage"' not in found:
            raise AbsentError(
                f"{self.address} is not ComfyUI, because it gives no list of nodes: give --server "
                "the address of ComfyUI's page, or wait for ComfyUI with --wait SECONDS."
            )
        return found

    async def stats(self) -> dict[str, Any]:
        """Asks for ComfyUI's version, the memory and the cards (GET /system_stats)."""
        return await self._json("GET", "system_stats", shape={}, optional=True)

    async def model_folders(self) -> set[Path]:
        """Asks where the server looks for models, on its own disk; empty where it does not tell."""
        try:
            shape = [{"folders": [str]}]
            found = await self._json("GET", "experiment/models", shape=shape, optional=True)
            return {Path(folder) for kind in found for folder in kind["folders"]}
        except (AnswerError, ShapeError):  # an older ComfyUI, or a proxy
            return set()

    async def queue(self) -> ServerQueue:
        found = await self._json("GET", "queue", shape=QUEUE)
        running, pending = found["queue_running"], found["queue_pending"]
        # The pending ones come as a heap: only sorted do they stand in the order of their turn.
        items = [*running, *sorted(pending, key=lambda item: (item[0], item[1]))]
        return ServerQueue(
            {item[1]: place for place, item in enumerate(items)},
            frozenset(item[1] for item in running),
        )

    async def history(self, prompt_id: str) -> dict[str, Any] | None:
        """Asks for the entry of a prompt that ended; None while it waits or runs, or is unknown."""
        shape = {...: ENTRY}
        return (await self._json("GET", f"history/{prompt_id}", shape=shape)).get(prompt_id)

    async def newest(self) -> str | None:
        """Asks for the id of the prompt that ended last; None with an empty history."""
        found = await self._json("GET", "history", shape={}, params={"max_items": "1"})
        return next(iter(found), None)

    async def has(self, prompt_id: str) -> bool:
        return prompt_id in await self.queue() or await self.history(prompt_id) is not None

    async def submit(
        self, graph: Mapping[str, Any], prompt_id: str, client_id: str
    ) -> Mapping[str, Any]:
        """Queues a graph under an id of ours, once, even when the answer gets lost; returns the
        nodes that were left out, with errors. Raises AnswerError, or ForeignIdError for another id.
        """
        body = {
            "prompt": graph,
            "prompt_id": prompt_id,
            "client_id": client_id,
            # Nobody looks at previews here, and drawing them takes time from the run.
            "extra_data": {"preview_method": "none"},
        }

        async def already() -> Answer | None:
            text = json.dumps({"prompt_id": prompt_id}).encode()
            return ("application/json", text) if await self.has(prompt_id) else None

        arguments = {"before_retry": already, "json": body}
        content = await self._json("POST", "prompt", shape={}, **arguments)
        if content.get("prompt_id") != prompt_id:
            raise ForeignIdError(
                f"{self.address} replaces the ids of prompts, as ComfyUI before 0.33 may: update "
                "ComfyUI there."
            )
        return content.get("node_errors") or {}

    async def upload(self, path: Path, name: str) -> str:
        """Puts an image under `subfolder/name` into the server's input folder, or raises
        AnswerError. Returns what the server calls it, should it have another file of that name.
        """
        data, (subfolder, _, file) = path.read_bytes(), name.rpartition("/")

        def form() -> aiohttp.FormData:
            fields = aiohttp.FormData()
            fields.add_field("image", data, filename=file)
            fields.add_field("subfolder", subfolder)
            return fields

        content = await self._json("POST", "upload/image", shape={"name": str}, form=form)
        folder = content.get("subfolder")
        return f"{folder}/{content['name']}" if folder else content["name"]

    async def withdraw(self, prompt_ids: Sequence[str]) -> bool:
        """Takes prompts out of the queue, and interrupts one that runs; others are left alone.

        What waits goes first, so that none of it begins when the running one stops. Says whether
        the server has none of them any more; a node may take long to notice.
        """
        left = list(prompt_ids)
        for _ in range(LOOKS):
            if not left:
                break
            await self.call("POST", "queue", json={"delete": left})
            queue = await self.queue()
            left = [prompt_id for prompt_id in left if prompt_id in queue]
            for prompt_id in queue.running.intersection(left):
                await self.call("POST", "interrupt", json={"prompt_id": prompt_id})
            if left:
                await asyncio.sleep(LOOK_SECONDS)
        return not left

    async def free(self) -> None:
        """Makes the server drop its models, and what its nodes keep, before the next prompt."""
        await self.call("POST", "free", json={"free_memory": True})
        # ComfyUI does so after a prompt. An idle one may miss the call until the next prompt has
        # run: of 12 jobs whose LoRA was replaced, one got the old one.
        blank = {"blank": {"class_type": "PreviewAny", "inputs": {"source": ""}}}
        await self.submit(blank, str(uuid.uuid4()), "")

    def websocket(self, client_id: str) -> Any:
        """Opens the connection on which the server tells about this client."""
        # A preview of another client's request may be larger than aiohttp's limit of 4 MiB.
        return self.session.ws_connect(
            self.address.websocket(client_id), heartbeat=HEARTBEAT_SECONDS, max_msg_size=0
        )

    async def _json(self, method: str, path: str, *, shape: Any, **arguments: Any) -> Any:
        kind, body = await self.call(method, path, **arguments)
        try:
            found = json.loads(body)
        except (ValueError, RecursionError) as error:  # such as a page that asks for a sign-in
            raise AnswerError(
                f"{self.address} answered {method} /{path} with {kind} instead of JSON: check "
                "--server. If the server needs a sign-in, pass it with --header.",
                200,
                body.decode("utf-8", "replace"),
            ) from error
        if not fits(found, shape):
            raise ShapeError(
                f"{self.address} does not answer {method} /{path} as ComfyUI does: update ComfyUI "
                "there, and check any proxy between."
            )
        return found


def files_of(entry: Mapping[str, Any], graph: Graph) -> list[dict[str, str]]:
    """Returns what /view takes, for each file of a history entry, once.

    Files that the server deletes at its next start (type temp) count only where there are no
    others: they are the previews of a workflow that also saves.
    """
    found = []
    for node, output in entry["outputs"].items():
        kind = graph[node]["class_type"] if node in graph else ""
        for name, items in output.items():
            for item in items if isinstance(items, list) else ():
                if isinstance(item, dict) and item.get("filename"):
                    keys = ("filename", "subfolder", "type")
                    found.append({key: str(item.get(key, "")) for key in keys})
                # 3-D files are named by their path in the output folder, where they are saved.
                elif name == "result" and kind.startswith("Save") and isinstance(item, str):
                    subfolder, _, file = item.rpartition("/")
                    found.append({"filename": file, "subfolder": subfolder, "type": "output"})
    once = list({tuple(item.values()): item for item in found}.values())
    return [item for item in once if item["type"] == "output"] or once


def texts_of(entry: Mapping[str, Any], graph: Graph) -> dict[str, list[str]]:
    """Returns {title of a node: the texts that it shows}."""
    texts: dict[str, list[str]] = {}
    for node, output in entry["outputs"].items():
        shown = output.get("text")
        lines = [shown] if isinstance(shown, str) else shown
        if isinstance(lines, list) and any(lines):
            texts.setdefault(title(graph, node), []).extend(str(line) for line in lines)
    return texts


def seconds_of(messages: Mapping[str, Mapping[str, Any]]) -> float | None:
    start = messages.get("execution_start", {}).get("timestamp")
    end = next((messages[kind].get("timestamp") for kind in messages if kind in ENDS), None)
    if isinstance(start, int | float) and isinstance(end, int | float):
        return round((end - start) / 1000, 3)
    return None
