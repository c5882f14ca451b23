"""How long the phases of a run take in the setting that a plan offers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from .cards import Card
from .disk import disk, made_on_load
from .estimate import Phase, Range
from .load_time import USUAL_SOURCES, Load, cold_start_seconds, load_seconds
from .memory import QUANTIZED, weight_bytes
from .phases import KEPT_FREE_BYTES
from .plan import Option
from .rates import Rates
from .setting import DROPPED, ON_PROCESSOR
from .text_encoder import LAYERS, LINEARS, text_encoder_bytes
from .timing import (
    decode_seconds,
    encode_image_seconds,
    encode_text_seconds,
    forward_seconds,
    sampling_seconds,
    table_seconds,
)
from .wish import TEXT_ENCODER, Loras, Wish

BF16 = 2


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

    def phases(self) -> dict[str, Phase]:
        """The option's phases with their seconds."""
        wish, setting, option = self.wish, self.option.setting, self.option
        moved, place = option.moved_bytes, setting.text_encoder_place
        for_text, for_decoder = self._bytes_of_turns()
        seconds = {
            "load": self._range_of_ranges(lambda rates: load_seconds(self.load(), rates)),
            "text": self._range(
                lambda rates: (
                    encode_text_seconds(wish, rates, place, setting.text_encoder)
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

    def load(self, *, quantized_file: bool = False) -> Load:
        """What a load of the option's files does.

        Args:
            quantized_file: whether a transformer that would be quantized on load comes from a file
                that was written so once.
        """
        wish, setting, phase = self.wish, self.option.setting, self.option.phases["load"]
        files = disk(wish, setting, quantized_file=quantized_file)
        made = made_on_load(wish, setting) and not quantized_file
        ready = files.transformer_bytes if setting.precision in QUANTIZED and not made else 0
        quantized = weight_bytes(wish.transformer, "bf16").gemm if made else 0
        return Load(
            read=files.files_bytes - ready,
            read_quantized=ready,
            quantized=quantized + self._text_encoder_quantized(),
            to_card=phase.weights + sum(phase.resident.values()),
        )

    def loads(self, *, quantized_file: bool = False) -> dict[str, Range]:
        """{where the files are: seconds of a load}, for `load_time.USUAL_SOURCES`."""
        load = self.load(quantized_file=quantized_file)
        return {
            source: self._range_of_ranges(functools.partial(load_seconds, load, source=source))
            for source in USUAL_SOURCES
        }

    def prequantized_loads(self) -> dict[str, Range] | None:
        """The same of a transformer's file that is quantized already; None for bf16."""
        quantized = self.option.setting.precision in QUANTIZED
        return self.loads(quantized_file=True) if quantized else None

    def cold_start_seconds(self) -> Range:
        """From the start of ComfyUI until all weights are on the card, from an NVMe disk."""
        return self._range_of_ranges(functools.partial(cold_start_seconds, self.load()))

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

        A text encoder that is not there, and what of the transformer had to leave for either.
        """
        phases, setting = self.option.phases, self.option.setting
        stays = phases["sampling"].weights
        usable = self.card.memory_bytes - KEPT_FREE_BYTES
        text = 0
        if setting.text_encoder_place != ON_PROCESSOR:
            text = text_encoder_bytes(self.wish, setting.text_encoder)
            text -= phases["sampling"].resident.get("text encoder", 0)
        if setting.text_encoder_place == DROPPED:
            text += min(stays, max(0, phases["text"].card_bytes + stays - usable))
        else:
            text += max(0, stays - phases["text"].resident.get("transformer", 0))
        return text, max(0, stays - phases["decode"].resident.get("transformer", 0))

    def _text_encoder_quantized(self) -> int:
        """In bf16, of the text encoder's weights that are quantized on load."""
        parts, held = self.wish.parts, self.wish.parts.text_encoder_bytes
        ready = held is not None and held == dict(parts.file_bytes).get(TEXT_ENCODER, held)
        if ready or self.option.setting.text_encoder not in QUANTIZED:
            return 0
        return BF16 * LAYERS * sum(n * k for n, k in LINEARS)

    def _range(self, seconds: Callable[[Rates], float]) -> Range:
        return Range(seconds(self.fast), seconds(self.slow))

    def _range_of_ranges(self, seconds: Callable[[Rates], Range]) -> Range:
        """From the fastest card's shortest to the slowest one's longest."""
        return Range(seconds(self.fast).low, seconds(self.slow).high)
