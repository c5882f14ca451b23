"""Runs the blocks of one forward pass on several cards, each with a share of the tokens.

Attention alone needs the others' keys and values. They come in one of two ways, each once a block:

- `split_cost.KEYS`: keys and values themselves, 4 bytes x D a row in bf16;
- `split_cost.ROWS`: the normalized rows that q, k and v are made of, 1 or 2 bytes x D a row, and
  every card makes all keys and values. Integer products of the same rows are the same bits.

Image rows are cut anywhere, and the text's are on the first card. One thread issues the work of all
cards, block by block; copies run beside q, k and v.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch

from ...machine.links import Route
from ...planning import split_cost
from ..blocks.block import Step
from ..blocks.block_form import KEYS, QUERIES, VALUES
from ..blocks.graphs import Given, Inputs
from ..blocks.host import Streams
from ..blocks.products import Share, streams_of
from ..kernels import on_card
from ..modulation import Entry
from ..reference import Rotary, Tokens
from .parts import Pairs, Part, ShareCard


def shares_of(tokens: Tokens, images: Sequence[int], exchange: str) -> list[Share]:
    """Cuts a pass into shares."""
    alone = [
        Share(tokens, not index, stop - count, stop)
        for index, (count, stop) in enumerate(zip(images, accumulate(images), strict=True))
    ]
    if exchange == split_cost.KEYS:
        return alone
    return [
        share._replace(received=tuple(other for other in alone if other is not share))
        for share in alone
    ]


class Split:
    """A pass on several cards.

    Args:
        cards: The first has the inputs, and gets the result.
        additions: What the host adds to the image's rows after each block, (batch or 1, tokens, D)
            on the first card, or None; empty where it adds nothing.
        early: Whether normalized rows leave in two pieces, as `Exchange` has it.
    """

    def __init__(
        self,
        cards: Sequence[ShareCard],
        shares: Sequence[Share],
        routes: dict[tuple[int, int], Route],
        additions: Sequence[torch.Tensor | None] = (),
        early: bool = False,
    ) -> None:
        self._cards, self._shares, self._routes, self._early = cards, shares, routes, early
        self._additions = {block: it for block, it in enumerate(additions) if it is not None}
        self._kept: list[Pairs] = []  # that copies read
        self._sent: dict[Hashable, Pairs] = {}  # in blocks

    def run(
        self,
        given: Given,
        blocks: int,
        after: Callable[[int], None] | None = None,
        timed: AbstractContextManager | None = None,
    ) -> Streams:
        """Runs the first blocks; text and image are on the first card, as the results are. `after`
        is called with the index of each block that was launched; `timed` is around them all.
        """
        self._kept.clear()
        self._sent.clear()
        try:
            parts = self._begin(given, blocks)
            with timed or nullcontext():
                self._run(parts, blocks, after)
            return self._gather(parts, given.image.new_empty(given.image.shape))
        except BaseException:  # nobody copies from or to what is freed next
            for route in self._routes.values():
                route.finish()
            raise

    def capture(self, inputs: Inputs) -> None:
        """Runs all blocks in place, while the current streams of all cards capture a CUDA graph."""
        for route in self._routes.values():
            route.make_events()
        text, image = streams_of(inputs.x, inputs.step.tokens)
        blocks = len(self._cards[0].blocks)
        parts = self._begin(Given(text, image, inputs.step, inputs.entry), blocks)
        self._run(parts, blocks, None)
        own, _ = self._gather(parts, image)
        text.copy_(own)

    def _run(self, parts: Sequence[Part], blocks: int, after: Callable[[int], None] | None) -> None:
        piece = None  # that is left to be sent
        for index in range(blocks):
            _on_each(parts, Part.begin)
            self._make_and_send_qkv(parts, piece)
            for here, part in enumerate(parts):
                with on_card(part.card.device):
                    self._arrive(here)
                    part.go_to_last(index)
            early = self._early and index not in self._additions and index + 1 < blocks
            piece = 1 if early else None
            for here, part in enumerate(parts):
                with on_card(part.card.device):
                    if piece:
                        part.finish_first(index)
                    else:
                        part.finish(index, self._added(index, here))
            if piece:
                self._exchange(parts, Part.rows_to, 0)
                _on_each(parts, Part.finish_second)
            if after is not None:
                after(index)

    def _begin(self, given: Given, blocks: int) -> list[Part]:
        text, image, step, entry = given
        share, own = self._shares[0], image[:, : self._shares[0].stop]
        x = torch.cat([part.reshape(-1, part.shape[-1]) for part in (text, own)])
        first = Step(share.tokens, step.rotary, step.mask)
        parts = [Part(self._cards[0], share, x, first, entry)]
        parts += [self._send(here, given) for here in range(1, len(self._cards))]
        _on_each(parts, Part.open, blocks)
        return parts

    def _send(self, here: int, given: Given) -> Part:
        _, image, step, entry = given
        card, share = self._cards[here], self._shares[here]
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

        def sent(name: str, tensor: torch.Tensor) -> torch.Tensor:
            there = _place(card, f"sent {name}", tensor)
            pairs.append((tensor, there))
            return there

        with on_card(card.device):
            x = sent("x", image[:, share.start : share.stop].contiguous()).flatten(0, 1)
            rotary = Rotary(sent("cos", step.rotary.cos), sent("sin", step.rotary.sin))
            mask = None if step.mask is None else sent("mask", step.mask.contiguous())
            modulation = sent("modulation", entry.image.contiguous())
        self._copy(0, here, pairs)
        self._routes[0, here].arrive()
        # The text's modulation has no rows here to change.
        own = Entry(modulation, modulation[:, : entry.text.shape[1]])
        return Part(card, share, x, Step(share.tokens, rotary, mask), own)

    def _make_and_send_qkv(self, parts: Sequence[Part], piece: int | None) -> None:
        if self._shares[0].received:
            self._exchange(parts, Part.rows_to, piece)
            _on_each(parts, Part.multiply, QUERIES, KEYS, VALUES)
            return
        for which, places in (("k", KEYS), ("v", VALUES)):  # keys leave while values are made
            _on_each(parts, Part.multiply, places)
            self._exchange(parts, Part.heads_to, which)
        _on_each(parts, Part.multiply, QUERIES)

    def _exchange(
        self, parts: Sequence[Part], sent: Callable[[Part, Part, Any], Pairs], what: Hashable
    ) -> None:
        for (source, target), route in self._routes.items():
            here, there = parts[source], parts[target]
            # Found once: views made anew for each block cost the CPU as much as its launches.
            key = source, target, id(here.program), id(there.program), what
            pairs = self._sent.get(key)
            if pairs is None:
                pairs = self._sent[key] = sent(here, there, what)
            route.copy(pairs)

    def _arrive(self, here: int) -> None:
        # Also for what it sends, which it then overwrites.
        for (source, target), route in self._routes.items():
            if target == here:
                route.arrive()
            elif source == here:
                route.departed()

    def _added(self, index: int, here: int) -> torch.Tensor | None:
        added = self._additions.get(index)
        if added is None or not here:
            return added
        there = _place(self._cards[here], "added", added)
        self._copy(0, here, [(added.contiguous(), there)])
        self._routes[0, here].arrive()
        return there

    def _copy(self, source: int, target: int, pairs: Pairs) -> None:
        self._kept.append(pairs)
        self._routes[source, target].copy(pairs)

    def _gather(self, parts: Sequence[Part], result: torch.Tensor) -> Streams:
        text, own = streams_of(parts[0].x, parts[0].share.tokens)
        result[:, : own.shape[1]].copy_(own)
        for here, part in enumerate(parts[1:], 1):
            route, share = self._routes[here, 0], part.share
            there = result[:, share.start : share.stop]
            _, own = streams_of(part.x, share.tokens)
            route.copy(list(zip(own.unbind(), there.unbind(), strict=True)))
            route.arrive()
            route.departed()  # before the next pass writes there
        return text, result


def _on_each(parts: Sequence[Part], launch: Callable[..., None], *given: Any) -> None:
    for part in parts:
        with on_card(part.card.device):
            launch(part, *given)


def _place(card: ShareCard, name: str, tensor: torch.Tensor) -> torch.Tensor:
    # A number is a row, as buffers have 256 rows at least.
    like = torch.empty(0, dtype=tensor.dtype, device=card.device)
    return card.workspace.take(name, (tensor.numel(),), like).view(tensor.shape)
