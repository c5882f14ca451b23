"""How long weights take from a file onto the card, and a first image from a machine's start."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import SettingError
from .constants import measured
from .estimate import Range
from .rates import Rates

PAGE_CACHE, RAM_DISK, NVME, NETWORK = "page cache", "RAM disk", "NVMe", "network volume"
# Bytes/s of what is read once; None where the file is in memory already. Predicted: what rented
# machines' local disks and network volumes give one reader.
SOURCES: dict[str, float | None] = {PAGE_CACHE: None, RAM_DISK: None, NVME: 3e9, NETWORK: 0.4e9}
# A mapped file that is not in memory is read in the order in which it is asked for: 1.04 times as
# long as from end to end in bf16, 1.3 in int8 (a disk of 2.1 GB/s at an H200).
MAPPED = 1.3
# From a file in memory to the card, where `measured.json` has no such load: 40.9 GB in bf16 from a
# RAM disk took 2.0 s to load and 5.2 s onto an H200, 27.3 GB in int8 0.3 s and 4.2 s. Pages are
# mapped and copied one by one: the link is not what limits it.
IN_MEMORY = (27.3e9 / 4.5, 40.9e9 / 7.2)
# ComfyUI until it answers: interpreter, torch, its nodes and this package (eight starts on the
# host of an H200, files in its page cache).
START = Range(12.6, 17.4)


class LoadTime(NamedTuple):
    """Seconds to load, and what they rest on ("measured" or "predicted")."""

    seconds: Range
    kind: str


def load_seconds(count: int, rates: Rates, source: str = PAGE_CACHE) -> LoadTime:
    """Weights from their files onto the card.

    A file that is read for the first time takes at least as long as its disk, at most that in the
    order of its use and then the way from memory: without dynamic VRAM the two do not overlap.

    Args:
        count: bytes in the files.
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
    slow, fast, kind = _in_memory(source)
    memory = Range(*(count / min(rate, rates.pcie) for rate in (fast, slow)))
    read = SOURCES[source]
    if source == NVME and rates.disk is not None:
        read = rates.disk
    if read is None:
        return LoadTime(memory, kind)
    low, high = memory
    return LoadTime(Range(max(count / read, low), MAPPED * count / read + high), "predicted")


def cold_start_seconds(count: int, rates: Rates, source: str = NVME) -> LoadTime:
    """From the start of ComfyUI until all weights are on the card.

    Arguments and errors as of `load_seconds`. A machine's first run also compiles the kernels,
    which takes some seconds more.
    """
    load = load_seconds(count, rates, source)
    return LoadTime(load.seconds + START, load.kind)


def _in_memory(source: str) -> tuple[float, float, str]:
    """Bytes/s from memory to the card: the slowest and the fastest that was measured."""
    wanted = RAM_DISK if source == RAM_DISK else PAGE_CACHE
    found = [
        load["bytes"] / (load["load_seconds"] + load["to_card_seconds"])
        for load in measured().get("loads", ())
        if load["source"].lower() == wanted.lower()
    ]
    if found:
        return min(found), max(found), "measured"
    return min(IN_MEMORY), max(IN_MEMORY), "measured" if wanted == RAM_DISK else "predicted"
