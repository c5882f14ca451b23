"""The ways to decode and encode in tiles, and the fewest tiles of each that fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..errors import SettingError, UnavailableError
from ..spec import GIB, MIB, PIXELS_PER_LATENT, VaeShape, format_gib
from .request import RunRequest
from .vae_bytes import (
    Size,
    image_bytes,
    latent_bytes,
    middle_slices,
    outside_middle_bytes,
    through_bytes,
    whole_bytes,
)

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
class TilingRequest:
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


# How an image is decoded or encoded in the memory that is free: whole, in exact tiles, or in
# tiles with a sample of the keys.
#
# Only the attention in the VAE's middle sees all latent pixels. The middle therefore runs on the
# whole, in slices if need be, and tiles with a margin run through the rest: their image is the
# whole's up to rounding. Where the middle's output does not fit beside its keys and values, each
# tile
# runs the middle too. Where not even keys and values fit, tiles read a sample of them. Of the
# bundled
# VAE at 768x768 one key in 4 leaves 59 dB of an image and 47 dB of random latents; tiles that
# attend
# to themselves alone and fade into each other over 384 pixels leave 42 and 37 dB.

__all__ = ["VaePlan", "VaeShape", "plan_decode", "plan_encode"]


@dataclass(frozen=True)
class VaePlan:
    """How a batch is decoded or encoded.

    Attributes:
        how: "whole", in exact "tiled" pieces, or in such with "sampled" keys, which only come
            close to the whole.
        latent: Latent pixels of the whole, (height, width).
        tile: Latent pixels of the largest tile, without the margin that it reads.
        tiles: (rows, columns) of tiles.
        middle: Whether the middle runs "whole", "sliced", or in the tiles ("tiled").
        middle_rows: Latent rows in one slice of the middle; all of them when it is not sliced.
        stride: The attention of tiles reads one key in stride x stride; 1 for all.
        batch: Items that run together.
        peak_bytes: Predicted peak of activations on the card, with input and output.
        reason: One clause for the user.
    """

    direction: Direction
    how: How
    latent: tuple[int, int]
    tile: tuple[int, int]
    tiles: tuple[int, int]
    middle: Place
    middle_rows: int
    stride: int
    batch: int
    peak_bytes: int
    reason: str

    @property
    def exact(self) -> bool:
        """Whether the result is the whole's, up to rounding."""
        return self.how != "sampled"

    @property
    def count(self) -> int:
        """Tiles of one item."""
        return self.tiles[0] * self.tiles[1]

    @property
    def query_rows(self) -> int:
        """Queries, each a latent pixel, that the attention takes at once."""
        return self.middle_rows * self.latent[1]


def plan_decode(
    shape: VaeShape,
    height: int,
    width: int,
    *,
    batch: int = 1,
    itemsize: int = 2,
    budget: int | None,
    tiles: int | None = None,
    image_on_card: bool = True,
) -> VaePlan:
    """Chooses the fewest tiles that fit.

    Args:
        height, width: latent pixels.
        batch: items; those that do not fit together run one after another.
        itemsize: bytes of a number in the VAE's dtype.
        budget: bytes that are free for activations; None where memory is no concern.
        tiles: at least this many tiles; None or 0 leaves it to the plan.
        image_on_card: whether the image is kept on the card, or goes to host memory in tiles.

    Raises:
        SettingError: a size is not positive, or there are to be more tiles than latent pixels.
        UnavailableError: not even the smallest tile fits.
    """
    return _plan("decode", shape, height, width, batch, itemsize, budget, tiles, image_on_card)


def plan_encode(
    shape: VaeShape,
    height: int,
    width: int,
    *,
    batch: int = 1,
    itemsize: int = 2,
    budget: int | None,
    tiles: int | None = None,
    image_on_card: bool = False,
) -> VaePlan:
    """As `plan_decode`; height and width are latent pixels here too, pixels / 8."""
    return _plan("encode", shape, height, width, batch, itemsize, budget, tiles, image_on_card)


def decode_peak_bytes(shape: VaeShape, height: int, width: int, itemsize: int) -> int:
    """What decoding one item whole holds at most; height and width are latent pixels."""
    return _alone("decode", shape, (height, width), itemsize)


def encode_peak_bytes(shape: VaeShape, height: int, width: int, itemsize: int) -> int:
    """What encoding one item whole holds at most; height and width are latent pixels."""
    return _alone("encode", shape, (height, width), itemsize)


def _alone(direction: Direction, shape: VaeShape, latent: Size, itemsize: int) -> int:
    kept = latent_bytes(shape, latent, itemsize)
    return kept + whole_bytes(direction, shape, latent, itemsize)


