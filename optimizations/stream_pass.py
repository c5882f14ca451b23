"""One pass of weights past a card: memory on both sides, and the events between the streams.

The card's half of optimizations/weight_stream.py: `bring` a group, use its `tensors`, `give_back`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from .chunk_ring import Chunk, ChunkRing, lay_out
from .hardware import MIB
from .pinned_memory import pin_slots


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
