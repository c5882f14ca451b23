"""The buffers of one shape of a pass, or of a card's share of it, which all its blocks use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...spec.formats import RowFormat
from ...spec.transformer import GELU, SPLIT_SWIGLU, SWIGLU
from ..attention.quantized import Heads
from ..reference import Modulation, QuantizedRows, RowOrder, Tokens, storage_of
from .products import Rows

if TYPE_CHECKING:
    from .workspace import LayerForm, Workspace

SCALES_AT_ONCE = 4  # fp32 in 16 bytes


class Share(NamedTuple):
    """The rows of a pass that one card computes.

    Attributes:
        whole: Tokens of the pass.
        text: Whether the text's rows are among them.
        start, stop: The image tokens of each item that are.
        received: The shares of other cards whose normalized rows come here, so that their keys and
            values are made here; empty where keys and values come.
        cached: Whether the text's keys and values come from a cache, normalized and rotated.
    """

    whole: Tokens
    text: bool
    start: int
    stop: int
    received: tuple[Share, ...] = ()
    cached: bool = False

    @classmethod
    def all(cls, tokens: Tokens, prefix: int = 0) -> Share:
        """That of a card alone.

        Args:
            prefix: Tokens before those of each item whose keys and values are cached; the text is
                among them.
        """
        if not prefix:
            return cls(tokens, True, 0, tokens.image)
        whole = tokens._replace(text=prefix)
        return cls(whole, False, 0, tokens.image, cached=True)

    @property
    def tokens(self) -> Tokens:
        batch, text, _, zero_from = self.whole
        image = self.stop - self.start
        zero_from = min(max(zero_from - self.start, 0), image)
        return Tokens(batch, text if self.text else 0, image, zero_from)

    @property
    def first(self) -> int:
        """Gives the first of its tokens in joint order; they follow one another."""
        return 0 if self.text else self.whole.text + self.start

    @property
    def image(self) -> slice:
        """Gives its image tokens in joint order."""
        return slice(self.whole.text + self.start, self.whole.text + self.stop)


class Shape:
    """The buffers of one share, and the launches between products.

    Attributes:
        share: The rows that are computed; all in a pass on one card.
        tokens: Theirs.
        rows: What the first layers of attention and of the MLP read.
        mixed: What attention's last layers read.
        hidden: What the MLP's first layers write, (rows, columns) each: one matrix, or gate and up,
            of one row stride.
        activated: What the MLP's last layers read.
        branch: (rows, D), what attention or MLP gives.

    Args:
        inner: Columns of `activated`.
        activation: As of `BlockSpec`.
    """

    def __init__(
        self,
        workspace: Workspace,
        share: Share,
        x: torch.Tensor,
        inner: int,
        activation: str = GELU,
    ) -> None:
        # Which has this one: in a circle the buffers would wait for Python's collector.
        self._workspace = weakref.proxy(workspace)
        self.ops, self.share = workspace.ops, share
        tokens = self.tokens = share.tokens
        self.like, self.width, self.inner = x.new_empty(0), x.shape[1], inner
        self.first = 2 * inner if activation == SWIGLU else inner  # rows of the first weight
        # q, k and v are read before the MLP's hidden rows are written.
        heads = (tokens.rows + 2 * share.whole.rows) * self.width
        hidden = inner if activation == GELU else 2 * inner
        widest = -(-max(heads, tokens.rows * hidden) // tokens.rows)
        self.wide = workspace.take("wide", (tokens.rows, widest), self.like).flatten()
        self.branch = workspace.take("branch", (tokens.rows, self.width), self.like)
        # A row of h is written after the same row of the branch has been read.
        self.rows, self.mixed = Rows(self.branch), Rows()
        columns = self.cut_wide(hidden)
        self.hidden = (columns,)
        if activation == SWIGLU:
            self.hidden = columns[:, :inner], columns[:, inner:]
        elif activation == SPLIT_SWIGLU:
            self.hidden = columns.view(2, tokens.rows, inner).unbind()
        self.activated = Rows(self.hidden[0])  # written over what it is made of
        self._norms: dict[tuple, Callable[..., None]] = {}

    def cut_wide(self, columns: int) -> torch.Tensor:
        return self.wide[: self.tokens.rows * columns].view(self.tokens.rows, columns)

    def heads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Cuts q of the share, k and v of all, each (batch, tokens, D), from the widest buffer."""
        sizes = self.tokens, self.share.whole, self.share.whole
        parts = self.wide[: sum(it.rows for it in sizes) * self.width].split(
            [it.rows * self.width for it in sizes]
        )
        q, k, v = (
            part.view(it.batch, it.joint, self.width) for part, it in zip(parts, sizes, strict=True)
        )
        return q, k, v

    def received(self, share: Share, format: RowFormat | None) -> Rows:
        """Makes room for another card's normalized rows, in its stream order."""
        tokens = share.tokens
        name, size = f"received {share.start}", (tokens.rows, self.width)
        if format is None:
            return Rows(self._workspace.take(name, size, self.like))
        rows = Rows()
        rows.quantized[format] = self._quantized(name, size, format, tokens.text_rows)
        return rows

    def quantized(self, rows: Rows, columns: int, format: RowFormat) -> QuantizedRows:
        """Makes room for rows of a format: all in one buffer, as each is read before the next."""
        found = rows.quantized.get(format)
        if found is None:
            tokens = self.tokens
            # Joint order has text first too, where there is one item.
            cut = tokens.text_rows if rows is not self.mixed or tokens.batch == 1 else tokens.rows
            found = self._quantized(str(format), (tokens.rows, columns), format, cut)
            rows.quantized[format] = found
        return found

    def _quantized(
        self, name: str, size: tuple[int, int], format: RowFormat, cut: int
    ) -> QuantizedRows:
        gap = -cut % SCALES_AT_ONCE if cut < size[0] else 0
        values = self._workspace.take(name, size, self._of(storage_of(format)))
        scale = self._workspace.take(f"{name} scale", (size[0] + gap, 1), self._of(torch.float32))
        return QuantizedRows(values, scale, cut)

    def decoded(self, stream: str, n: int, k: int) -> torch.Tensor:
        """(N, K) of int8, where one weight of a stream at a time is decoded: the text's products
        may run beside the image's.
        """
        most = (self.first, self.width)
        whole = self._workspace.take(f"decoded {stream}", most, self._of(torch.int8))
        return whole.flatten()[: n * k].view(n, k)

    def take(self, name: str, columns: int) -> torch.Tensor:
        return self._workspace.take(name, (self.tokens.rows, columns), self.like)

    def norm(
        self,
        x: torch.Tensor,
        gates: Modulation | None,
        norms: Modulation | None,
        eps: float,
        format: RowFormat | None = None,
        plain: bool = False,
    ) -> None:
        """Residual and norm, in one kernel; into `rows`, quantized where there is a format, and
        `plain` as well where that is asked for.
        """
        key = format, plain, gates is not None, norms is not None, eps, (norms or gates).text.dtype
        launch = self._norms.get(key)
        if launch is None:
            out = None
            if norms is not None:
                out = self.branch
                if format is not None:
                    out = self.quantized(self.rows, self.width, format)
            branch = None if gates is None else self.branch
            launch = self._norms[key] = self.ops.residual_norm(
                x,
                branch,
                gates,
                norms,
                self.tokens,
                eps,
                format,
                out,
                self.branch if plain and format is not None else None,
            )
        launch(x, gates, norms)

    def heads_8bit(self, form: str, keys: torch.Tensor) -> Heads:
        queries = self.tokens.joint
        size = sum(Heads.sizes(form, keys.shape, queries))
        memory = self._workspace.take(form, (size,), self._of(torch.uint8))
        return Heads.of(form, keys.shape, memory, queries)

    def _of(self, dtype: torch.dtype) -> torch.Tensor:
        return self.like.new_empty(0, dtype=dtype)


