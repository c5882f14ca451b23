"""Computes one card's share of a pass, block by block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from ..blocks.block import BlockExecutor, KnownBlock, Step
from ..blocks.block_form import (
    IMAGE_LAST,
    KEYS,
    MLP_OUT,
    PLACES,
    QKV,
    TEXT_LAST,
    VALUES,
    of_stream,
)
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
from ..reference import Modulation, QuantizedRows

CUT = 128  # rows of a tile of most products
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class ShareCard(NamedTuple):
    """What computes a share."""

    executor: BlockExecutor  # in the card's workspace, with what is known of its blocks
    workspace: Workspace
    blocks: Sequence[torch.nn.Module]  # of its own copy of the model
    device: torch.device


class _Piece:
    """The end of a block and the next one's first norm for some of a card's rows: what the first
    piece gives leaves the card while the second is computed.
    """

    def __init__(self, program: Program, following: Program, share: Share) -> None:
        tokens, read = share.tokens, program.reads[IMAGE_LAST]
        begin, count = share.start - program.share.start, tokens.image
        self._program, self._following, self._tokens = program, following, tokens
        self._start = program.tokens.text + begin - tokens.text  # of the card's rows
        part, out = StreamSlice(read.part.start + begin, 1, count, count), read.out[:, begin:]
        read = read._replace(part=part, out=out[:, :count])
        self._product = product_of(read, program.form.layers[IMAGE_LAST], program.ops)
        self._norm: Callable[..., None] | None = None

    def run(self, operand: Any, x: torch.Tensor, gates: Modulation, norms: Modulation) -> None:
        program, tokens = self._program, self._tokens
        self._product(program.readable(IMAGE_LAST, operand))
        x = self.of(x)
        if self._norm is None:
            format = self._following.first_format
            out: Any = self.of(program.branch)
            given = x, out, gates, norms, tokens, program.form.eps, format
            if format is not None:
                values, scale, _ = self._following.rows.quantized[format]
                out = QuantizedRows(self.of(values), self.of(scale), tokens.text)
            self._norm = program.ops.residual_norm(*given, out)
        self._norm(x, gates, norms)

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Gives this piece of a tensor with a row for each of the card's, or of their scales."""
        gap = len(rows) - self._program.tokens.rows  # between text and image
        start, stop = self._start, self._start + self._tokens.rows
        return rows[start and start + gap : stop + gap]


def _pieces(program: Program, following: Program) -> tuple[_Piece, ...]:
    share = program.share
    count = program.tokens.image // 2
    cut = share.start + count - count % (CUT if count > CUT else SCALES_AT_ONCE)
    shares = share._replace(stop=cut), share._replace(text=False, start=cut)
    return tuple(_Piece(program, following, it) for it in shares)


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
        part = of_stream(place, in_stream_order(tokens))
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
        self._ending: tuple[tuple[_Piece, ...], tuple[Any, ...]]

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
        self.program.begin(self.x, self._entry.of(0).attention)

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
        pieces = program.kept.get(id(self.program))
        if pieces is None:
            pieces = program.kept[id(self.program)] = _pieces(program, self.program)
        self.card.executor.multiply(program, known, (TEXT_LAST,))
        gates, norms = self._entry.of(index).mlp, self._entry.of(index + 1).attention
        self._ending = pieces, (known.operands[IMAGE_LAST], self.x, gates, norms)
        pieces[0].run(*self._ending[1])

    def finish_second(self) -> None:
        (_, piece), given = self._ending
        piece.run(*given)

    def finish(self, index: int, added: torch.Tensor | None) -> None:
        """Ends a block and begins the next one, between which `added` is added to the image."""
        known, program = self._known, self.program
        self.card.executor.multiply(program, known, (TEXT_LAST, IMAGE_LAST))
        gates = self._entry.of(index).mlp
        if index + 1 == len(self._blocks):
            program.end(self.x, gates)
            return
        norms = self._entry.of(index + 1).attention
        self._known, self.program = self._blocks[index + 1]
        if added is None:
            program.go_on(self.x, gates, norms, self.program)
            return
        program.end(self.x, gates)
        added = added[:, self.share.start : self.share.stop]
        _, image = streams_of(self.x, self.share.tokens)
        image[:, : added.shape[1]] += added
        self.program.begin(self.x, norms)

    def heads_to(self, other: Part, which: str) -> Pairs:
        """Gives keys (k) or values (v) here, and where they go to on the other card."""
        cut = slice(0 if self.share.text else self.share.image.start, self.share.image.stop)
        mine, theirs = (getattr(it.program.heads, which) for it in (self, other))
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
        if piece is None:
            return pairs
        of = self._ending[0][piece].of
        return [(of(mine), of(theirs)) for mine, theirs in pairs]
