"""Whether a server can run a job at all: its card, as the planner counts it, and its version."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import SettingError, UnavailableError
from ...options import likely_family
from ...planning.cards import name_key
from ...planning.plan import LEAST_SIDE, plan
from ...planning.request import AUTO, RunRequest
from ...spec.families import SINGLE_STREAM_FAMILY
from ...spec.formats import CardFacts
from ...spec.transformer import COMFYUI_21, NEEDS_21, whole_pixels
from .workflow import Graph, source

CARDS = Path(__file__).parents[2] / "planning" / "gpus.json"
# `cuda:0 NVIDIA L40S : cudaMallocAsync` (comfy.model_management.get_torch_device_name).
DEVICE = re.compile(r"cuda:\d+ (.+?)( : \w*)?")
LOADERS = ("QwenL40S_Load", "QwenL40S_LoadModel")
MICROS, AS_STORED = ("micro (bundled)", "micro 2.1 (bundled)"), "as stored"
SAMPLERS = ("KSampler", "KSamplerAdvanced", "SamplerCustom", "SamplerCustomAdvanced")
EMPTY = ("EmptyLatentImage", "EmptySD3LatentImage", "EmptyQwenImageLayeredLatentImage")
# How files of Qwen-Image-2.1 are called; 2511 is another, and so is a fine-tune's own v2.1.
NAMED_21 = re.compile(r"(?:qwen|image)[ ._-]*v?2[._-]?1(?!\d)", re.IGNORECASE)
VERSION = re.compile(r"v?(\d+)\.(\d+)")
# Nodes of any pack that use other cards or paint in parts: a pass takes less of the first card.
ELSEWHERE = re.compile("Cards|Context|Device|MultiGPU|Tile|Window")


def misfit(graph: Graph, stats: Mapping[str, Any]) -> str | None:
    """Why a server's card cannot run a graph, with the remedy; None where it can, however slowly,
    and where that is not known: of a card that is not listed, a CPU, another pack's loader.

    Counted is the least that the graph tells: a size that comes from an image is the smallest, and
    references, LoRAs and ControlNets take nothing.

    Args:
        stats: what the server answers to GET /system_stats.
    """
    card = _card(stats)
    reasons = (_refusal(card, request) for request in _requests(graph)) if card else ()
    return next(filter(None, reasons), None)


def too_old(graph: Graph, stats: Mapping[str, Any]) -> str | None:
    """Why a server's ComfyUI knows no model of the graph, by its file's name, with the remedy; None
    where it does, and where its version is not known.

    Args:
        stats: what the server answers to GET /system_stats.
    """
    has = str((stats.get("system") or {}).get("comfyui_version"))
    version, first = VERSION.match(has), VERSION.match(COMFYUI_21)
    if version is None or [*map(int, version.groups())] >= [*map(int, first.groups())]:
        return None
    loads = (node for node in graph.values() if "Load" in node["class_type"])
    values = (str(value) for node in loads for value in node["inputs"].values())
    if not any(it.endswith(".safetensors") and NAMED_21.search(it) for it in values):
        return None
    return f"{NEEDS_21}, and the server has {has}: update ComfyUI there."


def _card(stats: Mapping[str, Any]) -> CardFacts | None:
    device = next(iter(stats.get("devices") or ()), {})
    named, size = DEVICE.fullmatch(str(device.get("name"))), device.get("vram_total")
    if device.get("type") != "cuda" or named is None or not isinstance(size, int):
        return None
    capability = _capabilities().get(name_key(named[1]))
    return capability and CardFacts(named[1], size, capability)


@functools.cache
def _capabilities() -> dict[str, tuple[int, int]]:
    """Of every listed card, by each of its names."""
    return {
        name_key(other): tuple(card["capability"])
        for name, card in json.loads(CARDS.read_text(encoding="utf-8"))["cards"].items()
        for other in (name, *card["also"])
    }


@functools.lru_cache(maxsize=4096)
def _refusal(card: CardFacts, request: RunRequest) -> str | None:
    try:
        plan(card, request)  # 5 to 50 ms
    except UnavailableError as error:
        return str(error)
    return None


def _requests(graph: Graph) -> Iterator[RunRequest]:
    """Of each sampler that one of our loaders feeds, then of each such loader by itself."""
    inputs = (value for node in graph.values() for value in node["inputs"].values())
    read = {source(graph, value) for value in inputs}  # what nothing reads does not run
    for classes in (SAMPLERS, LOADERS):
        found = (node for node in graph if graph[node]["class_type"] in classes and node in read)
        yield from filter(None, (_request(graph, node) for node in found))


def _request(graph: Graph, node: str) -> RunRequest | None:
    *between, loader = _behind(graph, node, "guider", "model")
    *_, latent = _behind(graph, node, "latent_image")
    load = loader["inputs"]
    if loader["class_type"] not in LOADERS or load.get("model") in MICROS:
        return None
    if any(ELSEWHERE.search(other["class_type"]) for other in between):
        return None
    size = _counts(latent) if latent["class_type"] in EMPTY else {}
    layers, precision = size.get("layers", 0), load.get("precision", AUTO)
    is_21 = NAMED_21.search(str(load.get("model")))
    try:
        return RunRequest(
            family=SINGLE_STREAM_FAMILY.name if is_21 else likely_family(0, layers),
            precision=AUTO if precision == AS_STORED else precision,
            width=whole_pixels(size.get("width", LEAST_SIDE)),
            height=whole_pixels(size.get("height", LEAST_SIDE)),
            batch=size.get("batch_size", 1),
            steps=_counts(graph[node]).get("steps", 1),
            layers=layers,
            text_tokens=1,
            modulation=load.get("modulation", AUTO),
        )
    except SettingError:  # a value that is wired, or that the server refuses by itself
        return None


def _behind(graph: Graph, node: str | None, *inputs: str) -> Iterator[Mapping[str, Any]]:
    """A node, and those behind it along the first of these inputs that each has wired."""
    passed: set[str] = set()
    while node is not None and node not in passed:
        passed.add(node)
        yield graph[node]
        feeders = [source(graph, graph[node]["inputs"].get(name)) for name in inputs]
        node = next(filter(None, feeders), None)


def _counts(node: Mapping[str, Any]) -> dict[str, int]:
    return {name: value for name, value in node["inputs"].items() if type(value) is int}
