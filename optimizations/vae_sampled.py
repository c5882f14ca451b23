"""Keys and values of the whole, or of a sample of it, gathered tile by tile.

With them a tile runs the complete network by itself. With all keys the result is exact; with one in
so many it comes close, and without seams, because every tile reads the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from .vae_middle import Middle
from .vae_tiles import Tile


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
