"""Keeps keys and values of a prompt's text and references on the card, for the next prompt.

In Qwen-Image-2.1 the rows before the image are causal and the same in all steps: those up to the
last reference do not depend on the instruction behind them. ComfyUI computes all of them in the
first step of each prompt: two references take 0.25 of 1.46 s (8 steps at 1024x1024, H200).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from comfy import model_management as management

from ....caches import remembered
from ....optimizations.patches import put

MOST = 2  # prompts that a run takes in turn: with CFG, the prompt and the negative prompt


class Rows(NamedTuple):
    """What the first block gets, and what all of them compute with.

    Attributes:
        rows: (batch, tokens, D), in joint order.
        turns: ComfyUI's rotation of each, (1, tokens, ...).
        modulation: As at timestep 0.
        cut: Where the last reference ends.
        settings: The weights' patches, and whose attention it is.
    """

    rows: torch.Tensor
    turns: torch.Tensor
    modulation: tuple[torch.Tensor, ...]
    cut: int
    settings: Hashable

    def copy(self) -> Rows:
        return self._replace(rows=self.rows.clone(), turns=self.turns.clone())

    def equal(self, other: Rows) -> int:
        """Counts the first rows that are equal bit for bit: all, up to the last reference, or 0."""
        if (self.cut, self.settings) != (other.cut, other.settings):
            return 0
        mine, others = (
            (it.rows[:, : it.cut], it.turns[:, : it.cut], *it.modulation) for it in (self, other)
        )
        if not all(map(_same, mine, others)):
            return 0
        whole = _same(self.rows, other.rows) and _same(self.turns, other.turns)
        return self.rows.shape[1] if whole else self.cut


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return alike and torch.equal(one, other)


class KeptPrefix:
    """Keys and values of one prompt, by block: (batch, 2, tokens, heads, head_dim)."""

    def __init__(self, given: Rows, cache: Any) -> None:
        self.given = given
        self.blocks: dict[int, torch.Tensor] = {}
        self._cache: ReferenceType[Any] = ref(cache)

    def is_of(self, cache: Any) -> bool:
        """Tells whether a run with this cache, which ComfyUI makes anew for each, has filled it."""
        return self._cache() is cache


class KeptPrefixes:
    """Holds those of one transformer, as long as ComfyUI needs their memory for nothing else.

    ComfyUI drops them with the model, and where it makes room on their card.
    """

    def __init__(self) -> None:
        self._kept: list[KeptPrefix] = []

    @staticmethod
    def of(transformer: torch.nn.Module) -> KeptPrefixes:
        return _stores.setdefault(transformer, KeptPrefixes())

    def make_room(self, room: int, size: int) -> None:
        """Drops all where less than 4 times the `size` of a prompt is free: ComfyUI then keeps
        the prompt's in system RAM, from where each step would read it.
        """
        if self._kept and room <= 4 * size:
            self.clear()

    def find(self, given: Rows, blocks: int) -> tuple[KeptPrefix | None, int]:
        """Finds what was kept of such rows, and how many of the first rows are the same."""
        for kept in [it for it in self._kept if len(it.blocks) == blocks]:
            if rows := kept.given.equal(given):
                return kept, rows
        return None, 0

    def begin(self, given: Rows, cache: Any, instead: KeptPrefix | None) -> KeptPrefix:
        """Makes an entry that a pass fills, block by block.

        Args:
            instead: The entry whose blocks the pass takes over; None drops those of earlier runs.
        """
        _listen()
        others = [it for it in self._kept if it is not instead]
        if instead is None:
            others = [it for it in others if it.is_of(cache)]
        made = KeptPrefix(given.copy(), cache)
        self._kept = [*others[1 - MOST :], made]
        return made

    def clear(self) -> None:
        self._kept = []

    def bytes_on(self, device: torch.device) -> int:
        tensors = (block for kept in self._kept for block in list(kept.blocks.values()))
        return sum(it.nbytes for it in tensors if it.device == device)


_stores: WeakKeyDictionary[torch.nn.Module, KeptPrefixes] = remembered(WeakKeyDictionary())


def bytes_on(device: torch.device) -> int:
    """Counts what is kept on a card; ComfyUI's `free_memory` drops it."""
    return sum(store.bytes_on(device) for store in list(_stores.values()))


class _Free(NamedTuple):
    """ComfyUI's function that makes room on a card, of which no hook tells."""

    own: Callable[..., Any]

    def __call__(self, memory_required: float, device: Any, *args: Any, **kwargs: Any) -> Any:
        if bytes_on(device) and management.get_free_memory(device) < memory_required:
            for store in [it for it in list(_stores.values()) if it.bytes_on(device)]:
                store.clear()
        return self.own(memory_required, device, *args, **kwargs)


def _listen() -> None:
    own = management.free_memory
    if not isinstance(own, _Free):
        put(management, free_memory=_Free(own))


class PrefixParts:
    """The rows before the image in one pass: up to the last reference, and the text behind.

    Whether or not the first part is kept, each is computed by itself, so that results do not depend
    on what ran before.

    Args:
        given: Those of this pass.
        kept: Takes keys and values of each block; None where nothing is kept.
        found: What was kept of `same` first rows.
    """

    def __init__(
        self, given: Rows, kept: KeptPrefix | None, found: KeptPrefix | None, same: int
    ) -> None:
        self.rows, turns, _, self.cut, _ = given
        # What ComfyUI hands from block to block: whoever reads it finds no rows of another prompt.
        self.handed = torch.full_like(self.rows, torch.nan)
        self.following = 0  # the block that gets it
        self.turns = turns[:, : self.cut], turns[:, self.cut :]
        self.kept, self.found = kept, found
        self.whole = same == self.rows.shape[1]
        # of each part before the next block; None where its keys and values are kept
        self.first = None if same else self.rows[:, : self.cut]
        self.second = self.rows[:, self.cut :]
        self.runs = False  # whether the executor computes the second part of a block
        self.done = False  # whether nothing of a block is left to compute

    def segments(self, given: Sequence[tuple]) -> list[tuple]:
        """Gives ComfyUI's segments of the first part."""
        return [it for it in given if it[1] <= self.cut]
