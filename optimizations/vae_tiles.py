"""Runs one tile through layers with a margin that shrinks on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..planning.vae_steps import Interval, Step, intervals

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
