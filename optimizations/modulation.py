"""Keeps the modulation of all blocks in a table on the card, one entry for each timestep.

Two linears of each block see the timestep embedding alone, and hold a third of the model's
parameters: 13.6 GB in bf16. Their outputs for a timestep, 4.42 MB, are the same in every forward
pass. An entry is what the host's modules give, bit for bit, under all bits of the embedding:
whatever a sampler, an additional condition or another person's patch does to it is in there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from ..families.registry import modulation_of
from ..spec.formats import format_gib
from ..spec.sizes import MOST_TABLE_BYTES
from ..verdict import Verdict
from .reference import Modulation


class ModulationLayer(NamedTuple):
    block: int
    stream: str  # "image" or "text"
    module: Any


def modulation_layers(blocks: Sequence[torch.nn.Module]) -> Iterator[ModulationLayer]:
    for index, block in enumerate(blocks):
        for stream, name in modulation_of(block).items():
            yield ModulationLayer(index, stream, getattr(block, name))


class Halves(NamedTuple):
    attention: Modulation
    mlp: Modulation


@dataclass(frozen=True, eq=False)
class Entry:
    """What the modulation linears give for one timestep embedding."""

    image: torch.Tensor  # (blocks, R, 6 D), for R rows of the embedding
    text: torch.Tensor  # (blocks, batch, 6 D)

    def of(self, block: int) -> Halves:
        return self._halves[block]

    @cached_property
    def _halves(self) -> list[Halves]:
        # Of all blocks at once: cut out one by one they take 8 us of the CPU a block.
        text, image = (
            [half.unbind() for half in rows.chunk(2, -1)] for rows in (self.text, self.image)
        )
        halves = (map(Modulation, *streams) for streams in zip(text, image, strict=True))
        return list(map(Halves, *halves))

    @property
    def bytes(self) -> int:
        return self.image.nbytes + self.text.nbytes


def shared_entry(
    scales: Sequence[torch.Tensor], gates: Sequence[torch.Tensor], blocks: int, batch: int
) -> Entry:
    """Makes the modulation of Qwen-Image-2.1, which all blocks share, without shifts.

    Args:
        scales, gates: Of attention and of the MLP, each (1 or batch, D), or (2 batch, D) where the
            second half is for timestep 0.
    """
    parts = [
        part
        for scale, gate in zip(scales, gates, strict=True)
        for part in (torch.zeros_like(scale), scale, gate)
    ]
    rows = torch.cat(parts, -1)
    rows = rows.expand(max(batch, len(rows)), -1).expand(blocks, -1, -1)
    return Entry(rows, rows[:, :batch])


@dataclass
class TableFigures:
    # timesteps, bytes: of the table, when it was last read
    timesteps: int = 0
    bytes: int = 0
    read: int = 0  # entries that were there
    filled: int = 0  # entries that were computed
    direct: int = 0  # forward passes that computed the modulation without a table
    fallback: Verdict | None = None  # why they did

    def add(self, table: ModulationTable, before: tuple[int, int]) -> None:
        """Counts what was asked of a table since its (hits, filled) were these."""
        self.read += table.hits - before[0]
        self.filled += table.filled - before[1]
        self.timesteps, self.bytes = len(table), table.bytes

    def lines(self) -> list[str]:
        lines = []
        if self.direct:
            lines.append(
                f"modulation: computed without a table in {self.direct} forward passes, because "
                f"{self.fallback}"
            )
        if self.read or self.filled:
            lines.append(
                f"modulation: {self.timesteps} timesteps in a table of {format_gib(self.bytes)}, "
                f"used {self.read} times, {self.filled} computed in this run"
            )
        return lines


class ModulationTable:
    """Entries of one model, filled as timesteps come."""

    def __init__(
        self,
        blocks: Sequence[torch.nn.Module],
        most_bytes: int = MOST_TABLE_BYTES,
        compute: Callable[[Sequence[torch.Tensor], int], list[Entry]] | None = None,
    ) -> None:
        self._count = len(blocks)
        self._compute = compute or partial(compute_entries, blocks)
        self._most_bytes = most_bytes
        self._entries: dict[tuple, Entry] = {}
        self.bytes = 0  # of the entries, on the card
        # hits, filled, passes: entries that were there, entries that were computed, and walks
        # through the layers for them
        self.hits = self.filled = self.passes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def entry(
        self,
        embedding: torch.Tensor,
        batch: int,
        state: Hashable = None,
        schedule: Callable[[], Sequence[torch.Tensor]] = tuple,
    ) -> Entry:
        """Returns the entry of a timestep embedding, and computes it when it is not there.

        Reading the key waits for the card once, which costs some microseconds of a forward pass.

        Args:
            embedding: (batch, D), or (2 batch, D) where the second half is for timestep 0: the
                image stream is modulated by all rows and the text stream by the first half.
            state: What the weights are; entries are found again under the same state only, and
                dropped once an object that it references weakly is gone.
            schedule: Asked where the entry is not there: the embeddings of the run's schedule, in
                order. Where this one is among them, all are computed while each layer is in memory.
        """
        (key,) = _keys(embedding.unsqueeze(0), batch, state)
        found = self._entries.get(key)
        if found is not None:
            self.hits += 1
            return found
        embeddings = schedule()
        keys = _keys(torch.stack(list(embeddings)), batch, state) if embeddings else []
        wanted = {key: embedding}
        if key in keys:
            # What comes next first: there may not be room for all.
            place = keys.index(key)
            pairs = list(zip(keys, embeddings, strict=True))
            wanted |= dict(pairs[place:] + pairs[:place])
        wanted = {key: embedding for key, embedding in wanted.items() if key not in self._entries}
        self._fill(wanted, batch)
        return self._entries[key]

    def drop(self) -> None:
        self._entries.clear()
        self.bytes = 0

    def _fill(self, new: dict[tuple, torch.Tensor], batch: int) -> None:
        size = _entry_bytes(self._count, next(iter(new.values())), batch)
        room = max(1, self._most_bytes // size)
        new = dict(list(new.items())[:room])
        # Each load of a LoRA is another state, so a server that goes on would fill the room.
        for key in [key for key in self._entries if _is_gone(key[0])]:
            self.bytes -= self._entries.pop(key).bytes
        # The oldest leave before there are more: both together might not fit the card.
        while self._entries and self.bytes + size * len(new) > self._most_bytes:
            self.bytes -= self._entries.pop(next(iter(self._entries))).bytes
        entries = self._compute(list(new.values()), batch)
        self._entries.update(zip(new, entries, strict=True))
        self.bytes += sum(entry.bytes for entry in entries)
        self.filled += len(new)
        self.passes += 1


def compute_entries(
    blocks: Sequence[torch.nn.Module],
    embeddings: Sequence[torch.Tensor],
    batch: int,
    layers: Iterator[ModulationLayer] | None = None,
) -> list[Entry]:
    """Computes what the modules give for several embeddings of one shape, one by one:
    a GEMM of more rows may add up in another order, for any weight, device and torch.

    Args:
        layers: The modulation layers of the blocks, in order; a host whose weights are elsewhere
            brings each to the embeddings once, while it is had from this iterator.
    """
    entries = [_empty_entry(blocks, embedding, batch) for embedding in embeddings]
    # As the hosts do: a half of the rows is a tensor of its own only where there are two.
    rows = {"image": list(embeddings), "text": [embedding[:batch] for embedding in embeddings]}
    walked: Any = layers or modulation_layers(blocks)
    with closing(walked):
        for index, stream, module in walked:
            for entry, part in zip(entries, rows[stream], strict=True):
                getattr(entry, stream)[index].copy_(module(part))
    return entries


def compute_entry(blocks: Sequence[torch.nn.Module], embedding: torch.Tensor, batch: int) -> Entry:
    """Computes what the modules of some blocks give; arguments as of `ModulationTable.entry`."""
    return compute_entries(blocks, [embedding], batch)[0]


def _is_gone(state: Hashable) -> bool:
    if isinstance(state, tuple):
        return any(map(_is_gone, state))
    return isinstance(state, weakref.ref) and state() is None


def _keys(embeddings: torch.Tensor, batch: int, state: Hashable) -> list[tuple[Hashable, ...]]:
    """Makes one key for each of (n, R, D) embeddings; waits for the card once."""
    bits = embeddings.detach().cpu().contiguous().view(torch.uint8).numpy()
    form = state, batch, embeddings.device, embeddings.shape[1:], embeddings.dtype
    return [(*form, row.tobytes()) for row in bits]


def _empty_entry(blocks: Sequence[torch.nn.Module], embedding: torch.Tensor, batch: int) -> Entry:
    rows, dim = embedding.shape
    return Entry(
        embedding.new_empty((len(blocks), rows, 6 * dim)),
        embedding.new_empty((len(blocks), batch, 6 * dim)),
    )


def _entry_bytes(blocks: int, embedding: torch.Tensor, batch: int) -> int:
    rows, dim = embedding.shape
    return blocks * (rows + batch) * 6 * dim * embedding.element_size()
