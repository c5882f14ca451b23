"""A small server with the shapes of ComfyUI 0.33.0, and with faults that a real one has seldom.

Where each shape comes from, in ComfyUI:
    /ws, its first messages, and what closes it      server.py, websocket_handler
    /prompt, /queue, /history, /interrupt, /free     server.py, post_prompt ... get_queue
    /upload/image, /view                             server.py, image_upload, view_image
    /experiment/models                               app/model_manager.py, get_model_folders
    queue items, history entries                     execution.py, PromptQueue
    node_errors                                      execution.py, validate_prompt
    execution_* and executing messages               execution.py, PromptExecutor; main.py,
                                                     prompt_worker
    progress_state                                   comfy_execution/progress.py
    progress                                         main.py, hijack_progress

What a prompt does is the text of its node of class Draw: "refuse" (400), "partly" (200 with
node_errors), "fail" (execution_error), "block" (an error, and then success), "crash" (the server
restarts while it runs), "slow" (runs until it is interrupted), else an image.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from aiohttp import WSCloseCode, web
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from waiting import SECONDS

from qwen_l40s.client import feeder, progress, results, run, transport
from qwen_l40s.client.scheduler import Job
from qwen_l40s.client.submit import SubmitOutcome, SubmitRequest, submit

OBJECT_INFO = {
    "Draw": {
        "input": {
            "required": {
                "text": ["STRING", {"multiline": True}],
                "seed": ["INT", {"default": 0, "min": 0, "max": 2**64 - 1}],
            }
        },
        "input_order": {"required": ["text", "seed"]},
        "output": ["IMAGE"],
        "output_node": False,
    },
    "LoadImage": {
        "input": {"required": {"image": [["there.png"], {"image_upload": True}]}},
        "input_order": {"required": ["image"]},
        "output": ["IMAGE", "MASK"],
        "output_node": False,
    },
    "SaveImage": {
        "input": {
            "required": {
                "images": ["IMAGE", {}],
                "filename_prefix": ["STRING", {"default": "ComfyUI"}],
            }
        },
        "input_order": {"required": ["images", "filename_prefix"]},
        "output": [],
        "output_node": True,
    },
}


def graph(text: str = "a cat", seed: int = 0) -> dict[str, Any]:
    return {
        "draw": {
            "class_type": "Draw",
            "inputs": {"text": text, "seed": seed},
            "_meta": {"title": "Prompt"},
        },
        "save": {
            "class_type": "SaveImage",
            "inputs": {"images": ["draw", 0], "filename_prefix": "fake"},
            "_meta": {"title": "Save"},
        },
    }


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the client's pauses as short as tests want them."""
    monkeypatch.setattr(feeder, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(feeder, "POLL_SECONDS_ALONE", 0.02)
    monkeypatch.setattr(feeder, "PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(run, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(progress, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(results, "FETCH_PAUSE", 0.01)
    monkeypatch.setattr(transport, "FIRST_PAUSE", 0.01)


def submitted(
    folder: Path,
    servers: Sequence[str],
    settings: Sequence[str],
    *,
    nodes: Mapping[str, Any] = MappingProxyType({}),
    meanwhile: Callable[[], None] = lambda: None,
    log: io.StringIO | None = None,
    **more: Any,
) -> tuple[SubmitOutcome, str, list[Job]]:
    """Submits the graph, with these nodes more; returns what came of it, the log and the jobs that
    ended.
    """
    log = log or io.StringIO()
    workflow = folder / "work.json"
    workflow.write_text(json.dumps({**graph(), **nodes}))
    options = {"servers": servers, "settings": settings, "wait": 5.0} | more
    ended: list[Job] = []
    helper = threading.Thread(target=meanwhile)
    helper.start()
    try:
        request = SubmitRequest(workflow, folder / "out", **options)
        outcome = asyncio.run(submit(request, log, ended.append))
    finally:
        helper.join()
    return outcome, log.getvalue(), ended


@dataclass
class Faults:
    """Those that are counted happen so many times, and then no more."""

    busy: int = 0  # 503 with Retry-After
    retry_after: str = "0"
    lose_request: int = 0  # POST /prompt: closed before it is read
    lose_answer: int = 0  # POST /prompt: closed after it is queued
    slow_answer: float = 0.0  # POST /prompt: seconds before it is queued
    own_ids: bool = False  # as servers before client-chosen ids
    refuse_socket: bool = False
    drop_socket_after: int = 0  # messages; once
    mute_socket_after: int = 0  # messages; until it is opened anew
    too_large: bool = False  # 413 to uploads
    away_seconds: float = 0.1  # of a restart
    paused: bool = False  # nothing runs
    no_file: int = 0  # 404 to /view
    slow_file: float = 0.0  # /view: seconds in the middle
    cut_file: int = 0  # /view ends in the middle
    cached: bool = False  # as for a graph that ran before
    version: str = "0.33.0"
    folders: tuple[Path, ...] = ()  # of LoRAs
    lacks: str = ""  # a node class
    knows: dict[str, Any] = field(default_factory=dict)  # further node classes
    refuse: bool = False  # 400 to every prompt
    small: bool = False  # every prompt runs out of memory
    old: bool = False  # every prompt needs a newer ComfyUI, as our loader finds
    frozen: bool = False  # takes connections and answers nothing
    job_seconds: float = 0.0
    answer: Any = None  # a handler of every request, in ComfyUI's place unless it gives None
    odd: dict[str, str] = field(default_factory=dict)  # {"GET /queue": a body in place of its own}
    view: str = ""  # see `_sick_view`
    named: str = ""  # what every file is called, as by a node that takes no name
    prompt: str = ""  # see `_sick_prompt`
    entry: Callable[[dict[str, Any]], Any] = lambda entry: entry  # what the history says
    broken: bool = False  # every job fails at once, as after a sticky CUDA error


@dataclass
class State:
    queue: list[list[Any]] = field(default_factory=list)
    running: list[Any] | None = None
    history: dict[str, Any] = field(default_factory=dict)
    sockets: dict[str, web.WebSocketResponse] = field(default_factory=dict)
    number: int = 0
    interrupted: bool = False


class FakeComfyUI:
    """Runs in a thread of its own; use `with fake_comfyui() as server`.

    Attributes:
        requests: "METHOD /path" of each, in order.
        headers: of each.
        posted: the bodies of POST /prompt that were queued.
        interrupts: the prompt ids of POST /interrupt.
        uploads: {subfolder/name: bytes}.
        opened_sockets: how many in all.
    """

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.state = State()
        self.requests: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.posted: list[dict[str, Any]] = []
        self.interrupts: list[str] = []
        self.uploads: dict[str, bytes] = {}
        self.files: dict[str, bytes] = {}
        self.opened_sockets = 0
        self.restarts = 0
        self.port = 0
        self.loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._listener: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self.loop)
        return future.result(SECONDS)

    async def start(self) -> None:
        app = web.Application(middlewares=[self._faulty])
        app.add_routes(
            [
                web.get("/ws", self._socket),
                web.get("/object_info", self._object_info),
                web.get("/system_stats", self._system_stats),
                web.get("/experiment/models", self._models),
                web.get("/queue", self._get_queue),
                web.post("/queue", self._post_queue),
                web.get("/history", self._get_all_history),
                web.get("/history/{prompt_id}", self._get_history),
                web.post("/prompt", self._post_prompt),
                web.post("/interrupt", self._post_interrupt),
                web.post("/free", self._post_free),
                web.post("/upload/image", self._upload),
                web.get("/view", self._view),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        await web.SockSite(self._runner, self._listener).start()
        self.port = self._listener.getsockname()[1]
        self._tasks.append(asyncio.create_task(self._work()))

    async def stop(self) -> None:
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._tasks.clear()
        for each in list(self.state.sockets.values()):
            await each.close(code=WSCloseCode.GOING_AWAY)
        # asyncio loses a connection that it has accepted, not yet attached, when a server closes.
        self.loop.remove_reader(self._listener)
        await asyncio.sleep(0)
        await self._runner.cleanup()

    async def restart(self) -> None:
        """Forgets the queue and the history, and is away for a moment."""
        await self.stop()
        self.state = State()
        self.restarts += 1
        await asyncio.sleep(self.faults.away_seconds)
        await self.start()

    @web.middleware
    async def _faulty(self, request: web.Request, handler: Any) -> web.StreamResponse:
        while self.faults.frozen:
            await asyncio.sleep(0.01)
        self.requests.append(f"{request.method} {request.path}")
        self.headers.append(dict(request.headers))
        if self.faults.answer and (answer := await self.faults.answer(request)) is not None:
            return answer
        if self.faults.busy and request.path != "/ws":
            self.faults.busy -= 1
            return web.Response(status=503, headers={"Retry-After": self.faults.retry_after})
        odd = self.faults.odd.get(f"{request.method} /{request.path.split('/')[1]}")
        if odd is not None:
            return web.Response(text=odd, content_type="application/json")
        return await handler(request)

    async def _object_info(self, request: web.Request) -> web.Response:
        known = OBJECT_INFO | self.faults.knows
        return web.json_response({name: known[name] for name in known if name != self.faults.lacks})

    async def _system_stats(self, request: web.Request) -> web.Response:
        system = {"comfyui_version": self.faults.version, "ram_total": 64 << 30}
        device = {"name": "cuda:0 NVIDIA L40S", "type": "cuda", "vram_total": 48 << 30}
        return web.json_response({"system": system, "devices": [device]})

    async def _models(self, request: web.Request) -> web.Response:
        folders = [str(folder) for folder in self.faults.folders]
        if not folders:  # as servers that do not tell
            return web.Response(status=404)
        return web.json_response([{"name": "loras", "folders": folders, "extensions": []}])

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        if self.faults.refuse_socket:
            return web.Response(status=403)
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        client = request.query["clientId"]
        self.opened_sockets += 1
        self.state.sockets[client] = ws
        status = {"status": self._queue_info(), "sid": client}
        await self._send("status", status, client)
        await ws.send_bytes(b"\x00\x00\x00\x01preview")
        async for message in ws:
            if message.json().get("type") == "feature_flags":
                flags = {"supports_preview_metadata": True, "max_upload_size": 104857600}
                await self._send("feature_flags", flags, client)
        if self.state.sockets.get(client) is ws:
            del self.state.sockets[client]
        return ws

    async def _send(self, kind: str, data: dict[str, Any], client: str | None) -> None:
        ws = self.state.sockets.get(client)
        if ws is None or ws.closed:
            return
        if self.faults.mute_socket_after:
            self.faults.mute_socket_after -= 1
            if not self.faults.mute_socket_after:
                del self.state.sockets[client]  # open, but no longer told anything
                return
        with contextlib.suppress(ConnectionError):  # send_socket_catch_exception
            await ws.send_json({"type": kind, "data": data})
        if self.faults.drop_socket_after:
            self.faults.drop_socket_after -= 1
            if not self.faults.drop_socket_after:
                await ws.close()

    async def _queue_updated(self) -> None:
        for client in list(self.state.sockets):
            await self._send("status", {"status": self._queue_info()}, client)

    def _queue_info(self) -> dict[str, Any]:
        remaining = len(self.state.queue) + (self.state.running is not None)
        return {"exec_info": {"queue_remaining": remaining}}

    async def _get_queue(self, request: web.Request) -> web.Response:
        running = [self.state.running] if self.state.running else []
        return web.json_response({"queue_running": running, "queue_pending": self.state.queue})

    async def _post_queue(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.remove(body.get("delete", []))
        return web.Response()

    def remove(self, prompt_ids: list[str]) -> None:
        self.state.queue[:] = [item for item in self.state.queue if item[1] not in prompt_ids]

    async def _get_all_history(self, request: web.Request) -> web.Response:
        count = int(request.query.get("max_items", 10000))
        entries = list(self.state.history.items())[-count:]
        return web.json_response(dict(entries))

    async def _get_history(self, request: web.Request) -> web.Response:
        prompt_id = request.match_info["prompt_id"]
        if prompt_id not in self.state.history:
            return web.json_response({})
        return web.json_response({prompt_id: self.faults.entry(self.state.history[prompt_id])})

    async def _post_prompt(self, request: web.Request) -> web.StreamResponse:
        if self.faults.lose_request:
            self.faults.lose_request -= 1
            request.transport.close()
            return web.Response()
        body = await request.json()
        if self.faults.prompt:
            return self._sick_prompt()
        await asyncio.sleep(self.faults.slow_answer)
        if "draw" not in body["prompt"]:  # it makes no image, and ends at once
            return web.json_response({"prompt_id": body["prompt_id"], "node_errors": {}})
        text = body["prompt"]["draw"]["inputs"]["text"]
        error = {
            "type": "value_not_in_list",
            "message": "Value not in list",
            "details": "text: 'refuse' not in ['a cat']",
            "extra_info": {"input_name": "text"},
        }
        node_errors = {
            "draw": {"errors": [error], "dependent_outputs": ["save"], "class_type": "Draw"}
        }
        if text == "refuse" or self.faults.refuse:
            refused = {
                "type": "prompt_outputs_failed_validation",
                "message": "Prompt outputs failed validation",
                "details": f"{error['message']}: {error['details']}",
                "extra_info": {},
            }
            return web.json_response({"error": refused, "node_errors": node_errors}, status=400)
        prompt_id = str(uuid.uuid4()) if self.faults.own_ids else body["prompt_id"]
        extra = {**body.get("extra_data", {}), "client_id": body["client_id"]}
        number, self.state.number = self.state.number, self.state.number + 1
        self.state.queue.append([number, prompt_id, body["prompt"], extra, ["save"]])
        self.posted.append(body)
        await self._queue_updated()
        if self.faults.lose_answer:
            self.faults.lose_answer -= 1
            request.transport.close()
            return web.Response()
        errors = node_errors if text == "partly" else {}
        return web.json_response({"prompt_id": prompt_id, "number": number, "node_errors": errors})

    async def _post_interrupt(self, request: web.Request) -> web.Response:
        prompt_id = (await request.json()).get("prompt_id")
        self.interrupts.append(prompt_id)
        if self.state.running and self.state.running[1] == prompt_id:
            self.state.interrupted = True
        return web.Response()

    async def _post_free(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _upload(self, request: web.Request) -> web.Response:
        if self.faults.too_large:
            raise web.HTTPRequestEntityTooLarge(max_size=1, actual_size=2)
        form = await request.post()
        image, subfolder = form["image"], form.get("subfolder", "")
        self.uploads[f"{subfolder}/{image.filename}"] = image.file.read()
        return web.json_response({"name": image.filename, "subfolder": subfolder, "type": "input"})

    async def _view(self, request: web.Request) -> web.StreamResponse:
        if self.faults.no_file:
            self.faults.no_file -= 1
            return web.Response(status=404)
        if request.query["filename"] not in self.files:
            return web.Response(status=404)
        data = self.files[request.query["filename"]]
        if self.faults.view:
            return await self._sick_view(request, data)
        if self.faults.cut_file:
            self.faults.cut_file -= 1
            answer = web.StreamResponse(headers={"Content-Length": str(len(data))})
            await answer.prepare(request)
            await answer.write(data[: len(data) // 2])
            request.transport.close()
            return answer
        if self.faults.slow_file:
            answer = web.StreamResponse()
            await answer.prepare(request)
            with contextlib.suppress(ConnectionError):
                await answer.write(data[:9])
                await asyncio.sleep(self.faults.slow_file)
                await answer.write(data[9:])
            return answer
        return web.Response(body=data, content_type="image/png")

    def _sick_prompt(self) -> web.Response:
        if self.faults.prompt == "no JSON":
            return web.Response(text="<html>", content_type="text/html")
        if self.faults.prompt == "redirect":
            return web.Response(status=307, headers={"Location": "/login"})
        if self.faults.prompt == "wrong id":
            return web.json_response({"prompt_id": "another", "node_errors": {}})
        return web.Response(status=int(self.faults.prompt))

    async def _sick_view(self, request: web.Request, data: bytes) -> web.StreamResponse:
        fault = self.faults.view
        if fault.isdecimal():
            return web.Response(status=int(fault), headers={"Location": "/login"})
        if fault == "another":
            first = next(iter(self.files.values()))
            return web.Response(body=first if first != data else data, content_type="image/png")
        bodies = {"empty": b"", "noise": bytes(range(256)), "html": b"<html>", "json": b"{}"}
        bodies |= {"page as png": b"<html>sign in</html>", "short": data[: len(data) // 2]}
        kinds = {"html": "text/html", "json": "application/json"}
        if fault == "hang":
            await asyncio.sleep(60)
        if fault in ("cut", "long"):
            length = len(data) + 9 if fault == "cut" else len(data) - 9
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n".encode()
            request.transport.write(head + data)
            request.transport.close()
            return web.Response()
        if fault == "endless":
            answer = web.StreamResponse()
            await answer.prepare(request)
            with contextlib.suppress(ConnectionError):
                while True:
                    await answer.write(bytes(1 << 16))
        kind = kinds.get(fault, "image/png")
        return web.Response(body=bodies[fault], content_type=kind)

    async def _work(self) -> None:
        while True:
            if self.faults.paused or not self.state.queue:
                await asyncio.sleep(0.005)
                continue
            self.state.running = self.state.queue.pop(0)
            await self._queue_updated()
            await self._execute(self.state.running)
            self.state.running = None
            await self._queue_updated()

    async def _execute(self, item: list[Any]) -> None:
        _, prompt_id, nodes, extra, _ = item
        client, messages = extra.get("client_id"), []
        text = nodes["draw"]["inputs"]["text"]
        name = self._next_name(nodes)
        self.state.interrupted = False

        async def add(kind: str, **data: Any) -> None:
            data = {"prompt_id": prompt_id, **data, "timestamp": int(time.time() * 1000)}
            messages.append([kind, data])
            await self._send(kind, data, client)

        await add("execution_start")
        await add("execution_cached", nodes=["draw", "save"] if self.faults.cached else [])
        outputs, status = {}, "success"
        if not self.faults.cached:
            node = {"node": "draw", "display_node": "draw", "prompt_id": prompt_id}
            await self._send("executing", node, client)
        if text == "crash":
            self._tasks.append(asyncio.create_task(self.restart()))
            await asyncio.sleep(60)
        for step in range(1, 4):
            await self._send("progress_state", _progress_state(prompt_id, step), client)
            await self._send(
                "progress",
                {"value": step, "max": 3, "prompt_id": prompt_id, "node": "draw"},
                client,
            )
            await asyncio.sleep(0)
        while text == "slow" and not self.state.interrupted:
            await asyncio.sleep(0.005)
        await asyncio.sleep(self.faults.job_seconds)
        while self.faults.frozen:
            await asyncio.sleep(0.01)
        where = {"node_id": "draw", "node_type": "Draw", "executed": []}
        broken = {
            **where,
            "exception_message": "the pencil broke\n",
            "exception_type": "RuntimeError",
            "traceback": [],
            "current_inputs": {},
            "current_outputs": [],
        }
        if self.state.interrupted:
            status = "error"
            await add("execution_interrupted", **where)
        elif text == "fail" or self.faults.small or self.faults.old or self.faults.broken:
            status = "error"
            if self.faults.old:
                broken["exception_type"] = "custom_nodes.qwen.errors.UnavailableError"
                broken["exception_message"] = "this ComfyUI is older: update ComfyUI."
            if self.faults.small:
                broken["exception_type"] = "torch.OutOfMemoryError"
            await add("execution_error", **broken)
        else:
            if text == "block":
                await self._send("execution_error", {"prompt_id": prompt_id, **broken}, client)
            outputs["save"] = {"images": [self._image(name, nodes)]}
            shown = {"node": "save", "display_node": "save", "output": outputs["save"]}
            await self._send("executed", {**shown, "prompt_id": prompt_id}, client)
            await add("execution_success")
        self.state.history[prompt_id] = {
            "prompt": item,
            "outputs": outputs,
            "status": {
                "status_str": status,
                "completed": status == "success",
                "messages": messages,
            },
            "meta": {},
        }
        await self._send("executing", {"node": None, "prompt_id": prompt_id}, client)

    def _next_name(self, nodes: dict[str, Any]) -> str:
        """Numbers a name by those that are there before the job, as two servers of one folder."""
        if self.faults.named:
            return self.faults.named
        prefix = nodes["save"]["inputs"]["filename_prefix"]
        count = sum(name.startswith(f"{prefix}_0") for name in self.files)
        return f"{prefix}_{count + 1:05d}_.png"

    def _image(self, name: str, nodes: dict[str, Any]) -> dict[str, str]:
        seed = nodes["draw"]["inputs"]["seed"]
        data, texts = io.BytesIO(), PngInfo()
        texts.add_text("prompt", json.dumps(nodes))
        colour = (seed % 256, self.port % 256, len(self.files) % 256)
        Image.new("RGB", (4, 4), colour).save(data, "PNG", pnginfo=texts)
        self.files[name] = data.getvalue()
        return {"filename": name, "subfolder": "", "type": "output"}


def _progress_state(prompt_id: str, step: int) -> dict[str, Any]:
    state = {"value": step, "max": 3, "state": "running", "node_id": "draw"}
    ids = {"prompt_id": prompt_id, "display_node_id": "draw", "real_node_id": "draw"}
    return {"prompt_id": prompt_id, "nodes": {"draw": {**state, **ids, "parent_node_id": None}}}


@contextlib.contextmanager
def fake_comfyui(**faults: Any) -> Iterator[FakeComfyUI]:
    server = FakeComfyUI(Faults(**faults))
    usual = sys.getswitchinterval()
    # Two event loops in one process: each waits for the other's turn to end at every request.
    sys.setswitchinterval(0.0002)
    thread = threading.Thread(target=server.loop.run_forever)
    thread.start()
    try:
        server.call(server.start())
        yield server
    finally:
        server.call(server.stop())
        server.call(_end_tasks())
        server.loop.call_soon_threadsafe(server.loop.stop)
        thread.join()
        server.loop.run_until_complete(_end_connections())  # once nobody can connect any more
        server.loop.close()
        sys.setswitchinterval(usual)


async def _end_tasks() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _end_connections() -> None:
    """Ends connections that came while the server went away, too, which no handler closes."""
    for each in list(asyncio.get_running_loop()._transports.values()):
        each.abort()
    await asyncio.sleep(0)  # they close in the loop's next turn
