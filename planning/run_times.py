"""How long the phases of a run take in the setting that a plan offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .cards import Card
from .estimate import Phase, Range
from .load_time import cold_start_seconds, load_seconds
from .phases import KEPT_FREE_BYTES
from .plan import Option
from .rates import Rates
from .setting import DROPPED
from .text_encoder import text_encoder_bytes
from .timing import (
    decode_seconds,
    encode_image_seconds,
    encode_text_seconds,
    forward_seconds,
    sampling_seconds,
    table_seconds,
)
from .wish import Loras, Wish


@dataclass(frozen=True)
class RunTimes:
    """An option on a card with its rates.

    Attributes:
        wish: With the sizes of the option's precision.
        slow, fast: The slowest and the fastest rates that are to be expected.
    """

    wish: Wish
    option: Option
    card: Card
    slow: Rates
    fast: Rates

    def phases(self, file_bytes: int) -> dict[str, Phase]:
        """The option's phases with their seconds."""
        wish, setting, option = self.wish, self.option.setting, self.option
        moved, place = option.moved_bytes, setting.text_encoder_place
        for_text, for_decoder = self._bytes_of_turns()
        seconds = {
            "load": self._range_of_ranges(lambda rates: load_seconds(file_bytes, rates).seconds),
            "text": self._range(
                lambda rates: (
                    encode_text_seconds(wish, rates, place)
                    + encode_image_seconds(wish, rates)
                    + for_text / rates.pcie
                )
            ),
            "tables": self._range(lambda rates: table_seconds(wish, rates, setting.modulation)),
            "sampling": self._range(
                lambda rates: sampling_seconds(wish, setting.precision, rates, moved_bytes=moved)
            ),
            "decode": self._range(
                lambda rates: decode_seconds(wish, option.tiles, rates) + for_decoder / rates.pcie
            ),
        }
        return {
            name: replace(phase, seconds=seconds[name]) for name, phase in option.phases.items()
        }

    def cold_start_seconds(self, file_bytes: int) -> Range:
        """From the start of ComfyUI until all weights are on the card, from an NVMe disk."""
        return self._range_of_ranges(lambda rates: cold_start_seconds(file_bytes, rates).seconds)

    def loras_seconds(self) -> Range:
        """Of a step: what LoRAs that are computed beside the weights take."""
        without = replace(self.wish, loras=Loras())
        precision, passes = self.option.setting.precision, self.wish.passes
        return self._range(
            lambda rates: (
                passes
                * (
                    forward_seconds(self.wish, precision, rates)
                    - forward_seconds(without, precision, rates)
                )
            )
        )

    def _bytes_of_turns(self) -> tuple[int, int]:
        """What each run brings to the card again: (for the text encoder's turn, for the decoder's).

        A text encoder that left, and what of the transformer had to leave for either.
        """
        phases, setting = self.option.phases, self.option.setting
        stays = phases["sampling"].weights - self.option.moved_bytes
        usable = self.card.memory_bytes - KEPT_FREE_BYTES
        text = 0
        if setting.text_encoder_place == DROPPED:
            over = phases["text"].card_bytes + stays - usable
            text = text_encoder_bytes(self.wish, setting.text_encoder)
            text += min(stays, max(0, over))
        return text, max(0, stays - phases["decode"].resident.get("transformer", 0))

    def _range(self, seconds: Callable[[Rates], float]) -> Range:
        return Range(seconds(self.fast), seconds(self.slow))

    def _range_of_ranges(self, seconds: Callable[[Rates], Range]) -> Range:
        """From the fastest card's shortest to the slowest one's longest."""
        return Range(seconds(self.fast).low, seconds(self.slow).high)
