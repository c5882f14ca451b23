"""How long weights take from a file onto the card, and a first image from a machine's start."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import SettingError
from .constants import measured
from .estimate import Range
from .memory import QUANTIZED
from .rates import Rates

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
