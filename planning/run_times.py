"""How long weights take from a file onto the card, and a first image from a machine's start."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..errors import SettingError
from ..spec import QUANTIZED
from .bytes import LAYERS, LINEARS, text_encoder_bytes, weight_bytes
from .cards import Card
from .disk import disk, made_on_load
from .phases import KEPT_FREE_BYTES, Phase, Range
from .plan import Option
from .rates import Rates, measured
from .request import DROPPED, ON_PROCESSOR, TEXT_ENCODER, Loras, RunRequest
from .times import (
    decode_seconds,
    encode_image_seconds,
    encode_text_seconds,
    forward_seconds,
    sampling_seconds,
    table_seconds,
)

PAGE_CACHE, RAM_DISK, NVME, NETWORK = "page cache", "RAM disk", "NVMe", "network volume"
# Bytes/s of what is read once; None where the file is in memory already. Predicted: what rented
# machines' local disks and network volumes give one reader.
SOURCES: dict[str, float | None] = {PAGE_CACHE: None, RAM_DISK: None, NVME: 3e9, NETWORK: 0.4e9}
# Where files are before the first run on a rented machine: what estimates tell of.
USUAL_SOURCES = (PAGE_CACHE, NVME, NETWORK)
# A mapped file that is not in memory is read in the order in which it is asked for: 1.04 times as
# long as from end to end in bf16, 1.3 in int8 (a disk of 2.1 GB/s at an H200).
MAPPED = 1.3
# Whole transformers from a RAM disk onto an H200, beside the smaller files of `measured.json`.
# Pages are mapped and copied one by one: the link is not what limits it.
WHOLE_LOADS = (
    {"what": "bf16", "bytes": 40.9e9, "load_seconds": 2.0, "to_card_seconds": 5.2},
    {"what": "int8", "bytes": 27.3e9, "load_seconds": 0.3, "to_card_seconds": 4.2},
)
# Seconds more for a byte of bf16 that is quantized on load: 1.2 s to fp8 and 1.3 s to int8 for the
# 27.2 GB of the same transformer's quantized layers.
QUANTIZING = Range(1.2 / 27.2e9, 1.3 / 27.2e9)
# ComfyUI until it answers: interpreter, torch, its nodes and this package (eight starts on the
# host of an H200, files in its page cache).
START = Range(12.6, 17.4)


class Load(NamedTuple):
    """What a load does, in bytes.

    Attributes:
        read: Of the files that hold full precision.
        read_quantized: Of the files that are quantized already.
        quantized: In bf16, of the weights that are quantized on load.
        to_card: As held, of the weights that go to the card.
    """

    read: int
    read_quantized: int = 0
    quantized: int = 0
    to_card: int = 0


def load_seconds(load: Load, rates: Rates, source: str = PAGE_CACHE) -> Range:
    """Weights from their files to where they are held; predicted from loads on an H200's host.

    A file that is read for the first time takes at least as long as its disk, at most that in the
    order of its use and then the way from memory: without dynamic VRAM the two do not overlap.

    Args:
        rates: of the card; a `disk` stands in for that of an NVMe disk.
        source: a name in `SOURCES`.

    Raises:
        SettingError: the source is unknown.
        UnavailableError: `measured.json` is damaged.
    """
    if source not in SOURCES:
        raise SettingError(
            f"the source {source!r} of the files is unknown: choose {', '.join(SOURCES)}."
        )
    rows = _in_memory(source)
    exact = [row for row in rows if row["what"] not in QUANTIZED]
    ready = [row for row in rows if row["what"] in QUANTIZED]
    memory = _per_byte(exact, "load_seconds").times(load.read)
    memory += _per_byte(ready, "load_seconds").times(load.read_quantized)
    memory += _linked(QUANTIZING, rates).times(load.quantized)
    memory += _linked(_per_byte(rows, "to_card_seconds"), rates).times(load.to_card)
    rate = SOURCES[source]
    if source == NVME and rates.disk is not None:
        rate = rates.disk
    if rate is None:
        return memory
    disk = (load.read + load.read_quantized) / rate
    return Range(max(disk, memory.low), MAPPED * disk + memory.high)


def cold_start_seconds(load: Load, rates: Rates, source: str = NVME) -> Range:
    """From the start of ComfyUI until all weights are where they are held.

    Arguments and errors as of `load_seconds`. A machine's first run also compiles the kernels,
    which takes some seconds more.
    """
    return load_seconds(load, rates, source) + START


def _in_memory(source: str) -> list:
    """The loads that were measured from memory: from a RAM disk, or for all else the page cache."""
    wanted = RAM_DISK if source == RAM_DISK else PAGE_CACHE
    found = measured().get("loads", ())
    return [*WHOLE_LOADS, *(row for row in found if row["source"].lower() == wanted.lower())]


def _per_byte(rows: list, what: str) -> Range:
    """The shortest and the longest that a byte took."""
    found = [row[what] / row["bytes"] for row in rows]
    return Range(min(found), max(found))


def _linked(per_byte: Range, rates: Rates) -> Range:
    """No shorter than a byte's way over the link."""
    return Range(*(max(seconds, 1 / rates.pcie) for seconds in per_byte))


