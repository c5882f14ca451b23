"""Computes one card's share of a pass, block by block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch

from ..blocks.block import BlockExecutor, KnownBlock, Step
from ..blocks.block_form import MLP_OUT, PLACES, QKV, STREAMS
from ..blocks.products import (
    Product,
    Read,
    Rows,
    Share,
    StreamSlice,
    in_stream_order,
    product_of,
    streams_of,
)
from ..blocks.workspace import SCALES_AT_ONCE, Program, Workspace
from ..modulation import Entry
from ..reference import Modulation, QuantizedRows, Tokens

# Places of a block's layers, by what they make of a card's own rows: queries, keys and values.
QUERIES, KEYS, VALUES = (0, 3), (1, 4), (2, 5)
IMAGE_LAST, TEXT_LAST = MLP_OUT
CUT = 128  # rows of a tile of most products
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class ShareCard(NamedTuple):
    """What computes a share."""

    executor: BlockExecutor  # in the card's workspace, with what is known of its blocks
    workspace: Workspace
    blocks: Sequence[torch.nn.Module]  # of its own copy of the model
    device: torch.device

    def current(self) -> AbstractContextManager:
        # Kernels launch on the current card.
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


class _Tail:
    """The end of a block and the next one's first norm in two pieces of a card's rows: what the
    first gives leaves the card while the second is computed.
    """

    def __init__(self, program: Program, following: Program) -> None:
        tokens = program.tokens
        cut = tokens.image // 2
        cut -= cut % (CUT if cut > CUT else SCALES_AT_ONCE)
        read = program.reads[IMAGE_LAST]
        self._program, self._following = program, following
        self._cut = tokens.text_rows + cut
        self._tokens = (
            Tokens(1, tokens.text, cut, min(tokens.zero_from, cut)),
            Tokens(1, 0, tokens.image - cut, max(tokens.zero_from - cut, 0)),
        )
        self._products = [
            product_of(
                read._replace(part=StreamSlice(start, 1, rows, rows), out=out),
                program.form.layers[IMAGE_LAST],
                program.ops,
            )
            for start, rows, out in (
                (read.part.start, cut, read.out[:, :cut]),
                (read.part.start + cut, tokens.image - cut, read.out[:, cut:]),
            )
        ]
        self._norms: list[Callable[..., None] | None] = [None, None]

    def run(
        self, piece: int, operand: Any, x: torch.Tensor, gates: Modulation, norms: Modulation
    ) -> None:
        self._products[piece](self._program.readable(IMAGE_LAST, operand))
        x = self._of(x, piece)
        norm = self._norms[piece]
        if norm is None:
            program, format = self._program, self._following.first_format
            out: Any = None
            branch = self._of(program.branch, piece)
            if format is None:
                out = branch
            else:
                values, scale, cut = self._following.rows.quantized[format]
                at = self._cut + len(scale) - len(values)
                parts = [
                    (values[: self._cut], scale[:at], cut),
                    (values[self._cut :], scale[at:], 0),
                ]
                out = QuantizedRows(*parts[piece])
            norm = self._norms[piece] = program.ops.residual_norm(
                x, branch, gates, norms, self._tokens[piece], program.form.eps, format, out
            )
        norm(x, gates, norms)

    def rows(self, pairs: Pairs, piece: int) -> Pairs:
        (values, _), *scales = pairs
        gaps = [len(scale) - len(values) for scale, _ in scales]
        cuts = [self._cut, *(self._cut + gap for gap in gaps)]
        return [
            (mine[:cut], theirs[:cut]) if not piece else (mine[cut:], theirs[cut:])
            for (mine, theirs), cut in zip(pairs, cuts, strict=True)
        ]

    def _of(self, rows: torch.Tensor, piece: int) -> torch.Tensor:
        return rows[self._cut :] if piece else rows[: self._cut]


# Rows of another card, and what makes keys and values of them: a place and a product each.
Received = tuple[Rows, list[tuple[int, Product]]]


def received(program: Program) -> dict[int, Received]:
    """Gives what comes from other cards, by the first image token of their shares."""
    found = program.kept.get(received)
    if found is None:
        others = program.share.received
        found = program.kept[received] = {it.start: _received(program, it) for it in others}
    return found


def _received(program: Program, other: Share) -> Received:
    tokens, format, layers = other.tokens, program.first_format, program.form.layers
    name, size = f"received {other.start}", (tokens.rows, program.width)
    rows = Rows()
    if format is None:
        rows = Rows(program.take(name, *size))
    else:
        rows.quantized[format] = program.room(name, size, format, tokens.text_rows)
    made = []
    for place in sorted(KEYS + VALUES):
        if PLACES[place] == "text" and not other.text:
            continue
        part = in_stream_order(tokens)[STREAMS.index(PLACES[place])]
        read = Read(rows, part, program.of_share(place, other))
        made.append((place, product_of(read, layers[place], program.ops)))
    return rows, made


class Part:
    """One card's share of a pass, block by block."""

    def __init__(
        self, card: ShareCard, share: Share, x: torch.Tensor, step: Step, entry: Entry
    ) -> None:
        self.card, self.share, self.x = card, share, x
        self._step, self._entry = step, entry
        self._blocks: list[tuple[KnownBlock, Program]] = []
        self._known: KnownBlock
        self.program: Program  # of the block that is computed
        self._ending: tuple[_Tail, tuple[Any, ...]]

    def open(self, blocks: int) -> None:
        """Prepares the first blocks, and runs the norm of the first of all."""
        card = self.card
        known = [card.executor.look(block, self.x) for block in islice(card.blocks, blocks)]
        changes = None
        while changes != card.workspace.changes:  # a larger buffer makes all programs void
            changes = card.workspace.changes
            programs = [card.workspace.program(it.form, self.share, self.x) for it in known]
            for program in programs:
                received(program)
        self._blocks = list(zip(known, programs, strict=True))
        self._known, self.program = self._blocks[0]
        self.program.begin(self.x, self._entry.of(0)[0])

    def begin(self) -> None:
        """Computes what the LoRAs beside the first layers make of the card's rows."""
        self.card.executor.compute_low(self.program, self._known, QKV)

    def multiply(self, *places: tuple[int, ...]) -> None:
        """Makes `QUERIES`, `KEYS` or `VALUES` of the card's rows."""
        for these in places:
            self.card.executor.multiply(self.program, self._known, these)

    def go_to_last(self, index: int) -> None:
        """Computes all up to what the MLP's last layers read, once everything has come."""
        executor, known, program = self.card.executor, self._known, self.program
        for _, products in received(program).values():
            for place, product in products:
                product(program.readable(place, known.operands[place]))
        executor.go_to_last(program, known, self.x, self._step, self._entry.of(index))
        executor.compute_low(program, known, MLP_OUT)

    def finish_first(self, index: int) -> None:
        """Ends a block and begins the next one for the first piece of the rows."""
        known, program = self._known, self.program
        self._known, self.program = self._blocks[index + 1]
        tail = program.kept.get(id(self.program))
        if tail is None:
            tail = program.kept[id(self.program)] = _Tail(program, self.program)
        self.card.executor.multiply(program, known, (TEXT_LAST,))
        gates, norms = self._entry.of(index)[1], self._entry.of(index + 1)[0]
        self._ending = tail, (known.operands[IMAGE_LAST], self.x, gates, norms)
        tail.run(0, *self._ending[1])

    def finish_second(self) -> None:
        tail, given = self._ending
        tail.run(1, *given)

    def finish(self, index: int, added: torch.Tensor | None) -> None:
        """Ends a block and begins the next one, between which `added` is added to the image."""
        known, program = self._known, self.program
        self.card.executor.multiply(program, known, (TEXT_LAST, IMAGE_LAST))
        gates = self._entry.of(index)[1]
        if index + 1 == len(self._blocks):
            program.end(self.x, gates)
            return
        norms = self._entry.of(index + 1)[0]
        self._known, self.program = self._blocks[index + 1]
        if added is None:
            program.go_on(self.x, gates, norms, self.program)
            return
        program.end(self.x, gates)
        added = added[:, self.share.start : self.share.stop]
        streams_of(self.x, self.share.tokens)[1][:, : added.shape[1]] += added
        self.program.begin(self.x, norms)

    def heads_to(self, other: Part, which: int) -> Pairs:
        """Gives keys (1) or values (2) here, and where they go to on the other card."""
        cut = slice(0 if self.share.text else self.share.image.start, self.share.image.stop)
        mine, theirs = self.program.heads[which], other.program.heads[which]
        items = zip(mine.split(1), theirs.split(1), strict=True)
        return [(here[:, cut], there[:, cut]) for here, there in items]

    def rows_to(self, other: Part, piece: int | None) -> Pairs:
        """Gives normalized rows here, or a piece's, and where they go to on the other card."""
        program, format = self.program, self.program.first_format
        there, _ = received(other.program)[self.share.start]
        if format is None:
            pairs = [(program.rows.matrix, there.matrix)]
        else:
            mine, theirs = program.rows.quantized[format], there.quantized[format]
            pairs = [(mine.values, theirs.values), (mine.scale, theirs.scale)]
        return pairs if piece is None else self._ending[0].rows(pairs, piece)
