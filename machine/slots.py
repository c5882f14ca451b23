"""Where cards sit: their PCIe slots, the NVLink between them and the sockets, from the driver's
management library and from Linux. Starts no CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PCI_DEVICES = Path("/sys/bus/pci/devices")
# Of nvml.h.
PCI_INFO_BYTES, BUS_ID_AT = 68, 36  # nvmlPciInfo_t, and in it busId
P2P_OVER_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK


class Slot(NamedTuple):
    """Where a card sits; None for what nobody tells.

    Attributes:
        generation: Of PCIe, the newest that card and board have in common.
        lanes, most_lanes: In use, and those that card and board have.
        node: The NUMA node, one for each socket on most boards.
    """

    generation: int | None = None
    lanes: int | None = None
    most_lanes: int | None = None
    node: int | None = None

    def __str__(self) -> str:
        if self.generation is None or self.lanes is None:
            return ""
        most = f" of {self.most_lanes}" if self.lanes < (self.most_lanes or 0) else ""
        return f"PCIe {self.generation} x{self.lanes}{most}"


class Places(NamedTuple):
    """Of two cards.

    Attributes:
        slots: Of the first and of the second.
        nvlink: Whether NVLink joins them; None where nobody tells.
    """

    slots: tuple[Slot, Slot]
    nvlink: bool | None

    def __str__(self) -> str:
        slots = dict.fromkeys(map(str, self.slots))
        parts = [] if "" in slots else [" and ".join(slots)]
        if self.nvlink is not None:
            parts.append("NVLink" if self.nvlink else "no NVLink")
        first, second = (slot.node for slot in self.slots)
        if first is not None and second is not None:
            same = f"one socket (NUMA node {first})"
            parts.append(same if first == second else f"two sockets (NUMA nodes {first}, {second})")
        return ", ".join(parts)


def places_of(first: str, second: str) -> Places:
    """Of two cards by UUID, as `InstalledCard.uuid`."""
    with contextlib.suppress(OSError, AttributeError), _library() as nvml:
        cards = [_handle(nvml, uuid) for uuid in (first, second)]
        if None not in cards:
            status = _number(nvml.nvmlDeviceGetP2PStatus, *cards, P2P_OVER_NVLINK)
            nvlink = None if status is None else status == 0
            return Places((_slot(nvml, cards[0]), _slot(nvml, cards[1])), nvlink)
    return Places((Slot(), Slot()), None)


@contextlib.contextmanager
def _library() -> Iterator[Any]:
    nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    if nvml.nvmlInit_v2():
        raise OSError("the driver does not answer")
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _handle(nvml: Any, uuid: str) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    name = f"GPU-{uuid}".encode()
    return None if nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) else handle


def _number(function: Any, *arguments: Any) -> int | None:
    value = ctypes.c_uint()
    return None if function(*arguments, ctypes.byref(value)) else value.value


def _slot(nvml: Any, card: ctypes.c_void_p) -> Slot:
    return Slot(
        _number(nvml.nvmlDeviceGetMaxPcieLinkGeneration, card),
        _number(nvml.nvmlDeviceGetCurrPcieLinkWidth, card),
        _number(nvml.nvmlDeviceGetMaxPcieLinkWidth, card),
        _node(nvml, card),
    )


def _node(nvml: Any, card: ctypes.c_void_p) -> int | None:
    about = ctypes.create_string_buffer(PCI_INFO_BYTES)
    if nvml.nvmlDeviceGetPciInfo_v3(card, about):
        return None
    bus = about.raw[BUS_ID_AT:].partition(b"\0")[0].decode("ascii", "replace").lower()
    # 00000000:17:00.0 here, 0000:17:00.0 in Linux
    with contextlib.suppress(OSError, ValueError):
        node = int((PCI_DEVICES / bus[-12:] / "numa_node").read_text(encoding="ascii"))
        return node if node >= 0 else None
    return None