# How long the phases of a run take in the setting that a plan offers.

BF16 = 2


@dataclass(frozen=True)
class RunTimes:
    """An option on a card with its rates.

    Attributes:
        request: With the sizes of the option's precision.
        slow, fast: The slowest and the fastest rates that are to be expected.
    """

    request: RunRequest
    option: Option
    card: Card
    slow: Rates
    fast: Rates

    def phases(self) -> dict[str, Phase]:
        """The option's phases with their seconds."""
        request, setting, option = self.request, self.option.setting, self.option
        moved, place = option.moved_bytes, setting.text_encoder_place
        for_text, for_decoder = self._bytes_of_turns()
        seconds = {
            "load": self._range_of_ranges(lambda rates: load_seconds(self.load(), rates)),
            "text": self._range(
                lambda rates: (
                    encode_text_seconds(request, rates, place, setting.text_encoder)
                    + encode_image_seconds(request, rates)
                    + for_text / rates.pcie
                )
            ),
            "tables": self._range(lambda rates: table_seconds(request, rates, setting.modulation)),
            "sampling": self._range(
                lambda rates: sampling_seconds(request, setting.precision, rates, moved_bytes=moved)
            ),
            "decode": self._range(
                lambda rates: (
                    decode_seconds(request, option.tiles, rates) + for_decoder / rates.pcie
                )
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
        request, setting, phase = self.request, self.option.setting, self.option.phases["load"]
        files = disk(request, setting, quantized_file=quantized_file)
        made = made_on_load(request, setting) and not quantized_file
        ready = files.transformer_bytes if setting.precision in QUANTIZED and not made else 0
        quantized = weight_bytes(request.transformer, "bf16").gemm if made else 0
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
        without = replace(self.request, loras=Loras())
        precision, passes = self.option.setting.precision, self.request.passes
        return self._range(
            lambda rates: (
                passes
                * (
                    forward_seconds(self.request, precision, rates)
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
            text = text_encoder_bytes(self.request, setting.text_encoder)
            text -= phases["sampling"].resident.get("text encoder", 0)
        if setting.text_encoder_place == DROPPED:
            text += min(stays, max(0, phases["text"].card_bytes + stays - usable))
        else:
            text += max(0, stays - phases["text"].resident.get("transformer", 0))
        return text, max(0, stays - phases["decode"].resident.get("transformer", 0))

    def _text_encoder_quantized(self) -> int:
        """In bf16, of the text encoder's weights that are quantized on load."""
        parts, held = self.request.parts, self.request.parts.text_encoder_bytes
        ready = held is not None and held == dict(parts.file_bytes).get(TEXT_ENCODER, held)
        if ready or self.option.setting.text_encoder not in QUANTIZED:
            return 0
        return BF16 * LAYERS * sum(n * k for n, k in LINEARS)

    def _range(self, seconds: Callable[[Rates], float]) -> Range:
        return Range(seconds(self.fast), seconds(self.slow))

    def _range_of_ranges(self, seconds: Callable[[Rates], Range]) -> Range:
        """From the fastest card's shortest to the slowest one's longest."""
        return Range(seconds(self.fast).low, seconds(self.slow).high)
