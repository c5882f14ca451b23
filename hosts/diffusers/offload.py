"""Where the model runs and how much memory there is."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import QwenImagePipeline

from ...errors import SettingError, UnavailableError
from ...loaders.precision import format_bytes
from ...machine.memory import available_memory
from ...planning.bytes import step_activation_bytes
from ...spec import GIB, TransformerShape


def choose_device(requested: str) -> str:
    """Returns `cpu` or `cuda:N`; `auto` is the current CUDA card, or the CPU where there is none.

    Raises:
        SettingError: the name is not `auto`, `cpu`, `cuda` or `cuda:N`.
        UnavailableError: the card that was asked for is not there.
    """
    match = re.fullmatch(r"auto|cpu|cuda(?::(\d+))?", requested)
    if not match:
        raise SettingError(f"device {requested!r} is unknown: choose auto, cpu, cuda or cuda:N.")
    cards = torch.cuda.device_count()
    if requested == "cpu" or (requested == "auto" and not cards):
        return "cpu"
    if not cards:
        raise UnavailableError(
            f"device {requested!r} needs a CUDA card and torch {torch.__version__} sees none: use "
            "--device cpu, or see `qwen-l40s doctor`."
        )
    index = int(match[1]) if match[1] else torch.cuda.current_device()
    if index >= cards:
        raise UnavailableError(
            f"device {requested!r} is not there: this machine has cuda:0 to cuda:{cards - 1}."
        )
    return f"cuda:{index}"


def available_bytes(device: str) -> int:
    """Memory that can be had on the device now, in bytes."""
    return available_memory() if device == "cpu" else torch.cuda.mem_get_info(device)[0]


# Moves the parts of a pipeline between host memory and the card, each whole.
#
# accelerate's hooks do the same on every call of a module. Here it happens at the three places
# where
# a part's turn begins, so that a prompt that is remembered moves nothing, the optimized transformer
# has its own forward alone, and the allocator's cache is emptied only where the room is needed.

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


# Which parts of a pipeline stay on the card, and which wait in host memory for their turn.

NONE, TEXT_ENCODER, MODEL = "none", "text-encoder", "model"
OFFLOADS = ("auto", NONE, TEXT_ENCODER, MODEL)
# {way: the parts that stay on the card}; the others are there while they run.
RESIDENT = {
    NONE: ("text_encoder", "transformer", "vae"),
    TEXT_ENCODER: ("transformer", "vae"),
    MODEL: (),
}
# In bf16, derived for the longest prompt, 546 tokens with its template: their logits, which
# transformers computes too, in bf16 and fp32 (0.5 GB), all hidden states (0.1 GB), workspaces.
ENCODE_BYTES = GIB
# In bf16, measured on an H200 from 1024x1024 to 3072x3072 as allocated memory.
DECODE_BYTES_PER_PIXEL = 1259


@dataclass(frozen=True)
class OffloadChoice:
    """A way (a key of `RESIDENT`) and why it was chosen."""

    name: str
    reason: str


def transformer_shape(config: Mapping[str, Any]) -> TransformerShape:
    """The sizes in a transformer's config.json."""
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    return TransformerShape(
        blocks=config["num_layers"],
        dim=heads * head_dim,
        heads=heads,
        head_dim=head_dim,
        joint_dim=config["joint_attention_dim"],
        in_channels=config["in_channels"],
        packed_out_channels=config["patch_size"] ** 2
        * (config["out_channels"] or config["in_channels"]),
    )


def part_activations(
    shape: TransformerShape, *, width: int, height: int, batch: int, itemsize: int
) -> dict[str, int]:
    """{part: bytes that it takes on the card beside its weights while it runs}.

    Args:
        width: pixels, as `height`.
        batch: images in one forward of the transformer; the VAE decodes them one by one.
        itemsize: bytes of a number that is computed with.
    """
    in_bf16 = {
        "text_encoder": ENCODE_BYTES,
        "transformer": step_activation_bytes(shape, width=width, height=height, batch=batch),
        "vae": DECODE_BYTES_PER_PIXEL * width * height,
    }
    return {part: count * itemsize // 2 for part, count in in_bf16.items()}


def choose_offload(
    requested: str,
    *,
    what: str,
    device: str,
    weights: Mapping[str, int],
    activations: Mapping[str, int],
    free: int,
    host_free: int,
) -> OffloadChoice:
    """Resolves `auto` to the first way whose weights and activations fit; refuses what cannot fit.

    A way that is asked for by name is refused for its weights alone: activations are upper bounds.

    Args:
        requested: one of `OFFLOADS`.
        what: the subject of a refusal, such as `models/Qwen-Image in bf16`.
        device: where the parts run, such as `cpu` or `cuda:0`.
        weights: {part: bytes}.
        activations: {part: bytes}, as `part_activations` counts them.
        free: bytes that can be had on `device` now.
        host_free: bytes of host memory that can be had now.

    Raises:
        SettingError: `requested` is no known name.
        UnavailableError: the card or host memory is too small.
    """
    if requested not in OFFLOADS:
        raise SettingError(f"offload {requested!r} is unknown: choose {', '.join(OFFLOADS)}.")
    if device == "cpu":
        total = sum(weights.values())
        _check_fit(what, "its weights alone", NONE, total, device, free)
        # The VAE decodes in tiles where it has to.
        _check_fit(
            what, "its weights and a step", NONE, total + activations["transformer"], device, free
        )
        asked = "" if requested in ("auto", NONE) else f"{requested} was asked for, and "
        return OffloadChoice(NONE, f"{asked}everything runs on the processor")
    if requested != "auto":
        nothing = dict.fromkeys(weights, 0)
        card, host = _needed(requested, weights, nothing)
        _check_fit(what, "its weights alone", requested, card, device, free)
        _check_fit(what, "the waiting parts", requested, host, "the host", host_free)
        return OffloadChoice(requested, "requested")
    failed = []
    for name in RESIDENT:
        card, host = _needed(name, weights, activations)
        facts = f"{format_bytes(card)} on {device}"
        facts += f" and {format_bytes(host)} of host memory" if host else ""
        if card <= free and host <= host_free:
            room = f"{format_bytes(free)} and {format_bytes(host_free)} are free"
            because = "".join(f"; {fault}" for fault in failed)
            return OffloadChoice(name, f"auto: takes {facts}, {room}{because}")
        failed.append(f"{name} would take {facts}")
    largest = max(weights, key=weights.get)
    raise UnavailableError(
        f"{what} does not fit: {', '.join(failed)}, where {format_bytes(free)} and "
        f"{format_bytes(host_free)} are free and the {largest} alone is "
        f"{format_bytes(weights[largest])}: free memory, or choose a smaller size or batch, "
        "another --device or --precision."
    )


def _needed(
    name: str, weights: Mapping[str, int], activations: Mapping[str, int]
) -> tuple[int, int]:
    """Bytes on the card at the worst moment, and in host memory."""
    if name == MODEL:
        # All wait in host memory between the turns of two of them.
        largest = max(weights[part] + activations[part] for part in weights)
        return largest, sum(weights.values())
    resident = RESIDENT[name]
    card = sum(weights[part] for part in resident) + max(activations[part] for part in resident)
    return card, sum(size for part, size in weights.items() if part not in resident)


def _check_fit(what: str, of: str, way: str, needed: int, place: str, free: int) -> None:
    if needed > free:
        others = "" if place == "cpu" else f", another --offload than {way}"
        raise UnavailableError(
            f"{what} needs {format_bytes(needed)} for {of} and {place} has "
            f"{format_bytes(free)} free: free memory, or choose another --device or "
            f"--precision{others}."
        )
