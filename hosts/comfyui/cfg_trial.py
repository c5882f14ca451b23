"""Separate against batched passes, timed in the steps that a run takes anyway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...optimizations.attention import Request
from ...optimizations.attention.cache import Measurement
from ...optimizations.attention.choice import measurement_key
from .cfg_padding import Merge
from .layers import ComfyLayers

SEPARATE, BATCHED = "separate", "batched"
# How a run measures, a step each: how it is computed, and whether it is timed. The first of either
# kind also compiles kernels, measures attention and compares a block; after that they take turns.
ORDER = (
    (SEPARATE, False),
    (SEPARATE, True),
    (BATCHED, False),
    (BATCHED, True),
    (SEPARATE, True),
    (BATCHED, True),
)
BATCHED_STEPS = sum(kind == BATCHED for kind, _ in ORDER)
# A measurement holds for texts whose lengths round up to the same multiple.
TEXT_BUCKET = 64


class Span:
    """The card's time from here to `end`, without a wait for either."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._begin.record(self._stream)

    def end(self) -> None:
        self._end.record(self._stream)

    def ms(self) -> float:
        """Milliseconds; waits for the end."""
        self._end.synchronize()
        return self._begin.elapsed_time(self._end)


class Trial:
    """The measurement that a run makes of prompts of certain lengths.

    Args:
        key: What it is kept under.
        tokens: Of the longest prompt and its image.
    """

    def __init__(self, key: str, tokens: int) -> None:
        self.key = key
        self._tokens = tokens
        self._steps = 0
        self._spans: dict[str, list[Span]] = {SEPARATE: [], BATCHED: []}

    @property
    def complete(self) -> bool:
        return self._steps == len(ORDER)

    def next_step(self) -> tuple[str, bool]:
        """How the next step is computed, and whether it is timed."""
        return ORDER[self._steps]

    def add(self, kind: str, span: Span | None) -> None:
        """Notes a step; without a span where it is not timed."""
        self._steps += 1
        if span is not None:
            self._spans[kind].append(span)

    def result(self) -> tuple[Measurement, float]:
        """The milliseconds of either kind, and the part by which like steps differ at most."""
        times = {kind: [span.ms() for span in spans] for kind, spans in self._spans.items()}
        spread = max(max(ms) / min(ms) - 1 for ms in times.values())
        return Measurement(self._tokens, {kind: min(ms) for kind, ms in times.items()}), spread


def why_not_measured(device: torch.device) -> str:
    """Why no time is taken on a device, in one clause; empty where it is."""
    return "" if device.type == "cuda" else f"nothing is measured on {device.type}"


def key_of(merges: Sequence[Merge], model: Any, device: torch.device, path: str) -> str:
    """What a measurement holds for: card, software, shapes, weights.

    Args:
        model: ComfyUI's BaseModel.
        path: What else decides how long a forward pass takes.
    """
    blocks, patcher = model.diffusion_model.transformer_blocks, model.current_patcher
    attn, layers = blocks[0].attn, ComfyLayers()
    items = max(len(merge.places) for merge in merges)
    longest = max(merge.longest for merge in merges)
    dtype = model.get_dtype_inference()
    request = Request(device, dtype, items, attn.heads, attn.dim_head, longest, masked=True)
    kinds = {
        str(layers.kind(layer))
        for block in blocks
        for layer in (block.attn.to_q, block.img_mlp.net[2])
    }
    if patcher is not None and patcher.is_dynamic():
        where = "paged"
    else:
        where = "partly loaded" if getattr(model, "model_lowvram", False) else "loaded"
    weights = f"{len(blocks)} blocks of {'+'.join(sorted(kinds))}, {where}"
    return "|".join((measurement_key(request), *map(_shapes, merges), weights, path))


def _shapes(merge: Merge) -> str:
    texts = "+".join(str(-(-length // TEXT_BUCKET) * TEXT_BUCKET) for length in merge.lengths)
    latent = "x".join(map(str, merge.latent))
    others = "".join(f", {name} {'x'.join(map(str, size))}" for name, size in merge.others)
    return f"latent {latent}, text {texts}{others}"
