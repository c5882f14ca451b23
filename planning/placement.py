"""Where the modulation weights of a transformer wait: on the card, or in host memory."""

from __future__ import annotations

from dataclasses import dataclass

ON_CARD, OFF_CARD = "on card", "off card"
PLACES = ("auto", ON_CARD, OFF_CARD)


@dataclass(frozen=True)
class ModulationPlace:
    """Where the modulation weights are while the model runs, and why."""

    off_card: bool
    reason: str