def _plan(
    direction: Direction,
    shape: VaeShape,
    height: int,
    width: int,
    batch: int,
    itemsize: int,
    budget: int | None,
    tiles: int | None,
    image_on_card: bool,
) -> VaePlan:
    named = {"latent height": height, "latent width": width, "batch": batch, "itemsize": itemsize}
    for name, value in named.items():
        if value < 1:
            raise SettingError(f"{name} must be at least 1, got {value}.")
    least = tiles or 1
    if not 1 <= least <= height * width:
        raise SettingError(
            f"the number of tiles must be from 0, for automatic, to the {height * width} latent "
            f"pixels of the image, got {tiles}."
        )
    latent = (height, width)
    # What is there all the time.
    kept = batch * latent_bytes(shape, latent, itemsize)
    kept += batch * image_bytes(shape, latent, itemsize) if image_on_card else 0
    room = None if budget is None else budget - kept
    wanted = TilingRequest(direction, shape, latent, itemsize, least, room)
    free = format_gib(max(0, budget or 0))
    whole = wanted.whole_bytes()
    together = batch if room is None else min(batch, room // whole)
    if least == 1 and together >= 1:
        choice = Choice("whole", (1, 1), "whole", height, 1, together * whole)
        of = "" if room is None else f" of {free} free"
        reason = f"whole, {format_gib(kept + choice.bytes)}{of}"
    else:
        together, choice = 1, wanted.tiled()
        if not choice:
            raise UnavailableError(
                f"to {direction} {PIXELS_PER_LATENT * width}x{PIXELS_PER_LATENT * height} pixels "
                f"takes at least {-(-(kept + wanted.least_bytes()) // MIB):,} MiB in the smallest "
                f"tiles and {max(0, budget or 0) // MIB:,} MiB is free: choose a smaller size or "
                "batch, or free memory on the card."
            )
        because = "as requested"
        if least == 1:
            because = f"because the whole needs {format_gib(kept + whole)} and {free} is free"
        reason = f"{_in_words(latent, choice)}, {because}"
    return VaePlan(
        direction=direction,
        how=choice.how,
        latent=latent,
        tile=largest_tile(latent, choice.tiles),
        tiles=choice.tiles,
        middle=choice.middle,
        middle_rows=choice.middle_rows,
        stride=choice.stride,
        batch=together,
        peak_bytes=kept + choice.bytes,
        reason=reason,
    )


def _in_words(latent: Size, choice: Choice) -> str:
    height, width = largest_tile(latent, choice.tiles)
    count = choice.tiles[0] * choice.tiles[1]
    kind = "exact" if choice.stride == 1 else "approximate"
    text = f"{count} {kind} tile{'s' * (count > 1)} of {width}x{height} latent pixels"
    if choice.middle == "sliced":
        return f"{text} with the middle in slices of {choice.middle_rows} rows"
    if choice.stride > 1:
        return f"{text} whose attention reads one key in {choice.stride**2}"
    return f"{text} with the middle in each" if choice.middle == "tiled" else text


# How our decoding node takes a request's images through the VAE in what is free on the card.

# Images that it decodes together at most (hosts/comfyui/planned_vae.py).
MOST_TOGETHER = 16
# What it asks ComfyUI to free at first where too little is (hosts/comfyui/vae_room.py).
LEAST_ROOM = int(1.5 * GIB)


def decode_plan(request: RunRequest, free: int | None, others: int = 0) -> VaePlan:
    """How our decoding node decodes the request's images in `free` bytes.

    As the node, it asks the host to move other models off the card only where nothing exact fits
    beside them, and then for the least room that does.

    Args:
        free: bytes for what comes and goes; None for any number.
        others: bytes of other models' weights that could leave the card.

    Raises:
        UnavailableError: it does not fit `free` and `others` together.
    """
    together = 1 if request.tiles == 1 else min(request.batch * request.frames, MOST_TOGETHER)

    def planner(budget: int | None) -> VaePlan:
        return plan_decode(
            request.vae,
            request.height // PIXELS_PER_LATENT,
            request.width // PIXELS_PER_LATENT,
            batch=together,
            budget=None if request.tiles == 1 else budget,
            tiles=request.tiles,
            image_on_card=False,
        )

    if request.tiles != 1:
        return planner(None) if free is None else _least_room(planner, max(0, free), others)
    whole = planner(None)
    most = None if free is None else max(0, free) + others
    if most is not None and whole.peak_bytes > most:
        raise UnavailableError(
            f"to decode {request.width}x{request.height} whole takes "
            f"{format_gib(whole.peak_bytes)} and the card has {format_gib(most)} with all other "
            "models off it: set tiles to 0, for as few as fit, or choose a smaller size."
        )
    return whole


def _least_room(planner: Callable[[int | None], VaePlan], free: int, others: int) -> VaePlan:
    most, room, found = free + others, LEAST_ROOM, _within(planner, free)
    if found and found.exact:
        return found
    while room < most:
        larger = _within(planner, room) if room > free else None
        if larger and larger.exact:
            return larger
        room *= 2
    last = _within(planner, most)
    return last if last and last.exact else found or planner(most)


def _within(planner: Callable[[int | None], VaePlan], budget: int) -> VaePlan | None:
    try:
        return planner(budget)
    except UnavailableError:
        return None
