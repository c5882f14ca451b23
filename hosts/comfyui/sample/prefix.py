"""Keeps keys and values of a prompt's text and references on the card, for the next prompt.

In Qwen-Image-2.1 the rows before the image are causal and the same in all steps: those up to the
last reference do not depend on the instruction behind them. ComfyUI computes all of them in the
first step of each prompt: with two references of 1024x1024 that takes 375 ms, and with kept ones
142 to 184 (int8, H200).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import itemgetter
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from comfy import model_management as management

from ....caches import remembered
from ....optimizations.patches import put

ROOM = 256  # room for the text behind the last reference comes in multiples of so many rows
# Of ComfyUI's prefix cache, and of its slots by the block's index.
READ, WRITTEN = ("slots", "_pending", "dtype", "store_device"), ("blocks", "params")
MOST = 2  # prompts whose rows are kept: with CFG, the prompt and the negative prompt


class Rows(NamedTuple):
    """What the first block gets, and what all of them compute with.

    Attributes:
        x: (batch, tokens, D), in joint order.
        rotation: ComfyUI's rotation of each, (1, tokens, ...).
        modulation: As at timestep 0.
        cut: Where the last reference ends.
        settings: What keys and values depend on besides; None where none are kept.
    """

    x: torch.Tensor
    rotation: torch.Tensor
    modulation: tuple[torch.Tensor, ...]
    cut: int
    settings: Hashable

    def count_equal(self, other: Rows) -> int:
        """Counts the first rows that are equal bit for bit: all, up to the last reference, or 0."""
        if (self.cut, self.settings) != (other.cut, other.settings):
            return 0
        mine, others = (
            (it.x[:, : it.cut], it.rotation[:, : it.cut], *it.modulation) for it in (self, other)
        )
        if not all(map(_same, mine, others)):
            return 0
        whole = _same(self.x, other.x) and _same(self.rotation, other.rotation)
        return self.x.shape[1] if whole else self.cut


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return alike and torch.equal(one, other)


def has_known_slot(cache: Any) -> bool:
    """Tells whether ComfyUI's prefix cache has a slot, in the form that is read and written."""
    slot = getattr(cache, "slot", None)
    known = isinstance(slot, dict) and all(isinstance(slot.get(it), dict) for it in WRITTEN)
    return known and all(hasattr(cache, it) for it in READ)


