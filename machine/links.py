"""Copies between two cards of this machine, and measures whether copies arrive and how fast.

With an IOMMU that translates, or ACS that redirects, the driver promises peer access and data never
arrives. So a pattern goes from card to card and back at the start of every run.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any

import torch

from ..caches import cached, remembered
from ..errors import UnavailableError
from ..spec.formats import MIB
from ..verdict import first_line
from .card import Capability, InstalledCards, State

# Pinned system RAM of a route that does not go from card to card.
BUFFERS, BUFFER_BYTES = 4, 8 * MIB
# One piece of a copy is on its way to system RAM while the one before leaves it.
PIECES, LEAST_PIECE = 6, MIB // 8

Pair = tuple[torch.Tensor, torch.Tensor]
Move = tuple[int, int, int]  # address of the target, address of the source, bytes
# Of the pattern: two copies and a comparison take a fraction of a millisecond.
PATTERN_BYTES = MIB
MEASURED_BYTES, MEASURED_COPIES = 64 * MIB, 6

NO_ACCESS = "the driver allows no peer access"
NO_MEMORY = "too little VRAM is free to verify peer copies"
DAMAGED = "peer copies changed the data"
CORE_TOO = "ComfyUI's copies between these GPUs would be wrong too"
REMEDY = "Boot with `iommu=pt`, or turn ACS off in the BIOS"


class CardOperations:
    """What CUDA does for copies; tests replace it. Streams and events are torch's."""

    def current(self, device: torch.device) -> Any:
        return torch.cuda.current_stream(device)

    def stream(self, device: torch.device) -> Any:
        return torch.cuda.Stream(device, priority=-1)

    def event(self, timed: bool = False) -> Any:
        return torch.cuda.Event(enable_timing=timed)

    def pinned(self, size: int) -> torch.Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise UnavailableError(
                f"{size // MIB} MiB of system RAM cannot be pinned for copies between GPUs: free "
                "system RAM, or raise the limit of locked memory (ulimit -l)."
            ) from error

    def copy(self, target: int, source: int, size: int, stream: Any) -> None:
        code = _memcpy()(target, source, size, stream.cuda_stream)
        if code:
            raise RuntimeError(f"a copy between two GPUs failed: CUDA error {code}")

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
    """Copies from one card to another, in order, or through pinned system RAM, whose pieces
    overlap. Whoever copies keeps the tensors until both cards have waited. Raises UnavailableError.
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
        self.make_events()
        for stream in (self.out, self.into):  # before what it copies through is freed
            weakref.finalize(self, stream.synchronize).atexit = False

    def copy(self, pairs: Iterable[Pair]) -> None:
        """Copies pairs of contiguous (source, target), once the current streams of both cards come
        to this point; nobody waits for it. Raises ValueError where a pair differs in bytes.
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
        for stream in (self.out, self.into):
            stream.synchronize()

    @functools.cached_property
    def captured(self) -> Route:
        """Makes another one between the same cards, for CUDA graphs alone."""
        return Route(self.source, self.target, self.peer, self._operations)

    def make_events(self) -> None:
        """Makes events anew: a graph that the current streams of both cards capture may wait for
        none of before, and has to wait for the last copy.
        """
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
    # cuMemcpyAsync takes the addresses of any card and of system RAM.
    try:
        # Not CDLL, which lets a busy thread take the interpreter at every call.
        driver = ctypes.PyDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as error:
        raise UnavailableError(
            "copies between GPUs need NVIDIA's driver, which does not respond: see `qwen-l40s "
            "doctor`."
        ) from error
    function = driver.cuMemcpyAsync
    function.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function


