"""The blocks of one forward pass on several cards, each with a share of the rows.

A card computes what the executor computes, for its rows; attention alone needs the others' keys and
values. They come in one of two ways, each once a block:

- `KEYS`: keys and values themselves, 4 bytes x D a row in bf16;
- `ROWS`: the normalized rows that q, k and v are made of, as the layers read them, 1 or 2 bytes
  x D a row, and every card makes all keys and values. Integer products of the same rows are the
  same bits.

Image rows are cut anywhere, and the text's are on the first card. One thread issues the work of all
cards, block by block; copies run beside q, k and v.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch

from ..modulation import Entry
from ..reference import Rotary, Tokens
from .block import BlockExecutor, KnownBlock, Step
from .self_check import Streams
from .shape import Share
from .workspace import Program, Workspace, streams_of

KEYS, ROWS = "keys", "rows"
# By what they make of a card's own rows: keys and values first, which others wait for.
KEY_PLACES, QUERY_PLACES = (1, 2, 4, 5), (0, 3)
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class CopyLane(Protocol):
    """Copies from one card to another, in order: `lanes.Lane`."""

    def copy(self, pairs: Pairs) -> None: ...

    def arrive(self) -> None: ...

    def departed(self) -> None: ...

    def missed(self) -> bool: ...


class LostCopyError(Exception):
    """What one card sent has not come to another."""


class Card(NamedTuple):
    """What computes a share.

    Attributes:
        executor: In the card's workspace, with what is known of its blocks.
        blocks: Of its own copy of the model.
        device: Of both.
    """

    executor: BlockExecutor
    workspace: Workspace
    blocks: Sequence[torch.nn.Module]
    device: torch.device

    def current(self) -> AbstractContextManager:
        """Makes it the current card, as launches of kernels need."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


def shares_of(tokens: Tokens, images: Sequence[int], exchange: str) -> list[Share]:
    """The shares of a pass.

    Args:
        images: Image tokens of an item for each card; the first has the text as well.

    Raises:
        ValueError: They are not all image tokens, or a card has none.
    """
    if sum(images) != tokens.image or min(images) < 1:
        raise ValueError(f"{tokens.image} image tokens cannot be shared as {list(images)}")
    stops = [sum(images[: index + 1]) for index in range(len(images))]
    alone = [
        Share(tokens, not index, stop - count, stop)
        for index, (count, stop) in enumerate(zip(images, stops, strict=True))
    ]
    if exchange == KEYS:
        return alone
    return [
        share._replace(received=tuple(other for other in alone if other is not share))
        for share in alone
    ]


