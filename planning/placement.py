"""Where the modulation weights of a transformer wait: on the card, or in host memory."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SettingError
from .memory import CardFacts, format_gib

ON_CARD, OFF_CARD = "on card", "off card"
PLACES = ("auto", ON_CARD, OFF_CARD)
# Qwen2.5-VL-7B in bf16 with its vision tower and without lm_head, which encoding never reads:
# 7.75 B parameters.
TEXT_ENCODER_BYTES = int(7.75e9) * 2


@dataclass(frozen=True)
class ModulationPlace:
    """Where the modulation weights are while the model runs, and why."""

    off_card: bool
    reason: str


def place_modulation(
    requested: str, *, weights: int, modulation: int, activations: int, card: CardFacts | None
) -> ModulationPlace:
    """Decides whether a table stands in for the modulation weights on the card.

    Off the card they cost one pass over the bus for each new schedule, or for each timestep that a
    sampler asks for beside its schedule: 13.6 GB in bf16, predicted 0.6 s over PCIe 4. On the card
    they cost their size. `auto` leaves them there where transformer, text encoder and one step all
    stay on the card with them.

    Args:
        requested: one of `PLACES`.
        weights: bytes of the whole transformer as it will be held.
        modulation: bytes of them in the modulation layers.
        activations: bytes of one step at 1328x1328.
        card: where the transformer runs; None for the CPU.

    Raises:
        SettingError: `requested` is no known place.
    """
    if requested not in PLACES:
        raise SettingError(
            f"the place of the modulation {requested!r} is unknown: choose {', '.join(PLACES)}."
        )
    if card is None:
        asked = "modulation: stays with the rest, because only an NVIDIA card has an off card"
        return ModulationPlace(False, asked if requested == OFF_CARD else "")
    size = format_gib(modulation)
    if requested != "auto":
        where = "stays in host memory" if requested == OFF_CARD else "stays on the card"
        return ModulationPlace(requested == OFF_CARD, f"modulation: {size} {where}, as requested")
    together = weights + TEXT_ENCODER_BYTES
    room = card.weight_budget(activations)
    beside = f"{format_gib(weights)} of transformer and {format_gib(TEXT_ENCODER_BYTES)} of bf16 "
    if together <= room:
        return ModulationPlace(
            False,
            f"modulation: {size} stays on the card, where {beside}text encoder fit beside a step",
        )
    return ModulationPlace(
        True,
        f"modulation: {size} stays in host memory, because {beside}text encoder do not fit "
        f"{card.name} together; each new schedule brings it to the card once",
    )
