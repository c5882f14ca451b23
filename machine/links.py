"""What joins two cards of this machine: whether copies between them arrive, and how fast.

With an IOMMU that translates, or ACS that redirects, the driver promises peer access, a copy
returns without an error, and its data never arrives. Whether it does is tried once a boot.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import UnavailableError
from ..spec.formats import MIB
from . import copies
from .card import Capability, InstalledCards, State, first_line
from .copies import Route
from .store import load_link, save_link

SIZES = tuple(1024 * 4**step for step in range(10))  # bytes: 1 KB to 256 MB
ROUNDS = 2
# Copies of a size in a round: small ones are gone before a fault shows.
SMALL, SMALL_COPIES = MIB, 8
# Values are made and compared so many at a time.
CHUNK = 4 * MIB
# The largest size that is tried, at least; and what it may take of a card's free memory.
LEAST_BYTES, MOST_OF_FREE = 16 * MIB, 0.5
MEASURED_BYTES, MEASURED_COPIES = 64 * MIB, 6
# Matrix products that are queued with a copy, and for each MiB of it.
PRODUCTS, PRODUCTS_PER_MIB = 12, 1

NO_ACCESS = "the driver gives no peer access"
NO_MEMORY = "too little card memory is free to verify peer copies"
CORE_TOO = "ComfyUI's own copies between these cards would be wrong too"
REMEDY = "Boot with `iommu=pt`, or turn ACS off in the BIOS"


class Speed(NamedTuple):
    """GB/s (10^9 bytes a second) one way, alone and while the other way is as busy."""

    alone: float
    both: float


@dataclass(frozen=True)
class Link:
    """The way from one card to another.

    Attributes:
        source, target: The cards.
        peer: Whether copies go from card to card, which was verified in this boot; else they go
            through pinned host memory.
        reason: Why they do, in one clause; empty where `peer`.
        direct: What peer copies reach; None where they are not used.
        host: What copies through pinned host memory reach; None where too little memory was free to
            measure it, which the next call tries again.
        damaged: Whether peer copies were tried and did not arrive.
    """

    source: torch.device
    target: torch.device
    peer: bool
    reason: str
    direct: Speed | None
    host: Speed | None
    damaged: bool

    @property
    def gbps(self) -> float:
        """What copies reach while the other way is as busy; 0 where nobody knows."""
        speed = self.direct if self.peer else self.host
        return speed.both if speed else 0.0

    @property
    def warning(self) -> str:
        """What a user has to know of a machine that loses copies; empty elsewhere."""
        if not self.damaged:
            return ""
        pair = " and ".join(sorted(map(str, (self.source, self.target))))
        return (
            f"Copies between {pair} lose data on this machine (IOMMU or ACS): {CORE_TOO}. This "
            f"package copies through host memory. {REMEDY}."
        )


def link_between(source: torch.device, target: torch.device) -> Link:
    """The link from one card to another.

    In each boot the first call for a pair verifies and measures it both ways, in about a second;
    the cache folder keeps the verdict.

    Args:
        source, target: Two cards of this machine with their indices.

    Raises:
        RuntimeError: A card does not answer.
    """
    first, second = sorted((source, target), key=str)
    found = _known.get((first, second))
    if found is None:
        found = _look(first, second)
        if found.host:
            _known[first, second] = found
    way = 0 if source == first else 1
    direct, host = (speeds[way] if speeds else None for speeds in (found.direct, found.host))
    return Link(source, target, not found.reason, found.reason, direct, host, found.damaged)


def check_links(cards: InstalledCards) -> list[Capability]:
    """A line for each pair of cards; verifies those that were not verified in this boot."""
    found = []
    for first, second in combinations(range(len(cards.usable)), 2):
        devices = [torch.device("cuda", index) for index in (first, second)]
        name = f"cards {first} and {second}"
        try:
            link, back = link_between(*devices), link_between(*reversed(devices))
        except RuntimeError as error:  # a card that has failed
            found.append(Capability(name, State.NOT_USABLE, first_line(error)))
            continue
        parts = [_way(link), *_rates(link, back)]
        state = State.USABLE if link.peer else State.LIMITED
        found.append(Capability(name, state, "; ".join(parts), _remedy(link)))
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


def _rates(link: Link, back: Link) -> Iterator[str]:
    """GB/s of both ways, alone and at once."""
    there, again = (f"{way.source.index} to {way.target.index}" for way in (link, back))
    for name, one, other in (
        ("peer", link.direct, back.direct),
        ("through host memory", link.host, back.host),
    ):
        if one and other:
            alone = f"{there} {one.alone:.1f}, {again} {other.alone:.1f}"
            yield f"{name} {alone}, both at once {one.both:.1f} and {other.both:.1f} GB/s"


@dataclass(frozen=True)
class Verdict:
    """What was found out of a pair in one boot.

    Attributes:
        reason: As of `Link`.
        damaged: As of `Link`.
        direct, host: Speeds from the first card to the second, and back.
    """

    reason: str
    damaged: bool
    direct: tuple[Speed, Speed] | None
    host: tuple[Speed, Speed] | None


_known: dict[tuple[torch.device, torch.device], Verdict] = {}


def _look(first: torch.device, second: torch.device) -> Verdict:
    uuids = [_uuid(device) for device in (first, second)]
    # Of the cards themselves, whichever of them CUDA counts first.
    swapped = uuids[0] > uuids[1]
    key, boot = " ".join(sorted(uuids)), _boot()
    kept = _parse(load_link(key), boot) if boot and all(uuids) else None
    if kept is not None:
        return _swap(kept) if swapped else kept
    found = examine(first, second)
    if boot and all(uuids) and found.host:
        save_link(key, {"boot": boot, **asdict(_swap(found) if swapped else found)})
    return found


@torch.inference_mode()
def examine(first: torch.device, second: torch.device, operations: Any = None) -> Verdict:
    """Verifies and measures a pair, whatever is known of it.

    Args:
        operations: As `copies.operations_on`; that of the cards by default.
    """
    operations = operations or copies.operations_on(first)
    damaged, reason, direct, host = False, NO_ACCESS, None, None
    try:
        sides = _take(operations, (first, second))
        if operations.can_access(first, second):
            with _routes(first, second, True, operations) as routes:
                reason = _fault(sides, routes)
                damaged = bool(reason)
                direct = None if damaged else _measure(sides, routes, operations)
        with (
            contextlib.suppress(UnavailableError),  # no pinned memory
            _routes(first, second, False, operations) as routes,
        ):
            host = _measure(sides, routes, operations)
    except torch.OutOfMemoryError:
        return Verdict(NO_MEMORY, False, None, None)
    return Verdict(reason, damaged, direct, host)


class _Side:
    """What is copied on one card, what it has to be, and what the card computes meanwhile."""

    def __init__(self, device: torch.device, size: int, operations: Any) -> None:
        self.size = size
        new = {"dtype": torch.int32, "device": device}
        self.source, self.target = (torch.zeros(size // 4, **new) for _ in range(2))
        self._chunk = min(CHUNK, size // 4)
        # Neighbours differ in every byte, most of the time.
        self._pattern = torch.arange(self._chunk, **new).mul_(-1640531527)
        self._work = torch.empty_like(self._pattern)
        self._wrong = torch.zeros(len(_plan(size)), dtype=torch.bool, device=device)
        self.load = operations.load(device)

    def fill(self, size: int, seed: int, other: int) -> None:
        """Its source with the values of a seed; its target with no byte of another seed's."""
        for start, chunk in self._chunks(self.source[: size // 4]):
            torch.add(self._pattern[: len(chunk)], _offset(seed, start), out=chunk)
        for start, chunk in self._chunks(self.target[: size // 4]):
            torch.neg(self._pattern[: len(chunk)], out=chunk).sub_(1 + _offset(other, start))

    def compare(self, size: int, seed: int, index: int) -> None:
        """Remembers under an index whether the target holds something else, its end first."""
        for start, chunk in reversed(list(self._chunks(self.target[: size // 4]))):
            work = torch.sub(chunk, self._pattern[: len(chunk)], out=self._work[: len(chunk)])
            self._wrong[index] |= (work != _offset(seed, start)).any()

    def wrong(self) -> list[bool]:
        return self._wrong.tolist()

    def _chunks(self, tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        parts = tensor.split(self._chunk)
        return [(index * self._chunk, part) for index, part in enumerate(parts)]


def _offset(seed: int, start: int) -> int:
    return (seed * 40503 + start * 7) % 2**31


def _plan(size: int) -> list[int]:
    """The bytes of each copy of a way, where so many fit."""
    sizes = [known for known in SIZES if known <= size]
    once = [known for known in sizes for _ in range(SMALL_COPIES if known <= SMALL else 1)]
    return once * ROUNDS


def _take(operations: Any, devices: Sequence[torch.device]) -> list[_Side]:
    """The memory for the largest of `SIZES` that both cards have room for, twice.

    Raises:
        torch.OutOfMemoryError: There is too little.
    """
    free = min(map(operations.free, devices))
    for size in reversed(SIZES):
        if LEAST_BYTES <= size <= free * MOST_OF_FREE / 2:
            with contextlib.suppress(torch.OutOfMemoryError):  # what is free lies in pieces
                return [_Side(device, size, operations) for device in devices]
    raise torch.OutOfMemoryError(NO_MEMORY)


@contextlib.contextmanager
def _routes(
    first: torch.device, second: torch.device, peer: bool, operations: Any
) -> Iterator[list[Route]]:
    """Both ways; at the end all copies are done, and what they read and wrote may be freed."""
    routes = [Route(a, b, peer, operations) for a, b in ((first, second), (second, first))]
    try:
        yield routes
    finally:
        for route in routes:
            route.finish()


def _fault(sides: Sequence[_Side], routes: Sequence[Route]) -> str:
    """Copies patterns both ways while both cards compute; what did not arrive, in one clause."""
    ways = [(*sides, routes[0]), (*reversed(sides), routes[1])]
    plan = _plan(sides[0].size)
    for index, size in enumerate(plan):
        for side in sides:
            side.load.queue(PRODUCTS + PRODUCTS_PER_MIB * size // MIB)
        seeds = 2 * index, 2 * index + 1
        sides[0].fill(size, *seeds)
        sides[1].fill(size, *reversed(seeds))
        for source, target, route in ways:
            route.copy([(source.source[: size // 4], target.target[: size // 4])])
        for (_, target, route), seed in zip(ways, seeds, strict=True):
            route.arrive()
            target.compare(size, seed, index)
            route.departed()
    wrong = [size for side in sides for size, bad in zip(plan, side.wrong(), strict=True) if bad]
    for side in sides:
        side.load.finish()  # what follows is timed
    if not wrong:
        return ""
    return (
        f"{len(wrong)} of {2 * len(plan)} peer copies arrived damaged, the smallest of "
        f"{_bytes(min(wrong))}"
    )


def _bytes(size: int) -> str:
    return f"{size // MIB} MB" if size >= MIB else f"{size // 1024} KB"


def _measure(
    sides: Sequence[_Side], routes: Sequence[Route], operations: Any
) -> tuple[Speed, Speed]:
    """Both ways."""
    part = slice(0, MEASURED_BYTES // 4)
    one, other = sides
    pairs = [(one.source[part], other.target[part]), (other.source[part], one.target[part])]
    ways = list(zip(routes, pairs, strict=True))
    alone = [_gbps([way], operations)[0] for way in ways]
    first, second = map(Speed, alone, _gbps(ways, operations))
    return first, second


def _gbps(
    ways: Sequence[tuple[Route, tuple[torch.Tensor, torch.Tensor]]], operations: Any
) -> list[float]:
    """GB/s of each way while all of them copy."""
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


def _swap(verdict: Verdict) -> Verdict:
    """As of the same cards in the other order."""
    direct, host = (speeds and speeds[::-1] for speeds in (verdict.direct, verdict.host))
    return Verdict(verdict.reason, verdict.damaged, direct, host)


def _parse(entry: Any, boot: str) -> Verdict | None:
    """What the cache folder holds of a pair; None where it is of another boot, or damaged."""
    with contextlib.suppress(TypeError, KeyError, ValueError):
        reason, damaged = entry["reason"], entry["damaged"]
        speeds = [_speeds(entry[name]) for name in ("direct", "host")]
        known = isinstance(reason, str) and isinstance(damaged, bool) and entry["boot"] == boot
        # Peer copies that nothing was found against have a speed, and only those.
        if known and bool(reason) == (speeds[0] is None):
            return Verdict(reason, damaged, *speeds)
    return None


def _speeds(entry: Any) -> tuple[Speed, Speed] | None:
    if entry is None:
        return None
    first, second = (Speed(*map(float, speed)) for speed in entry)
    if not all(0 < value < math.inf for value in (*first, *second)):
        raise ValueError("no speed")
    return first, second


def _uuid(device: torch.device) -> str:
    if device.type == "cpu":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def _boot() -> str:
    """What differs from boot to boot; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
