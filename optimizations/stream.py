"""Pinned host memory, from which the PCIe link reaches its speed.

It is torch's, which rounds its blocks up to powers of two and keeps them for the process: pinning
takes long, and the next one who asks for as much gets it at once.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from ..errors import SettingError, UnavailableError
from ..machine.card import GIB, MIB
from ..spec import format_gib

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


# Threads that copy the tensors of many groups, in order, into the slots of a ring of host memory.
#
# The host's half of optimizations/weight_stream.py; it knows nothing of a card. Of each group the
# tensors get places behind one another in one stretch of memory, which is cut into chunks. A thread
# takes the next chunk and a slot, copies the chunk's bytes there and hands the slot to `upload`.

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


# One pass of weights past a card: memory on both sides, and the events between the streams.
#
# The card's half of optimizations/weight_stream.py: `bring` a group, use its `tensors`,
# `give_back`.


class StreamPass:
    """One pass over groups of tensors; `close` has to follow, also where something raises.

    Args:
        groups: Tensors of host memory.
        device: A CUDA card, as tensors on it name it.
        ring_bytes: Pinned memory that is asked for.
        chunk_bytes: What a thread copies, and an upload brings, at a time.
        threads: How many copy to the ring.
        ahead: Groups that are uploaded before they are asked for, where the card has room.

    Attributes:
        notes: Sentences about why the pass is slower than it could be.

    Raises:
        torch.OutOfMemoryError: If not even one group fits the card.
    """

    def __init__(
        self,
        groups: list[list[torch.Tensor]],
        device: torch.device,
        ring_bytes: int,
        chunk_bytes: int,
        threads: int,
        ahead: int,
    ) -> None:
        self._groups, self._device, self._threads = groups, device, threads
        self._asked = ring_bytes, chunk_bytes
        largest = max((lay_out(tensors).bytes for tensors in groups), default=0)
        count = min(ahead + 1, max(1, len(groups)))
        self._buffers = allocate_staging(largest, count, device)
        self.notes = []
        if len(self._buffers) < count:
            self.notes.append("The card has room for one group only: uploads wait for computing.")
        self._home = torch.cuda.current_stream(device)
        self._stream = torch.cuda.Stream(device)
        self._begin = torch.cuda.Event(enable_timing=True)
        self._ring: ChunkRing | None = None
        self._slots: torch.Tensor | None = None
        self._ready: dict[int, torch.cuda.Event] = {}
        self._done: dict[int, torch.cuda.Event] = {}

    @property
    def pinned(self) -> bool:
        """Whether it goes through pinned memory, from `start` on."""
        return self._ring is not None

    def start(self) -> None:
        """Pins the ring and has its threads begin; where nothing can be pinned, `bring` uploads."""
        # The allocator gives out memory that kernels in its stream's queue may yet use.
        self._stream.wait_stream(self._home)
        self._begin.record(self._stream)
        with torch.cuda.device(self._device):
            slots = pin_slots(*self._asked)
        if slots is None:
            self.notes.append("No host memory could be pinned: uploads are slower without it.")
            return
        if slots.nbytes <= self._asked[0] // 2:
            self.notes.append(
                f"Only {slots.nbytes // MIB} MiB of host memory could be pinned, not "
                f"{self._asked[0] // MIB}."
            )
        self._slots = slots
        # Waiting for these does not keep a processor busy.
        self._uploaded = [torch.cuda.Event(blocking=True) for _ in slots]
        enter_stream = partial(torch.cuda.set_stream, self._stream)
        self._ring = ChunkRing(
            self._groups, slots, self._upload, len(self._buffers), self._threads, enter_stream
        )
        self._ring.start()

    def bring(self, index: int) -> None:
        """Has a group on the card for what is queued on the current stream from now on."""
        if not self._buffers:
            raise RuntimeError("the pass was closed before its last group")
        if self._ring is None:
            for place, tensor in zip(self.tensors(index), self._groups[index], strict=True):
                place.copy_(tensor.detach(), non_blocking=True)
            return
        self._ring.wait(index)
        if index in self._ready:  # not where a group has nothing to upload
            torch.cuda.current_stream(self._device).wait_event(self._ready.pop(index))

    def tensors(self, index: int) -> list[torch.Tensor]:
        """The places of a group's tensors in its buffer."""
        buffer, tensors = self._buffer(index), self._groups[index]
        return [
            buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, offset in zip(tensors, lay_out(tensors).offsets, strict=True)
        ]

    def give_back(self, index: int) -> None:
        """Lets a group's memory be overwritten after what the current stream has queued."""
        if self._ring is not None:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._done[index] = event
            self._ring.release()

    def finish(self) -> Callable[[], float]:
        """Marks the end of the last upload; gives what waits for it and tells the seconds."""
        begin, end = self._begin, torch.cuda.Event(enable_timing=True)
        if self._ring is None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        end.record(self._stream)

        def seconds() -> float:
            end.synchronize()
            return begin.elapsed_time(end) / 1e3

        return seconds

    def close(self) -> None:
        """Ends the threads and gives up the memory on both sides."""
        if not self._buffers:
            return
        if self._ring is not None:
            self._ring.stop()
        # The buffers go back to this stream's pool, which others take from at once.
        self._home.wait_stream(self._stream)
        self._home.wait_stream(torch.cuda.current_stream(self._device))
        self._buffers = []
        # Torch keeps a slot's memory until the uploads from it are done.
        self._ring = self._slots = None

    def _buffer(self, index: int) -> torch.Tensor:
        return self._buffers[index % len(self._buffers)]

    def _upload(self, chunk: Chunk, slot: int, last: bool) -> Callable[[], object]:
        """Queues an upload, in a thread of the ring, to the stream that all its threads are in."""
        done = self._done.pop(chunk.group - len(self._buffers), None)
        if done is not None:  # the group's first chunk
            self._stream.wait_event(done)
        place = self._buffer(chunk.group)[chunk.offset : chunk.offset + chunk.bytes]
        place.copy_(self._slots[slot, : chunk.bytes], non_blocking=True)
        self._uploaded[slot].record(self._stream)
        if last:
            self._ready[chunk.group] = torch.cuda.Event()
            self._ready[chunk.group].record(self._stream)
        return self._uploaded[slot].synchronize


def allocate_staging(size: int, count: int, device: torch.device) -> list[torch.Tensor]:
    """`count` buffers of `size` bytes, or one where there is no room for more.

    Raises:
        torch.OutOfMemoryError: If there is no room for one.
    """
    with torch.inference_mode(False):  # threads outside of it write to them
        if count > 1:
            try:
                return [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
            except torch.cuda.OutOfMemoryError:
                pass
        return [torch.empty(size, dtype=torch.uint8, device=device)]


# Weights of many layers on a CUDA card, one layer after the other, at the speed of the PCIe link.
#
# A layer is used once, and its memory on the card is then the next one's. The link reaches its
# speed
# from pinned memory only, and one thread fills pinned memory from the page cache at a fraction of
# it:
# several threads copy chunks into a pinned ring while a stream of its own uploads earlier chunks.
# When a pass is over torch keeps the ring for the next one: see optimizations/pinned_memory.py.

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
