"""Runs one tile through layers with a margin that shrinks on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from ..planning.vae_bytes import Interval, Step, intervals

Layer = Callable[[torch.Tensor], torch.Tensor]
# Rows and columns.
Tile = tuple[Interval, Interval]


@dataclass(frozen=True)
class Run:
    """Layers, each (B, channels, 1, height, width) to the like, and how far each one reads."""

    steps: tuple[Step, ...]
    layers: tuple[Layer, ...]

    def then(self, other: Run) -> Run:
        """These layers and those of another behind them."""
        return Run(self.steps + other.steps, self.layers + other.layers)

    def tile(
        self,
        source: torch.Tensor,
        tile: Tile,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Computes a tile of what the layers make of the whole `source`.

        It starts with all that its pixels depend on, and loses after each layer what later ones do
        not read. Where it ends with the whole, the layers pad it as they pad the whole.

        Args:
            source: (B, channels, 1, height, width), the whole input.
            tile: of the last layer's output.
            device, dtype: where and in what to compute; the source's by default.

        Returns:
            (B, channels, 1, rows, columns).
        """
        down, across = (
            intervals(self.steps, *span, size)
            for span, size in zip(tile, source.shape[-2:], strict=True)
        )
        x = part(source, (down[0], across[0])).to(device, dtype)
        for index, (step, layer) in enumerate(zip(self.steps, self.layers, strict=True)):
            top, left = step.gives(*down[index])[0], step.gives(*across[index])[0]
            rows = tuple(row - top for row in down[index + 1])
            columns = tuple(column - left for column in across[index + 1])
            x = part(layer(x), (rows, columns))
        return x


def part(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """A view of a tile's rows and columns."""
    rows, columns = tile
    return x[..., slice(*rows), slice(*columns)]


# The VAE's middle in slices: the one place where every latent pixel sees every other.


@dataclass(frozen=True)
class Middle:
    """A residual block, attention, and a residual block of a host.

    Args:
        first, attention, last: the host's own, (B, C, 1, height, width) to the same.
        qkv: the attention's norm and projection, (B, C, 1, height, width) to
            (B, 3 C, 1, height, width).
        project: the attention's last layer, (B, C, 1, height, width) to the same.
    """

    first: Layer
    attention: Layer
    last: Layer
    qkv: Layer
    project: Layer

    def attend(
        self, hidden: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """The attention of some pixels, (1, C, 1, rows, columns), to (1, 1, pixels, C)."""
        query = self._split(hidden)[0].contiguous()
        seen = F.scaled_dot_product_attention(query, keys, values)
        return self.project(seen.transpose(-1, -2).reshape(hidden.shape)) + hidden

    def put(self, hidden: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes the keys and values of some pixels, (1, C, 1, rows, columns)."""
        _, key, value = self._split(hidden)
        keys.copy_(key)
        values.copy_(value)

    def _split(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        together = self.qkv(hidden).flatten(2).transpose(1, 2)
        return together[:, None].chunk(3, dim=-1)


def sliced(middle: Middle, before: Run, after: Run, rows: int) -> tuple[Layer, Layer, Layer]:
    """The attention and what directly precedes and follows it, in slices of so many rows.

    Each layer takes and gives a whole (1, channels, 1, height, width), up to rounding the host's;
    the attention works in place.
    """
    return (
        partial(_in_strips, before, rows),
        partial(_attend_in_strips, middle, rows),
        partial(_in_strips, after, rows),
    )


def _in_strips(run: Run, rows: int, source: torch.Tensor) -> torch.Tensor:
    height, width = source.shape[-2:]
    out = None
    for strip in _strips(height, rows):
        result = run.tile(source, (strip, (0, width)))
        if out is None:
            out = result.new_empty((1, result.shape[1], 1, height, width))
        out[..., slice(*strip), :] = result
        del result
    return out


def _attend_in_strips(middle: Middle, rows: int, hidden: torch.Tensor) -> torch.Tensor:
    height, width = hidden.shape[-2:]
    keys = hidden.new_empty((1, 1, height * width, hidden.shape[1]))
    values = torch.empty_like(keys)
    for low, high in _strips(height, rows):
        pixels = slice(low * width, high * width)
        middle.put(hidden[..., low:high, :], keys[:, :, pixels], values[:, :, pixels])
    # A strip's queries come from its own pixels alone, so that the result takes their place.
    for low, high in _strips(height, rows):
        hidden[..., low:high, :] = middle.attend(hidden[..., low:high, :], keys, values)
    return hidden


def _strips(height: int, rows: int) -> Iterator[Interval]:
    for low in range(0, height, rows):
        yield low, min(low + rows, height)


# Keys and values of the whole, or of a sample of it, gathered tile by tile.
#
# With them a tile runs the complete network by itself. With all keys the result is exact; with one
# in
# so many it comes close, and without seams, because every tile reads the same ones.


def sampled_keys(
    middle: Middle,
    hidden: Callable[[Tile], torch.Tensor],
    tiles: Iterable[Tile],
    latent: tuple[int, int],
    stride: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of every latent pixel, or of one in each square of stride x stride.

    Args:
        hidden: makes a tile of the attention's input, (1, channels, 1, rows, columns).
        tiles: which make up the whole.
        latent: rows and columns of the whole, each at least the stride.

    Returns:
        Keys and values, each (1, 1, pixels, channels).
    """
    start = stride // 2
    rows, columns = (len(range(start, side, stride)) for side in latent)
    both: torch.Tensor | None = None
    for tile in tiles:
        # The first pixel of the sample in the tile.
        top, left = (low + (start - low) % stride for low, _ in tile)
        (low, _), (near, _) = tile
        found = middle.qkv(hidden(tile))[:, :, 0, top - low :: stride, left - near :: stride]
        found = torch.stack(found.chunk(3, dim=1)[1:]).movedim(2, -1)
        if both is None:
            both = found.new_empty((2, 1, rows, columns, found.shape[-1]))
        row, column = top // stride, left // stride
        both[:, :, row : row + found.shape[2], column : column + found.shape[3]] = found
        del found
    keys, values = both.flatten(2, 3).unsqueeze(1)
    return keys, values
