"""Counts the card's memory in each phase of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..families.registry import find_member
from ..spec.formats import GIB, MIB
from ..spec.transformer import ON_CARD, REFERENCE_SIDE
from .bytes import (
    BF16,
    TransformerBytes,
    buffer_bytes,
    encoder_bytes,
    encoding_bytes,
    graph_bytes,
    input_bytes,
    lora_bytes,
    step_bytes,
    table_bytes,
    table_rows,
    text_encoder_bytes,
    weight_bytes,
)
from .rates import constants
from .request import DROPPED, ON_PROCESSOR, STREAMED, RunRequest, Setting
from .vae import decode_plan
from .vae_work import encode_peak_bytes

PHASES = ("load", "text", "tables", "sampling", "decode")
# What steps have captured, which stays as long as the transformer does, and with it the buffers.
GRAPHS = "CUDA graphs"


class Range(NamedTuple):
    """Between which values a figure lies; both are the same where it was measured."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """Gives the geometric mean, which is named where there is room for one figure."""
        return (self.low * self.high) ** 0.5

    def __add__(self, other: Any) -> Range:
        return Range(self.low + other[0], self.high + other[1])

    def times(self, factor: float) -> Range:
        return Range(self.low * factor, self.high * factor)


@dataclass(frozen=True)
class Phase:
    """The card at the worst moment of one phase, in bytes."""

    name: str
    weights: int  # of the part that works: text encoder, modulation on its way, transformer, VAE
    activations: int
    workspace: int  # what GEMMs and convolutions take besides them, and the allocator's rounding
    context: int
    resident: Mapping[str, int] = field(default_factory=dict)  # {what else stays in VRAM: bytes}
    seconds: Range | None = None

    @property
    def peak_bytes(self) -> int:
        """Counts the part that works, alone."""
        return self.weights + self.activations + self.workspace

    @property
    def card_bytes(self) -> int:
        return self.peak_bytes + self.context + sum(self.resident.values())

    @property
    def needed_bytes(self) -> int:
        """Counts the same without CUDA graphs, which a run gives up where memory is short."""
        return self.card_bytes - self.resident.get(GRAPHS, 0)


def gib(count: float) -> float:
    """Turns bytes into GiB, to a thousandth."""
    return round(count / GIB, 3)


def figure(value: float) -> float:
    return float(f"{value:.4g}")


# What stays on a card that does not hold all, while the host moves the rest to it and off it.

# The block that computes, and the one whose weights are on their way.
BLOCKS_ON_CARD = 2


def least_weights(request: RunRequest, weights: int) -> int:
    """Counts the least bytes of a transformer's weights on the card while a block computes."""
    return min(weights, BLOCKS_ON_CARD * -(-weights // request.transformer.blocks))


def within(phase: Phase, usable: int) -> Phase:
    """Moves off the card what does not fit: from other parts, then from the part that works."""
    over, resident = phase.card_bytes - usable, dict(phase.resident)
    if over <= 0:
        return phase
    for name in ("transformer", "text encoder"):
        leaves = min(over, resident.get(name, 0))
        resident[name], over = resident.get(name, 0) - leaves, over - leaves
    there = {name: count for name, count in resident.items() if count}
    return replace(phase, weights=phase.weights - min(phase.weights, over), resident=there)


# What a card holds at the worst moment of each phase of a run.
#
# Counted for ComfyUI from the second image on, when every part that is to stay in VRAM is
# there. The workspace and the CUDA context are the two figures that are measured and not counted.

# What ComfyUI leaves free on Linux (comfy.model_management.EXTRA_RESERVED_VRAM); Windows: 600 MiB.
KEPT_FREE_BYTES = 400 * MIB
# Modulation layers on the card while their weights pass it: one computes, one is on its way.
LAYERS_ON_CARD = 2


def phases(
    request: RunRequest, setting: Setting, card_bytes: int | None = None
) -> dict[str, Phase]:
    """Counts every phase of a run by name, in order, without seconds. A resident setting has all
    there that is to stay; else the rest moves to the card when its turn comes. The decoder plans
    tiles by `card_bytes`, None for no limit. Raises UnavailableError where the image never decodes.
    """
    found = steps(request, setting, card_bytes)
    decode = decoding(request, setting, found["sampling"], card_bytes)
    return {**found, decode.name: decode}


def steps(request: RunRequest, setting: Setting, card_bytes: int | None = None) -> dict[str, Phase]:
    """Counts the phases before decoding, as `phases`: no tiles have to be planned for them."""
    place, measured = setting.text_encoder_place, constants()
    workspace, context = int(measured.workspace), int(measured.context)
    weights = transformer_bytes(request, setting)
    on_card = weights.total - (weights.modulation if setting.off_card else 0)
    text = text_encoder_bytes(request, setting.text_encoder)
    activations = step_bytes(request, setting).most
    others = others_bytes(request, setting)
    stays = {
        "VAE": vae_bytes(request),
        "modulation table": table_bytes(request),
        "ControlNet": request.controlnet_bytes,
        "LoRAs": lora_bytes(request, setting),
        **others,
    }
    sampled, text_stays = on_card, text if place == ON_CARD else 0
    usable = None if card_bytes is None else card_bytes - KEPT_FREE_BYTES
    if usable is not None and not setting.resident:
        room = usable - activations - workspace - context - sum(stays.values())
        text_stays = min(text_stays, max(0, room - least_weights(request, on_card)))
        sampled = min(on_card, max(0, room - text_stays))
    stays["text encoder"] = text_stays

    def phase(
        name: str,
        weights: int,
        activations: int,
        resident: Mapping[str, int],
        workspace: int = workspace,
    ) -> Phase:
        there = {part: count for part, count in resident.items() if count}
        return Phase(name, weights, activations, workspace, context, there)

    encoding, there = encoding_bytes(request), {**stays, "text encoder": 0, "transformer": sampled}
    if place == ON_PROCESSOR:
        text = encoding = 0
    if place in (DROPPED, STREAMED):
        # The transformer's turn is over, or has not come yet.
        there = {name: stays[name] for name in ("VAE", *others)}
    if request.references:
        side = REFERENCE_SIDE // request.vae.pixels
        encoding = max(encoding, encode_peak_bytes(request.vae, side, side, BF16))
    if place == STREAMED and usable is None:  # the least that it needs
        text = min(text, BLOCKS_ON_CARD * -(-text // request.member.text_encoder.layers))
    # What passes while the modulation's table is filled, two layers at a time where it waits off
    # the card. All rows go at once through a layer, and once more for the first layer's proof.
    rows, dim = request.transformer.block.modulation_rows, request.transformer.dim
    filling = input_bytes(request) + BF16 * table_rows(request) * dim * (1 + 3 * rows)
    passing = min(weights.modulation, sampled)
    if setting.off_card:
        passing = min(weights.modulation, LAYERS_ON_CARD * rows * dim * (dim + 1) * BF16)
    waiting = sampled if setting.off_card else sampled - passing
    found = {
        "load": phase("load", sampled, 0, {**stays, "modulation table": 0}, workspace=0),
        "text": phase("text", text, encoding, there, workspace if encoding else 0),
        "tables": phase("tables", passing, filling, {**stays, "transformer": waiting}),
        "sampling": phase("sampling", sampled, activations, stays),
    }
    if usable is not None and not setting.resident:
        found = {name: within(phase, usable) for name, phase in found.items()}
    elif usable is not None and place == STREAMED:
        found["text"] = within(found["text"], usable)
    return {name: _with_graphs(phase, request, setting, usable) for name, phase in found.items()}


def decoding(
    request: RunRequest, setting: Setting, sampling: Phase, card_bytes: int | None
) -> Phase:
    """Counts the decoder with what stays after sampling; what it lacks, ComfyUI moves first."""
    vae, context = vae_bytes(request), sampling.context
    resident = {**sampling.resident, "transformer": sampling.weights, "VAE": 0, GRAPHS: 0}
    usable = free = None
    if card_bytes is not None:
        usable = card_bytes - KEPT_FREE_BYTES
        free = usable - context - vae - sum(resident.values())
    movable = {name: resident.get(name, 0) for name in ("text encoder", "transformer")}
    # Room that is short leaves less of the others there.
    short = max(0, -(free or 0))
    peak = decode_plan(request, free, max(0, sum(movable.values()) - short)).peak_bytes
    moved = 0 if free is None else min(sum(movable.values()), max(0, peak - free))
    for name, count in movable.items():
        leaves = min(count, moved)
        resident[name], moved = count - leaves, moved - leaves
    there = {name: count for name, count in resident.items() if count}
    # The plan has the workspace of convolutions.
    return _with_graphs(Phase("decode", vae, peak, 0, context, there), request, setting, usable)


def _with_graphs(phase: Phase, request: RunRequest, setting: Setting, usable: int | None) -> Phase:
    # They come with the first steps, and go with the transformer.
    there = phase.name == "sampling" or "transformer" in phase.resident
    if not there or not (graphs := graph_bytes(request, setting)):
        return phase
    # Graphs keep the buffers of the blocks, beside which the host's block runs for another prompt.
    kept = graphs + buffer_bytes(request, setting)
    if usable is not None and phase.card_bytes + kept > usable:
        return phase
    return replace(phase, resident={**phase.resident, GRAPHS: kept})


def transformer_bytes(request: RunRequest, setting: Setting) -> TransformerBytes:
    """Counts the weights in the setting's precision; true sizes stand above the shape's."""
    counted, parts = weight_bytes(request.transformer, setting.precision), request.parts
    if setting.packed and parts.packed is not None:
        return TransformerBytes(*parts.packed)
    total = counted.total if parts.transformer_bytes is None else parts.transformer_bytes
    modulation = counted.modulation if parts.modulation_bytes is None else parts.modulation_bytes
    return TransformerBytes(total, min(total, modulation))


def vae_bytes(request: RunRequest) -> int:
    known = request.parts.vae_bytes
    return request.member.vae_bytes if known is None else known


def others_bytes(request: RunRequest, setting: Setting) -> dict[str, int]:
    """Counts {family and precision: bytes} of other models; what several have is there once."""
    member = request.member
    found: dict[str, int] = {}
    encoders, vaes = {member.text_encoder}, {member.vae}
    for family, precision in request.others:
        other = find_member(family)
        count = weight_bytes(other.transformer, precision).total
        if other.text_encoder not in encoders:
            count += encoder_bytes(other.text_encoder, setting.text_encoder)
        if other.vae not in vaes:
            count += other.vae_bytes
        encoders.add(other.text_encoder)
        vaes.add(other.vae)
        name = f"{family} in {precision}"
        found[name] = found.get(name, 0) + count
    return found
