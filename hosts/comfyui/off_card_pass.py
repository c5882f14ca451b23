"""Brings weights that wait in host memory past the card, and computes the modulation on the way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher

from ...optimizations.modulation import Entry, Layer, compute_entries, layers_of
from ...optimizations.weight_stream import WeightStream
from ...planning.memory import format_gib
from .off_card import OffCardLinear

logger = logging.getLogger(__name__)

# The card holds the layer that is computed and one that is on its way; more made a pass no faster.
LAYERS_ON_CARD = 2


@dataclass
class PassFigures:
    """What some passes took.

    Attributes:
        passes: How many there were.
        seconds: What they took.
        inexact: Whether one rounded otherwise than the card does.
        notes: Sentences about what did not go as it should.
    """

    passes: int = 0
    seconds: float = 0.0
    inexact: bool = False
    notes: list[str] = field(default_factory=list)

    def note(self, sentence: str) -> None:
        """Keeps a sentence for the report, and tells it at once."""
        self.notes.append(sentence)
        logger.warning("Qwen-Image L40S, modulation: %s.", sentence)


def compute_off_card(
    blocks: Sequence[torch.nn.Module],
    embeddings: Sequence[torch.Tensor],
    batch: int,
    patcher: ModelPatcher | None,
    figures: PassFigures,
    look: Callable[[], None] = lambda: None,
) -> list[Entry]:
    """`compute_entries` of blocks whose modulation is of OffCardLinear layers.

    Where the card has no room for the layers on their way, ComfyUI is asked to make some; where
    that does not help, the processor computes.

    Args:
        patcher: Whose patches are on the weights; None for none.
        figures: Is added to.
        look: Reads the card while all that a pass took is still there.
    """
    figures.passes += 1
    layers = [layer.module[1] for layer in layers_of(blocks)]
    device = embeddings[0].device
    try:
        return _streamed(blocks, layers, embeddings, batch, patcher, figures, look)
    except torch.OutOfMemoryError:
        pass  # outside of the clause, where the exception holds what is to be freed
    needed = LAYERS_ON_CARD * max(layer.nbytes for layer in layers)
    _make_room(needed, device)
    figures.note(
        f"the card had no room for {format_gib(needed)} of weights on their way, so ComfyUI moved "
        "other models off it first"
    )
    try:
        return _streamed(blocks, layers, embeddings, batch, patcher, figures, look)
    except torch.OutOfMemoryError:
        pass
    figures.note(
        "computed on the processor, because the card has no room for one layer's weights; it "
        "rounds otherwise than the card does, so free memory for an exact picture"
    )
    figures.inexact = True
    on_cpu = [embedding.cpu() for embedding in embeddings]
    entries = _streamed(blocks, layers, on_cpu, batch, patcher, figures, look)
    return [Entry(entry.image.to(device), entry.text.to(device)) for entry in entries]


def _streamed(
    blocks: Sequence[torch.nn.Module],
    layers: Sequence[OffCardLinear],
    embeddings: Sequence[torch.Tensor],
    batch: int,
    patcher: ModelPatcher | None,
    figures: PassFigures,
    look: Callable[[], None],
) -> list[Entry]:
    start, device = time.perf_counter(), embeddings[0].device
    stream = WeightStream([layer.parts() for layer in layers], device, ahead=LAYERS_ON_CARD - 1)
    entries = compute_entries(blocks, embeddings, batch, _walk(blocks, stream, patcher))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        look()
        # A step has no use for blocks of a layer's size, and would take others beside them.
        torch.cuda.empty_cache()
    seconds = time.perf_counter() - start
    figures.seconds += seconds
    if stream.note:
        figures.note(stream.note.removesuffix("."))
    logger.info(
        "Qwen-Image L40S: the modulation of %d timesteps took %.2f s, in which %s of weights were "
        "brought to the card.",
        len(embeddings),
        seconds,
        format_gib(stream.bytes),
    )
    return entries


def _walk(
    blocks: Sequence[torch.nn.Module], stream: WeightStream, patcher: ModelPatcher | None
) -> Iterator[Layer]:
    """The layers in order, each with its weights on the device while it is had."""
    with stream:
        for layer, parts in zip(layers_of(blocks), stream, strict=True):
            with layer.module[1].on_card(parts, patcher):
                yield layer


def _make_room(needed: int, device: torch.device) -> None:
    """Has ComfyUI move models that this run does not use off the card."""
    loaded = comfy.model_management.current_loaded_models
    keep = [model for model in loaded if model.currently_used]
    comfy.model_management.free_memory(needed, device, keep_loaded=keep)
    comfy.model_management.soft_empty_cache()
