"""The ways to decode and encode in tiles, and the fewest tiles of each that fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .vae_bytes import Size, middle_slices, outside_middle_bytes, through_bytes, whole_bytes
from .vae_steps import VaeShape

Direction = Literal["decode", "encode"]
How = Literal["whole", "tiled", "sampled"]
Place = Literal["whole", "sliced", "tiled"]

# Latent pixels. Narrower tiles would compute still more margin than image.
LEAST_TILE = 8
# Sides of the squares of latent pixels of which tiles with the middle in them read one key; of 1
# they read all.
STRIDES = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class Choice:
    """A way that fits; names as in `VaePlan`.

    Attributes:
        bytes: What comes and goes, beside latents and image.
    """

    how: How
    tiles: Size
    middle: Place
    middle_rows: int
    stride: int
    bytes: int


@dataclass(frozen=True)
class Request:
    """What is to be decoded or encoded, in how many tiles at least, in how many bytes at most."""

    direction: Direction
    shape: VaeShape
    latent: Size
    itemsize: int
    least: int
    room: int | None

    def whole_bytes(self) -> int:
        """What one item takes whole."""
        return whole_bytes(self.direction, self.shape, self.latent, self.itemsize)

    def tiled(self) -> Choice | None:
        """The fewest tiles that fit: exact ones while there are any, then with sampled keys."""
        return self._beside_the_middle() or next(
            filter(None, map(self._with_the_middle, self._strides())), None
        )

    def least_bytes(self) -> int:
        """What the smallest tiles with the thinnest sample take."""
        sizes = (self.direction, self.shape, self.latent, self.itemsize)
        smallest = largest_tile(self.latent, self._most())
        _, middle = middle_slices(*sizes, 0)
        return min(
            max(middle, outside_middle_bytes(*sizes, smallest)),
            *(through_bytes(*sizes, smallest, stride) for stride in self._strides()),
        )

    def _beside_the_middle(self) -> Choice | None:
        sizes = (self.direction, self.shape, self.latent, self.itemsize)
        rows, middle = middle_slices(*sizes, self.room)

        def peak(grid: Size) -> int:
            return max(middle, outside_middle_bytes(*sizes, largest_tile(self.latent, grid)))

        grid = self._fewest(peak)
        if not grid:
            return None
        place = "sliced" if rows < self.latent[0] else "whole"
        return Choice("tiled", grid, place, rows, 1, peak(grid))

    def _with_the_middle(self, stride: int) -> Choice | None:
        sizes = (self.direction, self.shape, self.latent, self.itemsize)

        def peak(grid: Size) -> int:
            return through_bytes(*sizes, largest_tile(self.latent, grid), stride)

        grid = self._fewest(peak)
        if not grid:
            return None
        how = "tiled" if stride == 1 else "sampled"
        return Choice(how, grid, "tiled", self.latent[0], stride, peak(grid))

    def _strides(self) -> list[int]:
        return [stride for stride in STRIDES if stride <= min(self.latent)]

    def _most(self) -> Size:
        """The most rows and columns of tiles."""
        height, width = self.latent
        rows, columns = max(1, height // LEAST_TILE), max(1, width // LEAST_TILE)
        return (rows, columns) if self.least <= rows * columns else self.latent

    def _fewest(self, peak: Callable[[Size], int]) -> Size | None:
        """The rows and columns of the fewest tiles that fit; of equally many, the squarest."""
        most_rows, most_columns = self._most()

        def fits(rows: int, columns: int) -> bool:
            return self.room is None or peak((rows, columns)) <= self.room

        best: tuple[int, int, Size] | None = None
        columns = most_columns
        # More rows never need more columns, so that one walk down the columns is enough.
        for rows in range(1, most_rows + 1):
            if best and rows > best[0]:
                break
            if not fits(rows, columns):
                continue
            while columns > 1 and fits(rows, columns - 1):
                columns -= 1
            enough = max(columns, -(-self.least // rows))
            if enough <= most_columns:
                seams = (rows - 1) * self.latent[1] + (enough - 1) * self.latent[0]
                found = (rows * enough, seams, (rows, enough))
                best = min(best, found) if best else found
        return best and best[2]


def largest_tile(latent: Size, grid: Size) -> Size:
    """Latent pixels of the largest tile of a grid."""
    return -(-latent[0] // grid[0]), -(-latent[1] // grid[1])
