"""What joins two cards of this machine: whether copies between them arrive, and how fast.

With an IOMMU that translates, or ACS that redirects, the driver promises peer access, a copy
returns without an error, and its data never arrives. So a pattern goes from card to card and back
at the start of every run, and again after an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch

from ..caches import remembered
from ..errors import UnavailableError
from ..spec.formats import MIB
from . import copies
from .card import Capability, InstalledCards, State, first_line
from .copies import Pair, Route

# Of the pattern: two copies and a comparison take a fraction of a millisecond.
PATTERN_BYTES = MIB
MEASURED_BYTES, MEASURED_COPIES = 64 * MIB, 6

NO_ACCESS = "the driver gives no peer access"
NO_MEMORY = "too little card memory is free to verify peer copies"
DAMAGED = "peer copies arrived damaged"
CORE_TOO = "ComfyUI's own copies between these cards would be wrong too"
REMEDY = "Boot with `iommu=pt`, or turn ACS off in the BIOS"


class Speed(NamedTuple):
    """Has GB/s (10^9 bytes a second) one way, alone and while the other way is as busy."""

    alone: float
    both: float


Speeds = tuple[Speed, Speed]  # from the first card to the second, and back


class Link:
    """What joins two cards: the routes both ways, and what was found out of them.

    Args:
        first, second: Two cards of this machine with their indices.
        operations: As of `Route`.

    Attributes:
        reason: Why copies go through pinned host memory, in one clause; empty where they go from
            card to card.
        damaged: Whether a pattern did not come back as it was; it is not tried again.
    """

    def __init__(self, first: torch.device, second: torch.device, operations: Any = None) -> None:
        self.cards = first, second
        self._operations = operations or copies.CardOperations()
        self._routes: dict[bool, tuple[Route, Route]] = {}  # by whether from card to card
        self._speeds: dict[bool, Speeds] = {}
        self.reason, self.damaged = "", False

    @property
    def peer(self) -> bool:
        return not self.reason

    @property
    def gbps(self) -> float:
        """Returns what the slower way reaches while the other is as busy; 0 where nobody knows."""
        speeds = self._speeds.get(self.peer, ())
        return min((speed.both for speed in speeds), default=0.0)

    @property
    def warning(self) -> str:
        """Tells a user of a machine that loses copies; empty elsewhere."""
        if not self.damaged:
            return ""
        return (
            f"Copies between {' and '.join(map(str, self.cards))} lose data on this machine (IOMMU "
            f"or ACS): {CORE_TOO}. This package copies through host memory. {REMEDY}."
        )

    def route(self, source: torch.device) -> Route:
        """Returns what copies from one of the cards to the other.

        Raises:
            UnavailableError: No host memory can be pinned, or no driver answers.
        """
        return self._both(self.peer)[self.cards.index(source)]

    def verify(self) -> None:
        """Sends a pattern from card to card and back, on the streams that copy. Where it does not
        come back as it was, all copies go through pinned host memory from then on.

        The first call measures what the link reaches, too, in about 0.2 s.

        Raises:
            RuntimeError: A card does not answer.
        """
        if not self.damaged:
            try:
                self.reason = self._find_reason()
            except torch.OutOfMemoryError:
                self.reason = NO_MEMORY
        self.measure(self.peer)

    @torch.inference_mode()
    def measure(self, peer: bool) -> Speeds | None:
        """Measures both ways once; None where memory is short, and the next call tries again.

        Args:
            peer: Whether from card to card; else through pinned host memory.
        """
        if peer not in self._speeds:
            try:
                self._speeds[peer] = self._measure(self._both(peer))
            except (torch.OutOfMemoryError, UnavailableError):
                return None
        return self._speeds[peer]

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

    def _measure(self, routes: tuple[Route, Route]) -> Speeds:
        sources, targets = (
            [torch.zeros(MEASURED_BYTES, dtype=torch.uint8, device=card) for card in self.cards]
            for _ in range(2)
        )
        ways = [(route, (sources[way], targets[1 - way])) for way, route in enumerate(routes)]
        alone = [_gbps([way], self._operations)[0] for way in ways]
        first, second = map(Speed, alone, _gbps(ways, self._operations))
        return first, second


_links: dict[tuple[torch.device, torch.device], Link] = remembered({})


def link_between(first: torch.device, second: torch.device, again: bool = False) -> Link:
    """Returns the one link that this process has of two cards, in either order.

    Args:
        again: Whether to verify it also where that was done before.

    Raises:
        RuntimeError: A card does not answer.
    """
    pair = tuple(sorted((first, second), key=str))
    link = _links.get(pair)
    if link is None or again:
        link = link or Link(*pair)
        link.verify()
        _links[pair] = link
    return link


def check_links(cards: InstalledCards) -> list[Capability]:
    """Verifies and measures each pair of cards, and gives a line for each."""
    found = []
    for first, second in combinations(range(len(cards.usable)), 2):
        name = f"cards {first} and {second}"
        try:
            link = link_between(torch.device("cuda", first), torch.device("cuda", second))
            rates = list(_rates(link))
        except RuntimeError as error:  # a card that has failed
            found.append(Capability(name, State.NOT_USABLE, first_line(error)))
            continue
        state = State.USABLE if link.peer else State.LIMITED
        found.append(Capability(name, state, "; ".join([_way(link), *rates]), _remedy(link)))
    return found


def _way(link: Link) -> str:
    if link.peer:
        return "peer copies arrive whole"
    if link.damaged:
        return f"{link.reason}; {CORE_TOO}; this package copies through host memory"
    return f"copies go through host memory: {link.reason}"


def _remedy(link: Link) -> str:
    if link.damaged:
        return REMEDY[0].lower() + REMEDY[1:]
    return "end other programs on the cards" if link.reason == NO_MEMORY else ""


def _rates(link: Link) -> Iterator[str]:
    first, second = (card.index for card in link.cards)
    for name, peer in (("peer", True), ("through host memory", False)):
        if peer and not link.peer:
            continue
        if speeds := link.measure(peer):
            one, other = speeds
            alone = f"{first} to {second} {one.alone:.1f}, {second} to {first} {other.alone:.1f}"
            yield f"{name} {alone}, both at once {one.both:.1f} and {other.both:.1f} GB/s"


def _pattern(card: torch.device) -> torch.Tensor:
    # Neighbours differ in every byte, most of the time.
    numbers = torch.arange(PATTERN_BYTES // 4, dtype=torch.int32, device=card)
    return numbers.mul_(-1640531527)


def _gbps(ways: Sequence[tuple[Route, Pair]], operations: Any) -> list[float]:
    # Of each way, while all of them copy.
    for route, pair in ways:  # once before, so that the links are awake
        route.copy([pair])
    begins, ends = ([operations.event(timed=True) for _ in ways] for _ in range(2))
    for begin, (route, _) in zip(begins, ways, strict=True):
        begin.record(route.out)
    for _ in range(MEASURED_COPIES):
        for route, pair in ways:
            route.copy([pair])
    for end, (route, _) in zip(ends, ways, strict=True):
        route.out.wait_event(route.landed)
        end.record(route.out)
    for end in ends:
        end.synchronize()
    total = [MEASURED_COPIES * source.nbytes for _, (source, _) in ways]
    seconds = [begin.elapsed_time(end) / 1e3 for begin, end in zip(begins, ends, strict=True)]
    return [bytes_ / time / 1e9 for bytes_, time in zip(total, seconds, strict=True)]
