"""Copies from one card to another whose loss is found: a number follows each of them.

With an IOMMU or ACS between two cards a copy can vanish, or come late, without an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .copies import Move, Route
from .links import link_between

# Copies whose numbers are kept until somebody asks.
KEPT = 1024


class Lane(Route):
    """A `Route` that sends its running number after each copy, on the same way.

    As soon as the copy is said to be done, the number that lies on the target is copied to host
    memory: nothing waits for that but `missed`, and no kernel is launched for it.

    Args:
        source, target: Cards, or the CPU for both.
        peer: Whether copies go from card to card; else through pinned host memory.
        operations: What copies; of the source by default.

    Attributes:
        gbps: What it reaches while the other way is as busy; 0 where nobody knows.

    Raises:
        UnavailableError: No host memory can be pinned, or no driver answers.
    """

    def __init__(
        self, source: torch.device, target: torch.device, peer: bool, operations: Any = None
    ) -> None:
        super().__init__(source, target, peer, operations)
        self.gbps = 0.0
        # In each place two numbers take turns: what an earlier copy left there is none of them.
        self._numbers = torch.arange(1, 2 * KEPT + 1, dtype=torch.int32).to(source)
        self._places = torch.zeros(KEPT, dtype=torch.int32).to(target)
        self._seen = self._operations.pinned(self._places.nbytes).view(torch.int32).zero_()
        self._addresses = [x.data_ptr() for x in (self._places, self._numbers, self._seen)]
        self._nothing = torch.zeros_like(self._places)
        self._looked = self._operations.event()
        self._copies = self._checked = 0
        self._missed = False

    def _copy(self, moves: Sequence[Move]) -> None:
        if self._copies - self._checked == KEPT:
            self._check()
        places, numbers, seen = self._addresses
        place, number = 4 * (self._copies % KEPT), 4 * (self._copies % (2 * KEPT))
        follows = places + place, numbers + number, 4
        self._copies += 1
        if self.peer:
            super()._copy(moves)
            # `landed` is before the number: a card goes on with what has come while that is sent.
            self._operations.copy(*follows, self.out)
            self._numbered.record(self.out)
            self.into.wait_event(self._numbered)
        else:
            super()._copy([*moves, follows])
        self._operations.copy(seen + place, places + place, 4, self.into)

    def missed(self) -> bool:
        """Whether a copy since the last call had not arrived when it was said to be done.

        Waits for the last copy, and for nothing else on either card.
        """
        self._check()
        missed, self._missed = self._missed, False
        return missed

    @functools.cached_property
    def captured(self) -> Lane:
        """Another one between the same cards, for CUDA graphs alone."""
        return Lane(self.source, self.target, self.peer, self._operations)

    def begin_capture(self) -> None:
        """Copies from here on are part of a graph, which the current streams of both cards capture.

        At each replay no number is there before its copy.
        """
        self._make_events()  # a graph may not wait for one of before
        self._copies = self._checked = 0
        self._free.record(self._operations.current(self.target))
        self.into.wait_event(self._free)
        nothing = self._nothing
        self._operations.copy(self._addresses[0], nothing.data_ptr(), nothing.nbytes, self.into)
        cleared = self._operations.event()
        cleared.record(self.into)
        self.out.wait_event(cleared)

    def end_capture(self) -> Callable[[], bool]:
        """The current streams of both cards wait for all copies.

        Returns:
            Whether one had not arrived in a replay; asked when that is over.
        """
        current, copies = self._operations.current, self._copies
        for card, stream in ((self.source, self.out), (self.target, self.into)):
            done = self._operations.event()
            done.record(stream)
            current(card).wait_event(done)
        return lambda: self._seen[:copies].tolist() != list(range(1, copies + 1))

    def _make_events(self) -> None:
        super()._make_events()
        self._numbered = self._operations.event()

    def _check(self) -> None:
        self._looked.record(self.into)
        self._looked.synchronize()
        seen = self._seen.tolist()
        for copy in range(self._checked, self._copies):
            self._missed |= seen[copy % KEPT] != copy % (2 * KEPT) + 1
        self._checked = self._copies


@functools.cache
def lane_between(source: torch.device, target: torch.device) -> Lane:
    """The lane from one card to another, verified and measured as `link_between` does."""
    if source.type == "cpu":
        return Lane(source, target, True)
    link = link_between(source, target)
    lane = Lane(source, target, link.peer)
    lane.gbps = link.gbps
    return lane
