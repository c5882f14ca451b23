"""The modulation of every block as a table on the card, one entry for each timestep that was seen.

Two linears of each block see the timestep embedding and nothing else, and hold a third of the
model's parameters: 13.6 GB in bf16, which every forward pass reads for a matrix of one or two rows.
Their outputs for a timestep, 4.42 MB, are the same in every forward pass of the run.

The entries are what the host's own modules give for the host's own rows, bit for bit. Their key is
the embedding itself, all of its bits: whatever a sampler, an additional condition or another
person's patch does to the timestep is in there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .streams import Modulation

# What the entries of one table may take; the oldest leave. 120 timesteps of the full-size model, or
# 60 of a batch of two.
MOST_BYTES = 512 * 2**20


class Entry(NamedTuple):
    """What the modulation linears give for one timestep embedding.

    Attributes:
        image: (blocks, R, 6 D), for R rows of the embedding.
        text: (blocks, batch, 6 D).
    """

    image: torch.Tensor
    text: torch.Tensor

    def of(self, block: int) -> tuple[Modulation, Modulation]:
        """The halves of one block: attention's and the MLP's."""
        half = self.image.shape[-1] // 2
        image, text = self.image[block], self.text[block]
        return (
            Modulation(text[:, :half], image[:, :half]),
            Modulation(text[:, half:], image[:, half:]),
        )

    @property
    def bytes(self) -> int:
        return self.image.nbytes + self.text.nbytes


class ModulationTable:
    """Entries of one set of weights, filled as timesteps come.

    Args:
        blocks: The host's blocks, with `img_mod` and `txt_mod`. The table has to be dropped when
            their weights change.
        most_bytes: What the entries may take.
    """

    def __init__(self, blocks: Sequence[torch.nn.Module], most_bytes: int = MOST_BYTES) -> None:
        self._blocks = blocks
        self._most_bytes = most_bytes
        self._entries: dict[tuple, Entry] = {}
        self.hits = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """What the entries take on the card."""
        return sum(entry.bytes for entry in self._entries.values())

    def entry(self, embedding: torch.Tensor, batch: int) -> Entry:
        """The entry of a timestep embedding; computed when it is not there.

        Reading the key waits for the card once, which costs some microseconds of a forward pass.

        Args:
            embedding: (batch, D), or (2 batch, D) where the second half is for timestep 0: the
                image stream is modulated by all rows and the text stream by the first half.
            batch: Items of the batch.
        """
        key = self._key(embedding, batch)
        found = self._entries.get(key)
        if found is None:
            found = compute_entry(self._blocks, embedding, batch)
            self._add(key, found)
        else:
            self.hits += 1
        return found

    def fill(self, embeddings: Sequence[torch.Tensor], batch: int) -> None:
        """Adds the entries of a schedule in one pass over the weights.

        All rows go through a linear at once where that gives the same bits as one embedding at a
        time, which the first block shows; else each embedding goes alone.

        Args:
            embeddings: As `entry` takes them, all of one shape.
            batch: Items of the batch.
        """
        keys = {self._key(embedding, batch): embedding for embedding in embeddings}
        new = {key: embedding for key, embedding in keys.items() if key not in self._entries}
        if not new:
            return
        rows = len(embeddings[0])
        size = _entry_bytes(self._blocks, embeddings[0], batch)
        if size * len(new) > self._most_bytes:  # a long schedule: as its timesteps come
            return
        entries = [_empty_entry(self._blocks, embedding, batch) for embedding in new.values()]
        together = torch.cat(list(new.values()))
        texts = torch.cat([embedding[:batch] for embedding in new.values()])
        exact = None
        first = _form(self._blocks[0])
        for index, block in enumerate(self._blocks):
            if exact and _form(block) == first:
                images = block.img_mod(together).split(rows)
                batches = block.txt_mod(texts).split(batch)
                for entry, image, text in zip(entries, images, batches, strict=True):
                    entry.image[index].copy_(image)
                    entry.text[index].copy_(text)
                continue
            for embedding, entry in zip(new.values(), entries, strict=True):
                _fill_block(block, index, embedding, batch, entry)
            if exact is None:
                alone = torch.cat([entry.image[0] for entry in entries])
                alone_text = torch.cat([entry.text[0] for entry in entries])
                exact = torch.equal(block.img_mod(together), alone) and torch.equal(
                    block.txt_mod(texts), alone_text
                )
        for key, entry in zip(new, entries, strict=True):
            self._add(key, entry)

    def _key(self, embedding: torch.Tensor, batch: int) -> tuple:
        bits = embedding.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return batch, tuple(embedding.shape), embedding.dtype, bits

    def _add(self, key: tuple, entry: Entry) -> None:
        self._entries[key] = entry
        while len(self._entries) > 1 and self.bytes > self._most_bytes:
            del self._entries[next(iter(self._entries))]


def compute_entry(blocks: Sequence[torch.nn.Module], embedding: torch.Tensor, batch: int) -> Entry:
    """What the modules of some blocks give; arguments as of `ModulationTable.entry`."""
    entry = _empty_entry(blocks, embedding, batch)
    for index, block in enumerate(blocks):
        _fill_block(block, index, embedding, batch, entry)
    return entry


def _form(block: torch.nn.Module) -> list[tuple]:
    """How the modulation layers are held: what one block shows holds for those held alike."""
    modules = (*block.img_mod.modules(), *block.txt_mod.modules())
    return [
        (type(module), getattr(module, "layout_type", None), weight.dtype)
        for module in modules
        for weight in module.parameters(recurse=False)
    ]


def _fill_block(
    block: torch.nn.Module, index: int, embedding: torch.Tensor, batch: int, entry: Entry
) -> None:
    entry.image[index].copy_(block.img_mod(embedding))
    # As the hosts do: a half of the rows is a tensor of its own only where there are two.
    entry.text[index].copy_(block.txt_mod(embedding[:batch]))


def _empty_entry(blocks: Sequence[torch.nn.Module], embedding: torch.Tensor, batch: int) -> Entry:
    rows, dim = embedding.shape
    return Entry(
        embedding.new_empty((len(blocks), rows, 6 * dim)),
        embedding.new_empty((len(blocks), batch, 6 * dim)),
    )


def _entry_bytes(blocks: Sequence[torch.nn.Module], embedding: torch.Tensor, batch: int) -> int:
    rows, dim = embedding.shape
    return len(blocks) * (rows + batch) * 6 * dim * embedding.element_size()
