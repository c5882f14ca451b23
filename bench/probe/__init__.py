"""A node pack for a measured server: how long each node ran, and torch's peak meanwhile.

bench/prompt.py links this folder into the server's custom_nodes. GET /l40s_probe tells what ran
since it was asked last.
"""

from __future__ import annotations

import time

import comfy.model_management
import torch
from aiohttp import web
from server import PromptServer

GIB = 2**30
ENDS = ("executing", "execution_success", "execution_error", "execution_interrupted")
nodes: list[dict] = []
running: list[tuple[str, float]] = []
send = PromptServer.instance.send_sync


def peak_gib() -> float | None:
    """The most that torch's tensors held since the last call; None without a card."""
    if not (comfy.model_management.is_nvidia() and torch.cuda.is_initialized()):
        return None
    peak = torch.cuda.max_memory_allocated() / GIB
    torch.cuda.reset_peak_memory_stats()
    return peak


def send_sync(event, data, sid=None):
    """Takes note of each node that the server announces to its client."""
    if event in ENDS:
        peak, now = peak_gib(), time.monotonic()
        if running:
            node, start = running.pop()
            nodes.append({"node": node, "seconds": now - start, "torch_peak_gib": peak})
        if event == "executing" and data.get("node") is not None:
            running.append((data["node"], now))
    send(event, data, sid)


PromptServer.instance.send_sync = send_sync


@PromptServer.instance.routes.get("/l40s_probe")
async def tell(request: web.Request) -> web.Response:
    found = list(nodes)
    nodes.clear()
    return web.json_response(found)


NODE_CLASS_MAPPINGS = {}
