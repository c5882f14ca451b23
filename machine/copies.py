"""Copies from one card to another, on streams of their own: card to card, or through host memory.

Copy engines do them, so that they take nothing of the tensor cores. torch's own copy between two
cards also makes their current streams wait for it, where these go on with other products.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ..caches import cached
from ..errors import UnavailableError
from ..spec.formats import MIB

# Pinned host memory of a route that does not go from card to card.
BUFFERS, BUFFER_BYTES = 4, 8 * MIB
# One piece of a copy is on its way to host memory while the one before leaves it.
PIECES, LEAST_PIECE = 6, MIB // 8

Pair = tuple[torch.Tensor, torch.Tensor]
Move = tuple[int, int, int]  # address of the target, address of the source, bytes


class CardOperations:
    """What CUDA does for copies; tests replace it. Streams and events are torch's."""

    def current(self, device: torch.device) -> Any:
        return torch.cuda.current_stream(device)

    def stream(self, device: torch.device) -> Any:
        """Makes a stream beside those of the computation."""
        return torch.cuda.Stream(device, priority=-1)

    def event(self, timed: bool = False) -> Any:
        return torch.cuda.Event(enable_timing=timed)

    def pinned(self, size: int) -> torch.Tensor:
        """Allocates host memory that every card copies to and from.

        Raises:
            UnavailableError: It cannot be had.
        """
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise UnavailableError(
                f"{size // MIB} MiB of host memory cannot be pinned, which copies between cards "
                "need: free host memory, or raise the limit of locked memory (ulimit -l)."
            ) from error

    def copy(self, target: int, source: int, size: int, stream: Any) -> None:
        """Queues a copy of some bytes between two addresses."""
        code = _memcpy()(target, source, size, stream.cuda_stream)
        if code:
            raise RuntimeError(f"a copy between two cards failed: CUDA error {code}")

    def can_access(self, source: torch.device, target: torch.device) -> bool:
        """Says whether the driver lets each of two cards reach the other's memory."""
        one, other = source.index, target.index
        access = torch.cuda.can_device_access_peer
        return access(one, other) and access(other, one)

    def allow(self, source: torch.device, target: torch.device) -> None:
        """Lets each of two cards reach the other's memory, also what torch allocates later."""
        for one, other in ((source, target), (target, source)):
            torch.empty(1, device=one).copy_(torch.zeros(1, device=other))


class Route:
    """Copies from one card to another, in order.

    Whoever copies keeps the tensors alive until both cards have waited for the copy.

    Args:
        source, target: Cards.
        peer: Whether they go from card to card; else through pinned host memory, whose pieces
            overlap both ways.
        operations: What CUDA does; tests replace it.

    Attributes:
        out, into: Its streams on the source and on the target, or one where it needs no more.
        landed: The event of the last copy.

    Raises:
        UnavailableError: No host memory can be pinned, or no driver answers.
    """

    def __init__(
        self, source: torch.device, target: torch.device, peer: bool, operations: Any = None
    ) -> None:
        self.source, self.target, self.peer = source, target, peer
        self._operations = operations = operations or CardOperations()
        self.out = operations.stream(source)
        self.into = self.out if peer else operations.stream(target)
        self._turn = 0
        self._buffers = []
        if peer:
            operations.allow(source, target)
        else:
            self._buffers = [_Buffer(operations) for _ in range(BUFFERS)]
        self._make_events()
        for stream in (self.out, self.into):  # before what it copies through is freed
            weakref.finalize(self, stream.synchronize).atexit = False

    def copy(self, pairs: Iterable[Pair]) -> None:
        """Copies once the current streams of both cards come to this point; nobody waits for it.

        Args:
            pairs: Contiguous (source, target) of equal bytes.

        Raises:
            ValueError: A pair differs in bytes.
        """
        moves = _moves(pairs)
        current = self._operations.current
        self._ready.record(current(self.source))
        self.out.wait_event(self._ready)
        self._free.record(current(self.target))
        if self.peer:
            self.out.wait_event(self._free)
            for target, source, size in moves:
                self._operations.copy(target, source, size, self.out)
        else:
            self.into.wait_event(self._free)
            self._copy_through_host(moves)
            self.landed.record(self.into)
        self._left.record(self.out)

    def arrive(self) -> None:
        """Has the target's current stream wait for the last copy."""
        self._operations.current(self.target).wait_event(self.landed)

    def departed(self) -> None:
        """Has the source's current stream wait until the last copy has read its sources."""
        self._operations.current(self.source).wait_event(self._left)

    def finish(self) -> None:
        """Waits until all copies are done."""
        for stream in (self.out, self.into):
            stream.synchronize()

    @functools.cached_property
    def captured(self) -> Route:
        """Makes another one between the same cards, for CUDA graphs alone."""
        return Route(self.source, self.target, self.peer, self._operations)

    def begin_capture(self) -> None:
        """Makes the copies from here on part of a graph, which the current streams of both cards
        capture. It may not wait for an event of before, and has to wait for the last copy.
        """
        self._make_events()

    def _make_events(self) -> None:
        event = self._operations.event
        self._ready, self._free, self._left = (event() for _ in range(3))
        self.landed = self._left if self.peer else event()
        for buffer in self._buffers:
            buffer.filled, buffer.read = event(), event()

    def _copy_through_host(self, moves: Sequence[Move]) -> None:
        copy, out, into = self._operations.copy, self.out, self.into
        pieces = -(-sum(move[2] for move in moves) // LEAST_PIECE)
        size = -(-pieces // PIECES) * LEAST_PIECE
        for piece in _pieces(moves, min(size, BUFFER_BYTES)):
            buffer = self._buffers[self._turn]
            self._turn = (self._turn + 1) % BUFFERS
            out.wait_event(buffer.read)
            place = buffer.address
            for _, source, part in piece:
                copy(place, source, part, out)
                place += part
            buffer.filled.record(out)
            into.wait_event(buffer.filled)
            place = buffer.address
            for target, _, part in piece:
                copy(target, place, part, into)
                place += part
            buffer.read.record(into)


class _Buffer:
    filled: Any
    read: Any

    def __init__(self, operations: Any) -> None:
        self._memory = operations.pinned(BUFFER_BYTES)
        self.address = self._memory.data_ptr()


def _moves(pairs: Iterable[Pair]) -> list[Move]:
    moves = []
    for source, target in pairs:
        size = source.nbytes
        if size != target.nbytes:
            raise ValueError(f"{size} bytes do not fit {target.nbytes}")
        if size:
            moves.append((target.data_ptr(), source.data_ptr(), size))
    return moves


def _pieces(moves: Iterable[Move], size: int) -> Iterator[list[Move]]:
    piece: list[Move] = []
    room = size
    for target, source, left in moves:
        while left:
            part = min(left, room)
            piece.append((target, source, part))
            target, source, left, room = target + part, source + part, left - part, room - part
            if not room:
                yield piece
                piece, room = [], size
    if piece:
        yield piece


@cached
def _memcpy() -> Any:
    # cuMemcpyAsync takes the addresses of any card and of host memory.
    try:
        # Not CDLL, which lets a busy thread take the interpreter at every call.
        driver = ctypes.PyDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as error:
        raise UnavailableError(
            "copies between cards need NVIDIA's driver, which does not answer: see "
            "`qwen-l40s doctor`."
        ) from error
    function = driver.cuMemcpyAsync
    function.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function
