"""Weights of many layers on a CUDA card, one layer after the other, at the speed of the PCIe link.

A layer is used once, and its memory on the card is then the next one's. The link reaches its speed
from pinned memory only, and one thread fills pinned memory from the page cache at a fraction of it:
several threads copy chunks into a pinned ring while a stream of its own uploads earlier chunks.
When a pass is over torch keeps the ring for the next one: see optimizations/pinned_memory.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import torch

from ..errors import SettingError
from ..planning.memory import format_gib
from .hardware import GIB, MIB
from .pinned_memory import indexed, pin_slots
from .stream_pass import StreamPass

# 13.6 GB in 120 layers of a file in a disk's page cache to an H200 over PCIe 5 (16 cores, 55.3 GB/s
# pinned) took 0.259 s on the mapping's first use and 0.256 s later, 1.05 and 1.04 times what the
# link needs, with 8 threads; from /dev/shm, whose pages fault singly, 0.355 and 0.285 s. A ring of
# 512 MiB, which leaves the processor's cache, took 0.336 s. One thread's memcpy made 7.6 GB/s.
# Pinning 128 MiB took 58 ms, 256 MiB 82 ms.
RING_BYTES = 128 * MIB
MOST_RING_BYTES = GIB
CHUNK_BYTES = 8 * MIB
THREADS = min(8, os.cpu_count() or 1)


def reserve_ring() -> bool:
    """Pins the ring of a pass by the defaults, or what the system allows of it, and gives it up.

    Torch keeps it, and the first pass does not wait for it: for when a model is loaded.

    Returns:
        Whether there is one; False without a CUDA card or where the system refuses.
    """
    return torch.cuda.is_available() and pin_slots(RING_BYTES, CHUNK_BYTES) is not None


class WeightStream:
    """Groups of tensors on a device, in order; those of a group until the next is asked for.

    Tensors of host memory, mapped files among them, are uploaded; those that are on the device
    already are given as they are, and so are all where the device is the CPU. Every iteration is a
    pass of its own. The stream that is current where a pass runs is the consumer's: uploads wait
    for what it has queued with a group's tensors, and it waits for their upload, on the card.

    A `for` loop that an exception leaves keeps its iterator: use the object as a context manager,
    which ends the pass.

        with WeightStream(groups, device) as stream:
            for weight, bias in stream:
                outputs.append(F.linear(rows, weight, bias))

    Args:
        groups: What is needed at a time, such as a layer's weight and bias.
        device: A CUDA card, or the CPU.
        ring_bytes: Pinned memory, 1 GiB at most. Less is taken where the system refuses.
        chunk_bytes: What a thread copies, and an upload brings, at a time.
        threads: How many copy to the ring; `THREADS` by default.
        ahead: Groups that are uploaded before they are asked for. `ahead` + 1 of the largest group
            are allocated on the card, one where they do not fit.

    Attributes:
        bytes: What the latest pass has brought to the card so far.
        pinned: Whether it went through pinned memory.
        note: Why the pass is slower than it could be; empty where it is not.

    Raises:
        SettingError: If an argument breaks its rule.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        device: torch.device,
        *,
        ring_bytes: int = RING_BYTES,
        chunk_bytes: int = CHUNK_BYTES,
        threads: int | None = None,
        ahead: int = 2,
    ) -> None:
        threads = THREADS if threads is None else threads
        if not 0 < ring_bytes <= MOST_RING_BYTES:
            raise SettingError(
                f"a ring of {ring_bytes} bytes is out of range: pinned memory is taken from every "
                f"other program, so use {format_gib(MOST_RING_BYTES)} at most."
            )
        if not 0 < chunk_bytes <= ring_bytes:
            raise SettingError(
                f"chunks of {chunk_bytes} bytes do not fit a ring of {ring_bytes} bytes: use a "
                "part of the ring."
            )
        if threads < 1 or ahead < 0:
            raise SettingError(
                f"{threads} threads and {ahead} groups ahead are out of range: use at least one "
                "thread and no less than 0 groups."
            )
        self._device = indexed(device)
        self._groups = [list(tensors) for tensors in groups]
        for tensor in (tensor for tensors in self._groups for tensor in tensors):
            if tensor.device not in (torch.device("cpu"), self._device):
                raise SettingError(
                    f"a tensor on {tensor.device} cannot be streamed to {self._device}: use "
                    "tensors of host memory or of that device."
                )
        self._settings = ring_bytes, chunk_bytes, threads, ahead
        self._current: StreamPass | None = None
        self.bytes, self.pinned, self.note = 0, False, ""
        self._seconds: Callable[[], float] | None = None

    @property
    def seconds(self) -> float | None:
        """From the start of the latest pass to its last upload; None until all groups were given.

        Reading it waits for the last upload. Pinning the ring is in it; what the card was busy with
        when the pass began is not.
        """
        return None if self._seconds is None else self._seconds()

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        """Gives the tensors of each group.

        Raises:
            RuntimeError: What a copy failed with, or that `close` was called meanwhile.
            torch.OutOfMemoryError: If not even one group fits the card.
        """
        self.close()
        self.bytes, self.pinned, self.note, self._seconds = 0, False, "", None
        if self._device.type == "cpu":
            yield from map(list, self._groups)
            self._seconds = lambda: 0.0
            return
        hosted = [[tensor for tensor in group if tensor.is_cpu] for group in self._groups]
        current = self._current = StreamPass(hosted, self._device, *self._settings)
        try:
            current.start()
            self.pinned, self.note = current.pinned, " ".join(current.notes)
            for index, group in enumerate(self._groups):
                current.bring(index)
                self.bytes += sum(tensor.nbytes for tensor in hosted[index])
                # No name for what is given: it would hold the card's memory after an exception.
                yield _with_uploaded(group, current.tensors(index))
                current.give_back(index)
            self._seconds = current.finish()
        finally:
            current.close()

    def __enter__(self) -> WeightStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the pass, if one runs: its threads, its ring and its memory on the card."""
        if self._current is not None:
            self._current.close()
            self._current = None


def _with_uploaded(group: list[torch.Tensor], uploaded: list[torch.Tensor]) -> list[torch.Tensor]:
    """The group, its tensors of host memory replaced."""
    following = iter(uploaded)
    return [next(following) if tensor.is_cpu else tensor for tensor in group]
