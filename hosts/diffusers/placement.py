"""Moves the parts of a pipeline between host memory and the card, each whole.

accelerate's hooks do the same on every call of a module. Here it happens at the three places where
a part's turn begins, so that a prompt that is remembered moves nothing, the optimized transformer
has its own forward alone, and the allocator's cache is emptied only where the room is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from diffusers import QwenImagePipeline

from ...loaders.precision import format_bytes
from .device import available_bytes
from .offload import MODEL, RESIDENT, OffloadChoice

logger = logging.getLogger(__name__)

HOST = torch.device("cpu")


class Placement:
    """Where the parts of a pipeline are.

    Args:
        parts: {name: module}, loaded to where `device_of` says.
        choice: Which of them stay on the card.
        device: The card, or the processor, where nothing moves.
        free: Bytes that the driver has free on the card; blocks that torch holds unused are none
            of them.
        clear: Gives those blocks back to the driver.

    Attributes:
        moves: (part, "card" or "host") of every move so far.
    """

    def __init__(
        self,
        parts: Mapping[str, torch.nn.Module],
        choice: OffloadChoice,
        device: str,
        *,
        free: Callable[[], int] | None = None,
        clear: Callable[[], None] = torch.cuda.empty_cache,
    ) -> None:
        self.choice = choice
        self.moves: list[tuple[str, str]] = []
        self._parts = dict(parts)
        self._device = torch.device(device)
        self._free = free or (lambda: available_bytes(device))
        self._clear = clear
        self._visiting: str | None = None

    @contextmanager
    def turn(self, name: str, activations: int) -> Iterator[torch.device]:
        """Has a part on the card meanwhile; yields where it computes.

        Parts that take turns stay until the next one's; the text encoder of the way `text-encoder`
        leaves at once. A text encoder for which there is no room computes on the processor.

        Args:
            activations: Bytes that it takes on the card beside its weights.

        Raises:
            torch.cuda.OutOfMemoryError: the card is full; the part is in host memory again.
        """
        part = self._parts[name]
        if name in RESIDENT[self.choice.name]:
            if self._device.type != "cpu":
                self._make_room(activations)
            yield self._device
            return
        if self._visiting not in (None, name):
            self._leave()
        if self._visiting is None:
            needed = weight_bytes(part) + activations
            room = self._make_room(needed)
            if room < needed and name == "text_encoder":
                logger.info(
                    "the text encoder computes on the processor: it takes %s and %s is free",
                    format_bytes(needed),
                    format_bytes(room),
                )
                yield HOST
                return
            self._visiting = name
            try:
                self._move(name, self._device, "card")
            except BaseException:  # some of its tensors are there
                self._leave()
                raise
        else:
            self._make_room(activations)
        try:
            yield self._device
        finally:
            if self.choice.name != MODEL:
                self._leave()

    def _leave(self) -> None:
        name, self._visiting = self._visiting, None
        self._move(name, HOST, "host")

    def _move(self, name: str, device: torch.device, place: str) -> None:
        self.moves.append((name, place))
        self._parts[name].to(device)

    def _make_room(self, needed: int) -> int:
        """What is free, after giving back what torch holds if that is too little."""
        free = self._free()
        if free < needed:
            self._clear()
            free = self._free()
        return free


class PlacedPipeline(QwenImagePipeline):
    """diffusers' pipeline over parts of which some wait in host memory."""

    run_device: torch.device | None = None

    @property
    def _execution_device(self) -> torch.device:
        return self.run_device or super()._execution_device


def device_of(part: str, choice: OffloadChoice, device: str) -> str:
    """Where a part is loaded to."""
    return device if part in RESIDENT[choice.name] else HOST.type


def weight_bytes(module: torch.nn.Module) -> int:
    """What a module's parameters and buffers take."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