class Split:
    """A pass on several cards.

    Args:
        cards: The first has the inputs, and gets the result.
        shares: Of each card.
        lanes: Of each pair of cards, from the one to the other.
        additions: What the host adds to the image's rows after each block, (batch or 1, tokens, D)
            on the first card, or None; empty where it adds nothing.

    Attributes:
        issued: When the processor had issued all of the last run, by `time.perf_counter`.
    """

    def __init__(
        self,
        cards: Sequence[Card],
        shares: Sequence[Share],
        lanes: dict[tuple[int, int], CopyLane],
        additions: Sequence[torch.Tensor | None] = (),
    ) -> None:
        self._cards, self._shares, self._lanes = cards, shares, lanes
        self._additions = additions
        self._kept: list[Pairs] = []  # that copies read
        self._marks: list[torch.cuda.Event] = []
        self.issued = 0.0

    def run(
        self,
        text: torch.Tensor,
        image: torch.Tensor,
        step: Step,
        entry: Entry,
        first: int,
        last: int,
    ) -> Streams:
        """Blocks from `first` on, without `last`.

        Args:
            text: (batch, text tokens, D), on the first card.
            image: (batch, image tokens, D), there too.
            step: What the pass is about.
            entry: The modulation of all blocks.

        Returns:
            text and image after these blocks, new tensors on the first card.

        Raises:
            LostCopyError: A copy did not come to its card; text and image are as they were.
            torch.OutOfMemoryError: A card has no room.
        """
        self._kept.clear()
        try:
            result = self._run(text, image, step, entry, first, last)
        finally:  # nobody copies from or to what is freed next
            missed = [lane.missed() for lane in self._lanes.values()]
        if any(missed):
            raise LostCopyError
        return result

    def _run(
        self,
        text: torch.Tensor,
        image: torch.Tensor,
        step: Step,
        entry: Entry,
        first: int,
        last: int,
    ) -> Streams:
        parts = self._begin(text, image, step, entry)
        for part in parts:
            with part.card.current():
                part.open(first, last)
        self._mark()
        for index in range(first, last):
            for part in parts:
                with part.card.current():
                    part.begin()
            for (source, target), lane in self._lanes.items():
                lane.copy(parts[source].sent_to(parts[target]))
            for part in parts:
                with part.card.current():
                    part.multiply_rest()
            for here, part in enumerate(parts):
                with part.card.current():
                    self._arrive(here)
                    part.finish(index, self._added(index, here))
        self._mark()
        result = self._gather(parts, image)
        self.issued = time.perf_counter()
        return result

    def milliseconds(self) -> float:
        """Of the blocks of the last run, on the first card."""
        start, end = self._marks[-2:]
        end.synchronize()
        return start.elapsed_time(end)

    def _mark(self) -> None:
        if self._cards[0].device.type == "cuda":
            self._marks = [*self._marks[-1:], torch.cuda.Event(enable_timing=True)]
            self._marks[-1].record()

    def _begin(
        self, text: torch.Tensor, image: torch.Tensor, step: Step, entry: Entry
    ) -> list[_Part]:
        parts: list[_Part] = []
        for here, (card, share) in enumerate(zip(self._cards, self._shares, strict=True)):
            own = image[:, share.start : share.stop]
            if not here:
                x = torch.cat([part.reshape(-1, part.shape[-1]) for part in (text, own)])
                part = _Part(card, share, x, Step(share.tokens, step.rotary, step.mask), entry)
            else:
                part = self._send(here, card, share, own, step, entry)
            parts.append(part)
        return parts

    def _send(
        self,
        here: int,
        card: Card,
        share: Share,
        image: torch.Tensor,
        step: Step,
        entry: Entry,
    ) -> _Part:
        """What another card than the first needs for its share."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

        def sent(name: str, tensor: torch.Tensor, rows: bool = False) -> torch.Tensor:
            shape = (share.tokens.rows, tensor.shape[-1]) if rows else tensor.shape
            like = torch.empty(0, dtype=tensor.dtype, device=card.device)
            there = card.workspace.take(f"sent {name}", shape, like)
            parts = there.view(tensor.shape).unbind() if rows else (there,)
            pairs.extend(zip(tensor.unbind() if rows else (tensor,), parts, strict=True))
            return there

        with card.current():
            x = sent("x", image.contiguous(), rows=True)
            rotary = Rotary(
                *(sent(n, it) for n, it in zip(("cos", "sin"), step.rotary, strict=True))
            )
            mask = None if step.mask is None else sent("mask", step.mask.contiguous())
            modulation = sent("modulation", entry.image.contiguous())
        self._copy(0, here, pairs)
        self._lanes[0, here].arrive()
        # The text's modulation has no rows here to change.
        own = Entry(modulation, modulation[:, : entry.text.shape[1]])
        return _Part(card, share, x, Step(share.tokens, rotary, mask), own)

    def _arrive(self, here: int) -> None:
        """This card waits for what it gets, and for what it sends, which it then overwrites."""
        for (source, target), lane in self._lanes.items():
            if target == here:
                lane.arrive()
            elif source == here:
                lane.departed()

    def _added(self, index: int, here: int) -> torch.Tensor | None:
        """What the host adds after a block, on this card."""
        if index >= len(self._additions) or self._additions[index] is None:
            return None
        added = self._additions[index]
        if not here:
            return added
        card = self._cards[here]
        like = torch.empty(0, dtype=added.dtype, device=card.device)
        there = card.workspace.take("added", added.shape, like)
        self._copy(0, here, [(added.contiguous(), there)])
        self._lanes[0, here].arrive()
        return there

    def _copy(self, source: int, target: int, pairs: Pairs) -> None:
        self._kept.append(pairs)
        self._lanes[source, target].copy(pairs)

    def _gather(self, parts: Sequence[_Part], image: torch.Tensor) -> Streams:
        result = torch.empty_like(image, memory_format=torch.contiguous_format)
        text, own = streams_of(parts[0].x, parts[0].share.tokens)
        result[:, : own.shape[1]].copy_(own)
        for here, part in enumerate(parts[1:], 1):
            lane, share = self._lanes[here, 0], part.share
            there = result[:, share.start : share.stop]
            _, own = streams_of(part.x, share.tokens)
            lane.copy(list(zip(own.unbind(), there.unbind(), strict=True)))
            with parts[0].card.current():
                lane.arrive()
        return text, result


class _Part:
    """One card's share of a pass, block by block.

    Attributes:
        x: Its rows, in stream order.
    """

    def __init__(self, card: Card, share: Share, x: torch.Tensor, step: Step, entry: Entry) -> None:
        self.card, self.share, self.x = card, share, x
        self._step, self._entry = step, entry
        self._blocks: dict[int, tuple[KnownBlock, Program]] = {}
        self._known: KnownBlock
        self._program: Program

    def open(self, first: int, last: int) -> None:
        """Prepares blocks from `first` on, without `last`, and runs the norm of the first."""
        card, indices = self.card, range(first, last)
        known = [card.executor.look(card.blocks[index], self.x) for index in indices]
        changes = None
        while changes != card.workspace.changes:  # a larger buffer makes all programs void
            changes = card.workspace.changes
            programs = [card.workspace.program(it.form, self.share, self.x) for it in known]
        self._blocks = dict(zip(indices, zip(known, programs, strict=True), strict=True))
        self._known, self._program = self._blocks[first]
        self._program.begin(self.x, self._entry.of(first)[0])

    def begin(self) -> None:
        """What is exchanged."""
        if not self.share.received:
            self.card.executor.compute_low(self._program, self._known, 0)
            self.card.executor.multiply(self._program, self._known, KEY_PLACES)

    def multiply_rest(self) -> None:
        """What else is made of the card's own rows, while copies are on their way."""
        places = (*KEY_PLACES, *QUERY_PLACES) if self.share.received else QUERY_PLACES
        self.card.executor.multiply(self._program, self._known, places)

    def finish(self, index: int, added: torch.Tensor | None) -> None:
        """What is left of a block once everything has come, and the next one's norm.

        Args:
            added: To the image after the block.
        """
        executor, known, program = self.card.executor, self._known, self._program
        for _, products in program.received:
            for place, product in products:
                product(program.readable(place, known.operands[place]))
        halves = self._entry.of(index)
        executor.finish(program, known, self.x, self._step, halves)
        if index + 1 not in self._blocks:
            program.end(self.x, halves[1])
            return
        norms = self._entry.of(index + 1)[0]
        self._known, self._program = self._blocks[index + 1]
        if added is None:
            program.go_on(self.x, halves[1], norms, self._program)
            return
        program.end(self.x, halves[1])
        added = added[:, self.share.start : self.share.stop]
        streams_of(self.x, self.share.tokens)[1][:, : added.shape[1]] += added
        self._program.begin(self.x, norms)

    def sent_to(self, other: _Part) -> Pairs:
        """Tensors here, and where they go to on the other card."""
        if not other.share.received:
            return self._keys_to(other)
        program, format = self._program, self._program.first_format
        there = other._program.rows_of(self.share)
        if format is None:
            return [(program.shape.rows.matrix, there.matrix)]
        mine, theirs = program.shape.rows.quantized[format], there.quantized[format]
        return [(mine.values, theirs.values), (mine.scale, theirs.scale)]

    def _keys_to(self, other: _Part) -> Pairs:
        stop = self.share.image.stop
        cut = slice(0 if self.share.text else self.share.image.start, stop)
        pairs = zip(self._program.heads[1:], other._program.heads[1:], strict=True)
        return [
            (here[:, cut], there[:, cut])
            for mine, theirs in pairs
            for here, there in zip(mine.split(1), theirs.split(1), strict=True)
        ]
