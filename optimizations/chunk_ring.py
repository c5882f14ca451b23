"""Threads that copy the tensors of many groups, in order, into the slots of a ring of host memory.

The host's half of optimizations/weight_stream.py; it knows nothing of a card. Of each group the
tensors get places behind one another in one stretch of memory, which is cut into chunks. A thread
takes the next chunk and a slot, copies the chunk's bytes there and hands the slot to `upload`.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

# Where a tensor may start in the memory of its group: as torch aligns what it allocates on a card.
ALIGNMENT = 512


class Layout(NamedTuple):
    """Where the tensors of a group lie.

    Attributes:
        offsets: The first byte of each tensor.
        bytes: Of the whole group, with the gaps between tensors.
    """

    offsets: tuple[int, ...]
    bytes: int


class Piece(NamedTuple):
    """A part of a tensor in a chunk.

    Attributes:
        tensor: Contiguous.
        start: Its first byte, counted in the tensor.
        offset: Its first byte, counted in the chunk.
        bytes: Its size.
    """

    tensor: torch.Tensor
    start: int
    offset: int
    bytes: int


class Chunk(NamedTuple):
    """What one slot holds.

    Attributes:
        group: The index of the group.
        offset: Its first byte, counted in the group's layout.
        bytes: Its size.
        pieces: What fills it, but for the gaps between tensors.
    """

    group: int
    offset: int
    bytes: int
    pieces: tuple[Piece, ...]


# Of a chunk, its slot and whether all others of its group were uploaded before. Gives a function
# that waits until the slot can be written to again.
Upload = Callable[[Chunk, int, bool], Callable[[], object]]


def lay_out(tensors: Sequence[torch.Tensor]) -> Layout:
    """The places of a group's tensors, each at a multiple of `ALIGNMENT`."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = offsets[-1] + tensor.nbytes
    return Layout(tuple(offsets), end)


def cut(groups: Sequence[Sequence[torch.Tensor]], chunk_bytes: int) -> Iterator[Chunk]:
    """The chunks of all groups in order; a group of B bytes has ceil(B / chunk_bytes) of them.

    A tensor that is not contiguous is copied when its group's turn comes.
    """
    for index, tensors in enumerate(groups):
        layout = lay_out(tensors)
        held = [tensor.contiguous() for tensor in tensors]
        for begin in range(0, layout.bytes, chunk_bytes):
            end = min(begin + chunk_bytes, layout.bytes)
            pieces = []
            for tensor, place in zip(held, layout.offsets, strict=True):
                first, last = max(begin, place), min(end, place + tensor.nbytes)
                if first < last:
                    pieces.append(Piece(tensor, first - place, first - begin, last - first))
            yield Chunk(index, begin, end - begin, tuple(pieces))


class ChunkRing:
    """Brings groups to `upload` through slots of host memory, with several threads.

    `upload` is called from those threads, by one at a time. Chunks of a group come in any order,
    and a chunk may come before the last one of the group before it. Groups go to `buffers` places
    in turn: no chunk of group g is handed over before group g - buffers was released.

    Args:
        groups: Tensors of host memory.
        slots: (count, chunk_bytes), uint8.
        upload: Reads a slot; it need not have finished when it returns.
        buffers: How many groups there is room for where they are uploaded to.
        threads: How many copy; no more than there are slots.
        prepare: Called first in each thread.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        slots: torch.Tensor,
        upload: Upload,
        buffers: int,
        threads: int,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        count, chunk_bytes = slots.shape
        self._chunks = cut(groups, chunk_bytes)
        self._left = [-(-lay_out(tensors).bytes // chunk_bytes) for tensors in groups]
        self._slots, self._upload, self._prepare = slots, upload, prepare
        self._free: deque[tuple[int, Callable]] = deque(
            (slot, lambda: None) for slot in range(count)
        )
        self._open = buffers  # groups before this one may be handed over
        self._stopped = False
        self._error: BaseException | None = None
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # for the consumer
        self._opened = threading.Condition(lock)  # for the threads
        # A thread that asks for a slot finds one: the others hold one each at most.
        self._threads = [
            threading.Thread(target=self._work, name=f"chunk ring {index}", daemon=True)
            for index in range(min(threads, count))
        ]

    def start(self) -> None:
        """Starts the threads; `stop` has to follow, also where this raises."""
        for thread in self._threads:
            thread.start()

    def wait(self, group: int) -> None:
        """Waits until all chunks of a group have been handed to `upload`.

        Raises:
            BaseException: What a thread failed with.
            RuntimeError: If the ring was stopped.
        """
        with self._changed:
            while self._left[group] and not self._stopped:
                self._changed.wait()
            if self._error is not None:
                raise self._error
            if self._left[group]:
                raise RuntimeError("the ring was stopped before the group was complete")

    def release(self) -> None:
        """Says that the earliest group that was not yet released may be overwritten."""
        with self._opened:
            self._open += 1
            self._opened.notify_all()

    def stop(self) -> None:
        """Ends the threads and waits for them: for the chunk that each is copying, at most."""
        self._end()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _end(self, error: BaseException | None = None) -> None:
        with self._changed:
            self._error = self._error or error
            self._stopped = True
            self._changed.notify_all()
            self._opened.notify_all()

    def _work(self) -> None:
        try:
            self._prepare()
            with torch.inference_mode():  # which is a thread's own
                while taken := self._take():
                    self._copy(*taken)
        except BaseException as error:  # `wait` raises it
            self._end(error)

    def _take(self) -> tuple[Chunk, int, Callable] | None:
        """The next chunk with a slot and what waits for it; None when there is no more to do.

        Both are taken at once: the earliest chunk never lacks a slot because later ones have all.
        """
        with self._changed:
            chunk = None if self._stopped else next(self._chunks, None)
            return None if chunk is None else (chunk, *self._free.popleft())

    def _copy(self, chunk: Chunk, slot: int, until_free: Callable) -> None:
        until_free()
        start = self._slots[slot].data_ptr()
        for piece in chunk.pieces:
            # Lets other threads run, and asks no tensor whether it may be written to.
            source = piece.tensor.data_ptr() + piece.start
            ctypes.memmove(start + piece.offset, source, piece.bytes)
        with self._opened:
            while chunk.group >= self._open and not self._stopped:
                self._opened.wait()
            if self._stopped:
                return
            last = self._left[chunk.group] == 1
            self._free.append((slot, self._upload(chunk, slot, last)))
            self._left[chunk.group] -= 1
            if last:
                self._changed.notify_all()
