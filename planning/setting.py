"""What a plan has settled: the precisions, and where each part waits."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SettingError
from .memory import QUANTIZED
from .placement import OFF_CARD, ON_CARD

DROPPED, ON_PROCESSOR = "drop after encoding", "cpu"
HELD_PRECISIONS = ("bf16", *QUANTIZED)
TEXT_PLACES = (ON_CARD, DROPPED, ON_PROCESSOR)


@dataclass(frozen=True)
class Setting:
    """How a wish is run; nothing in it is left to choose.

    Args:
        precision: of the transformer, one of `HELD_PRECISIONS`.
        modulation: "on card", or "off card", where a table stands in for its weights.
        text_encoder: precision of the text encoder, one of `HELD_PRECISIONS`.
        text_encoder_place: one of `TEXT_PLACES`.
        resident: False where the host has to move weights to the card and off it during a run.
        weight_only: whether the card's tensor cores do not multiply the precision, so that weights
            are expanded to bf16 one by one.

    Raises:
        SettingError: a precision or a place is unknown, or bf16 is to be expanded to bf16.
    """

    precision: str = "bf16"
    modulation: str = ON_CARD
    text_encoder: str = "bf16"
    text_encoder_place: str = ON_CARD
    resident: bool = True
    weight_only: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("precision", self.precision, HELD_PRECISIONS),
            ("modulation", self.modulation, (ON_CARD, OFF_CARD)),
            ("text encoder precision", self.text_encoder, HELD_PRECISIONS),
            ("text encoder place", self.text_encoder_place, TEXT_PLACES),
        ):
            if value not in allowed:
                raise SettingError(
                    f"{name} {value!r} settles nothing that runs: choose {', '.join(allowed)}."
                )
        if self.weight_only and self.precision not in QUANTIZED:
            raise SettingError(
                f"weights in {self.precision} are multiplied as they are: leave weight_only to "
                f"{' and '.join(QUANTIZED)}."
            )

    @property
    def off_card(self) -> bool:
        """Whether the modulation weights wait in host memory."""
        return self.modulation == OFF_CARD
