"""LoRAs beside the layers of a block: `x @ W.T + (x @ down.T) @ up.T`, the weights untouched.

All LoRAs of a layer are one pair of matrices, and the layers that read the same rows share the
first: one launch for both streams multiplies rows by it. The second is in the epilogue of the
layer's own product, where that is Triton's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..reference import LowRank, RowOrder
from .products import Rows

if TYPE_CHECKING:
    from .shape import Shape
    from .workspace import LayerForm

# The places of a block that read the same rows: of the text and of the image.
Readers = tuple[tuple[range, range], ...]
READERS: Readers = (
    (range(3, 6), range(3)),
    *((range(i + 1, i + 2), range(i, i + 1)) for i in (6, 8, 10)),
)
# The same where gate and up are two layers of the image's rows.
SPLIT_READERS: Readers = (*READERS[:2], (range(0), range(8, 10)), READERS[3])


class LowForm(NamedTuple):
    """What is compiled in of a `LowRank`: the rows of its `down`, its `start`, and its rank."""

    rows: int
    start: int
    rank: int

    @classmethod
    def of(cls, low: LowRank | None) -> LowForm | None:
        """None of none."""
        return None if low is None else cls(len(low.down), low.start, low.up.shape[1])


def downs_of(
    lows: Sequence[LowRank | None], readers: Readers = READERS
) -> tuple[tuple[torch.Tensor | None, ...], ...]:
    """The first matrices of text and image for each of the readers.

    Args:
        lows: Of the layers, by place.
    """

    def found(places: range) -> Iterator[torch.Tensor]:
        return (lows[place].down for place in places if lows[place] is not None)

    return tuple(tuple(next(found(places), None) for places in pair) for pair in readers)


class LowRows:
    """What LoRAs make of the rows that the layers of one form read in one shape.

    All share a buffer, as each is read before the next is written.

    Args:
        shape: Its buffers.
        layers: By place.
        readers: `READERS`, or those of another block.
    """

    def __init__(
        self, shape: Shape, layers: Sequence[LayerForm], readers: Readers = READERS
    ) -> None:
        self._shape, self._layers, self._readers = shape, layers, readers
        ranks = [layer.low.rows for layer in layers if layer.low]
        self._buffer = shape.take("low rank", max(ranks)).flatten() if ranks else None
        self._launches: dict[int, Callable[..., None]] = {}

    def of(self, place: int) -> torch.Tensor | None:
        """(rows, R), what the second matrix of a layer reads; None without LoRAs."""
        low = self._layers[place].low
        if low is None:
            return None
        (reader,) = (i for i, pair in enumerate(self._readers) if any(place in it for it in pair))
        return self._out(reader)[:, low.start : low.start + low.rank]

    def compute(
        self, reader: int, rows: Rows, downs: tuple[torch.Tensor | None, torch.Tensor | None]
    ) -> None:
        """Multiplies the rows that one of the readers reads.

        Args:
            downs: Of `downs_of`.
        """
        launch = self._launches.get(reader)
        if launch is None:
            shape, tokens = self._shape, self._shape.tokens
            order = RowOrder(1, tokens.text_rows, tokens.rows - tokens.text_rows)
            if rows is shape.mixed:
                order = RowOrder(tokens.batch, tokens.text, tokens.image)
            out = self._out(reader)
            launch = shape.ops.low_rank_rows(rows.matrix, *downs, order, out)
            self._launches[reader] = launch
        launch(rows.matrix, *downs)

    def _out(self, reader: int) -> torch.Tensor:
        places = (place for pair in self._readers[reader] for place in pair)
        found = max(self._layers[place].low.rows for place in places if self._layers[place].low)
        rows = self._shape.tokens.rows
        return self._buffer[: rows * found].view(rows, found)
