"""A node pack for the measured server: when each node ran, and what memory was allocated after it.

bench/memory.py links this folder into the server's custom_nodes. GET /l40s_probe tells, POST
/l40s_probe/reset forgets. Two nodes: conditioning without a text encoder, and an end without a VAE.
"""

from __future__ import annotations

import threading
import time

import comfy.model_management
import torch
from aiohttp import web
from server import PromptServer

GIB = 2**30


def torch_memory() -> dict:
    """What torch's allocator has and had at most since the last reset, in GiB; empty on a CPU."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    return {
        "allocated_gib": torch.cuda.memory_allocated() / GIB,
        "max_allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.memory_reserved() / GIB,
        "max_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
    }


def reset_peaks() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def aimdo_gib() -> float | None:
    """What dynamic VRAM counts as in use on all cards; None where it is not on."""
    try:
        from comfy_aimdo import control
    except ImportError:
        return None
    return control.get_total_vram_usage() / GIB if control.lib is not None else None


def models() -> list[dict]:
    """What ComfyUI's bookkeeping says of each model that it has loaded."""
    return [
        {
            "model": type(patcher.model).__name__,
            "gib": patcher.model_size() / GIB,
            "loaded_gib": patcher.loaded_size() / GIB,
            "device": str(patcher.current_loaded_device()),
        }
        for loaded in list(comfy.model_management.current_loaded_models)
        if (patcher := loaded.model) is not None
    ]


class Timeline:
    """One entry for each node that ran, closed with the state that it left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[dict] = []
        self._open: dict | None = None

    def begin(self, node: str | None) -> None:
        """Closes the entry of the node before and opens one; None opens none."""
        with self._lock:
            self._close()
            if node is not None:
                self._open = {"node": node, "start": time.monotonic()}

    def _close(self) -> None:
        if self._open is None:
            return
        self._open |= {"end": time.monotonic(), **torch_memory(), "aimdo_gib": aimdo_gib()}
        self._entries.append({**self._open, "models": models()})
        self._open = None
        reset_peaks()

    def entries(self) -> list[dict]:
        self.begin(None)
        with self._lock:
            return list(self._entries)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._open = None
            reset_peaks()


TIMELINE = Timeline()


def watch(instance: PromptServer) -> None:
    """Takes note of each node that the server announces to its client."""
    send = instance.send_sync

    def send_sync(event, data, sid=None):
        if event == "executing":
            TIMELINE.begin(data.get("node"))
        send(event, data, sid)

    instance.send_sync = send_sync


watch(PromptServer.instance)


@PromptServer.instance.routes.get("/l40s_probe")
async def tell(request: web.Request) -> web.Response:
    nodes = TIMELINE.entries()
    return web.json_response(
        {"nodes": nodes, "torch": torch_memory(), "aimdo_gib": aimdo_gib(), "models": models()}
    )


@PromptServer.instance.routes.post("/l40s_probe/reset")
async def forget(request: web.Request) -> web.Response:
    TIMELINE.clear()
    return web.json_response({})


class RandomConditioning:
    """CONDITIONING of random numbers, as large as a prompt of so many tokens gives."""

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {
            "required": {
                "tokens": ("INT", {"default": 200, "min": 1, "max": 4096}),
                "width": ("INT", {"default": 3584, "min": 1, "max": 65536}),
                "seed": ("INT", {"default": 0, "min": 0, "max": 2**32}),
            }
        }

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"
    CATEGORY = "benchmark"

    def make(self, tokens: int, width: int, seed: int) -> tuple:
        generator = torch.Generator().manual_seed(seed)
        return ([[torch.randn(1, tokens, width, generator=generator), {}]],)


class LatentEnd:
    """Ends a graph at the latent, and says whether its numbers are finite."""

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {"required": {"samples": ("LATENT",)}}

    RETURN_TYPES = ()
    FUNCTION = "end"
    OUTPUT_NODE = True
    CATEGORY = "benchmark"

    def end(self, samples: dict) -> dict:
        values = samples["samples"].float()
        finite = bool(values.isfinite().all())
        return {"ui": {"text": [f"finite: {finite}, std: {values.std().item():.4g}"]}}


NODE_CLASS_MAPPINGS = {
    "L40SProbe_RandomConditioning": RandomConditioning,
    "L40SProbe_LatentEnd": LatentEnd,
}