class Link:
    """What joins two cards: the routes both ways, and what was found out of them."""

    def __init__(self, first: torch.device, second: torch.device, operations: Any = None) -> None:
        self.cards = first, second
        self._operations = operations or CardOperations()
        self._routes: dict[bool, tuple[Route, Route]] = {}  # by whether from card to card
        self._speeds: dict[bool, tuple[float, ...]] = {}
        # reason: why copies go through pinned system RAM, in one clause; empty where they go from
        # card to card.
        # damaged: whether a pattern did not come back as it was; it is not tried again.
        self.reason, self.damaged = "", False

    @property
    def peer(self) -> bool:
        return not self.reason

    @property
    def speeds(self) -> tuple[float, ...]:
        """Returns GB/s (10^9 bytes a second) from the first card to the second, and back, while
        both ways are busy; empty where memory was short.
        """
        return self._speeds.get(self.peer, ())

    @property
    def gbps(self) -> float:
        """Returns the slower of `speeds`; 0 where nobody knows."""
        return min(self.speeds, default=0.0)

    @property
    def warning(self) -> str:
        """Tells a user of a machine that loses copies; empty elsewhere."""
        if not self.damaged:
            return ""
        return (
            f"Copies between {' and '.join(map(str, self.cards))} lose data on this machine (IOMMU "
            f"or ACS): {CORE_TOO}. This package copies through system RAM. {REMEDY}."
        )

    def route(self, source: torch.device) -> Route:
        """Returns what copies from one card to the other, or raises as `Route` does."""
        return self._both(self.peer)[self.cards.index(source)]

    def verify(self) -> None:
        """Sends a pattern from card to card and back; where it is damaged, all copies go through
        pinned system RAM. It also measures the link once, within 0.2 s; where memory is short, the
        next call tries again. Raises RuntimeError for a failed card.
        """
        if not self.damaged:
            try:
                self.reason = self._find_reason()
            except torch.OutOfMemoryError:
                self.reason = NO_MEMORY
        if not self.speeds:
            with suppress(torch.OutOfMemoryError, UnavailableError):
                self._speeds[self.peer] = self._measure()

    def _both(self, peer: bool) -> tuple[Route, Route]:
        if peer not in self._routes:
            first, second = self.cards
            self._routes[peer] = (
                Route(first, second, peer, self._operations),
                Route(second, first, peer, self._operations),
            )
        return self._routes[peer]

    @torch.inference_mode()
    def _find_reason(self) -> str:
        if not self._operations.can_access(*self.cards):
            return NO_ACCESS
        there, back = self._both(True)
        sent = _pattern(self.cards[0])
        # No byte is what has to come there.
        away, returned = ~_pattern(self.cards[1]), ~sent
        there.copy([(sent, away)])
        there.arrive()
        back.copy([(away, returned)])
        back.arrive()
        self.damaged = not torch.equal(sent, returned)
        return DAMAGED if self.damaged else ""

    @torch.inference_mode()
    def _measure(self) -> tuple[float, ...]:
        sources, targets = (
            [torch.zeros(MEASURED_BYTES, dtype=torch.uint8, device=card) for card in self.cards]
            for _ in range(2)
        )
        routes = self._both(self.peer)
        pairs = list(zip(sources, reversed(targets), strict=True))
        begins, ends = ([self._operations.event(timed=True) for _ in routes] for _ in range(2))

        def copy() -> None:
            for route, pair in zip(routes, pairs, strict=True):
                route.copy([pair])

        copy()  # so that the links are awake
        for begin, route in zip(begins, routes, strict=True):
            begin.record(route.out)
        for _ in range(MEASURED_COPIES):
            copy()
        for end, route in zip(ends, routes, strict=True):
            route.out.wait_event(route.landed)
            end.record(route.out)
        for end in ends:
            end.synchronize()
        seconds = [begin.elapsed_time(end) / 1e3 for begin, end in zip(begins, ends, strict=True)]
        return tuple(MEASURED_COPIES * MEASURED_BYTES / each / 1e9 for each in seconds)


_links: dict[tuple[torch.device, torch.device], Link] = remembered({})


def link_between(first: torch.device, second: torch.device, again: bool = False) -> Link:
    """Returns this process's one link of two cards; raises RuntimeError for a failed card."""
    pair = (first, second) if str(first) <= str(second) else (second, first)
    link = _links.get(pair)
    if link is None or again:
        link = link or Link(*pair)
        link.verify()
        _links[pair] = link
    return link


def check_links(cards: InstalledCards) -> list[Capability]:
    found = []
    for first, second in combinations(range(len(cards.usable)), 2):
        name = f"GPUs {first} and {second}"
        try:
            link = link_between(torch.device("cuda", first), torch.device("cuda", second))
        except RuntimeError as error:  # a card that has failed
            found.append(State.NOT_USABLE.of(name, first_line(error)))
            continue
        state = State.USABLE if link.peer else State.LIMITED
        fact = _way(link)
        if link.speeds:
            there, back = (f"{each:.1f} GB/s" for each in link.speeds)
            fact += f"; {first} to {second} {there} and back {back}, both at once"
        found.append(state.of(name, fact, _remedy(link)))
    return found


def _way(link: Link) -> str:
    if link.peer:
        return "peer copies are correct"
    if link.damaged:
        return f"{link.reason}; {CORE_TOO}; this package copies through system RAM"
    return f"copies go through system RAM: {link.reason}"


def _remedy(link: Link) -> str:
    if link.damaged:
        return REMEDY[0].lower() + REMEDY[1:]
    return "end other programs on the GPUs" if link.reason == NO_MEMORY else ""


def _pattern(card: torch.device) -> torch.Tensor:
    # Neighbours differ in every byte, most of the time.
    numbers = torch.arange(PATTERN_BYTES // 4, dtype=torch.int32, device=card)
    return numbers.mul_(-1640531527)