# LoRAs beside the layers: `x @ W.T + (x @ down.T) @ up.T`, the weights untouched. All LoRAs of a
# layer are one pair of matrices, and the layers that read the same rows share the first: one launch
# for both streams multiplies rows by it. The second is in the epilogue of the layer's own product,
# where that is Triton's.

# The places of a block that read the same rows: of the text and of the image.
Readers = tuple[tuple[range, range], ...]
READERS: Readers = (
    (range(3, 6), range(3)),
    *((range(i + 1, i + 2), range(i, i + 1)) for i in (6, 8, 10)),
)
# The same where gate and up are two layers of the image's rows.
SPLIT_READERS: Readers = (*READERS[:2], (range(0), range(8, 10)), READERS[3])


class LowRank(NamedTuple):
    """What all LoRAs of a layer add beside it: `x @ down[start : start + R].T @ up.T`.

    Attributes:
        down: (R or more, K), contiguous: of all layers that read the same rows of one stream.
        start: The layer's first row in it.
        up: (N, R), contiguous.
    """

    down: torch.Tensor
    start: int
    up: torch.Tensor


class LowForm(NamedTuple):
    """What is compiled in of a `LowRank`: the rows of its `down`, its `start`, and its rank."""

    rows: int
    start: int
    rank: int


def downs_of(
    lows: Sequence[LowRank | None], readers: Readers
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

    def __init__(self, shape: Shape, layers: Sequence[LayerForm], readers: Readers) -> None:
        self._shape, self._layers, self._readers = shape, layers, readers
        ranks = [layer.low.rows for layer in layers if layer.low]
        self._buffer = shape.take("low rank", max(ranks)).flatten() if ranks else None
        self._launches: dict[int, Callable[..., None]] = {}

    def of(self, place: int) -> torch.Tensor | None:
        """Gives what the second matrix of a layer reads, (rows, R); None without LoRAs."""
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