class KeptPrefix:
    """Keys and values of one prompt, by block: (batch, 2, tokens or more, heads, head_dim)."""

    def __init__(self, rows: Rows, cache: Any, blocks: dict[int, torch.Tensor]) -> None:
        self.rows = rows
        self.blocks = blocks
        self.written = 0  # blocks that have been written
        self.read_by(cache)

    def is_of(self, cache: Any) -> bool:
        """Tells whether a run with this cache, which ComfyUI makes anew for each, reads it."""
        return self._cache() is cache

    def read_by(self, cache: Any) -> None:
        self._cache: ReferenceType[Any] = ref(cache)

    def write(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Takes a block's, each (batch, tokens, heads, head_dim)."""
        (batch, rows, *sizes), start = keys.shape, self.rows.cut
        into = self.blocks.get(index)  # with those of the first part
        if into is None or into.shape[2] < rows:
            behind = -(-(rows - start) // ROOM) * ROOM
            into = keys.new_empty(batch, 2, start + behind, *sizes)
            self.blocks[index], start = into, 0
        for part, new in zip(into.unbind(1), (keys, values), strict=True):
            part[:, start:rows] = new[:, start:]
        self.written += 1


class KeptPrefixes:
    """Holds those of one transformer, as long as ComfyUI needs their memory for nothing else.

    They go with the model (ON_DETACH), and where ComfyUI makes room on their card (`_Free`).
    """

    def __init__(self) -> None:
        self._kept: list[KeptPrefix] = []
        self.text: Any = None  # of the prompt that a forward pass looks up, as the encoder gives it

    @staticmethod
    def of(transformer: torch.nn.Module) -> KeptPrefixes:
        return _stores.setdefault(transformer, KeptPrefixes())

    def clear_if_tight(self, free: int, size: int) -> None:
        """Drops all where less than 4 times the `size` of a prompt is free: ComfyUI then keeps
        the prompt's in system RAM, from where each step would read it.
        """
        if self._kept and free <= 4 * size:
            self.clear()

    def find(self, rows: Rows, blocks: int) -> tuple[KeptPrefix | None, int]:
        """Finds what was kept of such rows, and how many of the first rows are the same."""
        whole = [it for it in self._kept if it.written == blocks]
        found = [(it.rows.count_equal(rows), it) for it in whole]
        same, kept = max(found, key=itemgetter(0), default=(0, None))
        return (kept, same) if same else (None, 0)

    def read(self, kept: KeptPrefix, cache: Any) -> KeptPrefix:
        """Has a run with this cache read an entry, which is then the last that was used."""
        kept.read_by(cache)
        self._kept = [*(it for it in self._kept if it is not kept), kept]
        return kept

    def begin(self, rows: Rows, cache: Any, source: KeptPrefix | None) -> KeptPrefix:
        """Makes an entry that a pass fills, block by block.

        Args:
            source: The entry whose first rows are the same, of which it takes over the memory that
                this run does not read; None drops the entries of earlier runs.
        """
        _listen()
        others, blocks = self._kept, {}
        if source is None:
            others = [it for it in others if it.is_of(cache)]
        elif not source.is_of(cache):
            others, blocks = [it for it in others if it is not source], source.blocks
        # ComfyUI gives a part of those of all rows.
        rows = rows._replace(rotation=rows.rotation.clone())
        made = KeptPrefix(rows, cache, blocks)
        self._kept = [*others[1 - MOST :], made]
        return made

    def clear(self) -> None:
        self._kept = []

    def bytes_on(self, device: torch.device) -> int:
        tensors = (block for kept in self._kept for block in list(kept.blocks.values()))
        return sum(it.nbytes for it in tensors if it.device == device)


_stores: WeakKeyDictionary[torch.nn.Module, KeptPrefixes] = remembered(WeakKeyDictionary())


def bytes_on(device: torch.device) -> int:
    """Counts what is kept on a card, which goes where ComfyUI's `free_memory` needs room."""
    return sum(store.bytes_on(device) for store in _all())


def _all() -> list[KeptPrefixes]:
    # Threads of other cards add some: what keyrefs() gives is copied in one go.
    owners = [owner() for owner in _stores.keyrefs()]
    return [_stores[owner] for owner in owners if owner is not None]


class _Free(NamedTuple):
    """Wraps ComfyUI's `free_memory`, of which no hook tells: drops what is kept first."""

    own: Callable[..., Any]

    def __call__(self, memory_required: float, device: Any, *args: Any, **kwargs: Any) -> Any:
        if bytes_on(device) and management.get_free_memory(device) < memory_required:
            for store in [it for it in _all() if it.bytes_on(device)]:
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
        given: What ComfyUI gives the first block.
        rows: Of this pass.
        kept: Takes keys and values of each block, or has those of all rows; None where nothing is
            kept.
        source: Has those up to the last reference; None where the pass computes them.
    """

    def __init__(
        self, given: torch.Tensor, rows: Rows, kept: KeptPrefix | None, source: KeptPrefix | None
    ) -> None:
        self.given = given
        self.x, rotation, _, self.cut, _ = rows
        # What ComfyUI hands from block to block: whoever reads it finds no rows of another prompt.
        self.handed = torch.full_like(self.x, torch.nan)
        self.following = 0  # the block that gets it
        self.first_rotation = rotation[:, : self.cut]
        self.second_rotation = rotation[:, self.cut :]
        self.kept, self.source = kept, source
        # each part before the next block
        self.first, self.second = self.x[:, : self.cut], self.x[:, self.cut :]
        self.runs = False  # whether the executor computes the second part of a block
        self.done = False  # whether nothing of a block is left to compute

    @property
    def whole(self) -> bool:
        """Whether all rows are kept."""
        return self.source is not None and self.kept is self.source
