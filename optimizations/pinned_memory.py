"""Pinned host memory, from which the PCIe link reaches its speed.

It is torch's, which rounds its blocks up to powers of two and keeps them for the process: pinning
takes long, and the next one who asks for as much gets it at once.
"""

from __future__ import annotations

from functools import partial

import torch

from ..errors import SettingError, UnavailableError
from ..planning.memory import format_gib
from .hardware import MIB

# Where less than this can be pinned, a ring is not worth having.
LEAST_BYTES = 32 * MIB
REPEATS = 5

_bytes = partial(torch.empty, dtype=torch.uint8)


def pin_slots(ring_bytes: int, chunk_bytes: int) -> torch.Tensor | None:
    """A ring of (slots, chunk_bytes) pinned bytes, halved until the system allows it.

    Returns:
        None where it refuses even `LEAST_BYTES`, or what was asked for where that is less.
    """
    while True:
        chunk_bytes = min(chunk_bytes, ring_bytes)
        try:
            with torch.inference_mode(False):
                return _bytes((ring_bytes // chunk_bytes, chunk_bytes), pin_memory=True)
        except RuntimeError:  # torch.OutOfMemoryError among them
            ring_bytes //= 2
            if ring_bytes < LEAST_BYTES:
                return None


def release_pinned() -> bool:
    """Gives pinned memory that torch keeps, but nobody uses, back to the system.

    That of others who pin through torch is among it. Memory from which an upload still runs stays.

    Returns:
        Whether this torch can.
    """
    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is None:
        return False
    empty()
    return True


def measure_pinned_bandwidth(device: torch.device, size: int = 256 * MIB) -> float:
    """The best of several uploads of `size` bytes of pinned memory, in bytes per second.

    Args:
        device: A CUDA card.
        size: What is uploaded at a time.

    Raises:
        SettingError: If the device is no CUDA card.
        UnavailableError: If so much host memory cannot be pinned.
    """
    device = indexed(device)
    if device.type != "cuda":
        raise SettingError(f"nothing is uploaded to {device}: name a CUDA card.")
    with torch.cuda.device(device):
        try:
            source = _bytes(size, pin_memory=True)
        except RuntimeError as error:
            raise UnavailableError(
                f"{format_gib(size)} of host memory cannot be pinned: measure with less."
            ) from error
        target = _bytes(size, device=device)
        seconds = []
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
    return size / min(seconds)


def indexed(device: torch.device) -> torch.device:
    """A CUDA card or the CPU as the tensors on it name it.

    Raises:
        SettingError: If the device is neither.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise SettingError(f"weights cannot be streamed to {device}: use a CUDA card or the CPU.")
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
