"""How an image is decoded or encoded in the memory that is free: whole, in exact tiles, or in
tiles with a sample of the keys.

Only the attention in the VAE's middle sees all latent pixels. The middle therefore runs on the
whole, in slices if need be, and tiles with a margin run through the rest: their image is the
whole's up to rounding. Where the middle's output does not fit beside its keys and values, each tile
runs the middle too. Where not even keys and values fit, tiles read a sample of them. Of the bundled
VAE at 768x768 one key in 4 leaves 59 dB of an image and 47 dB of random latents; tiles that attend
to themselves alone and fade into each other over 384 pixels leave 42 and 37 dB.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SettingError, UnavailableError
from .memory import MIB, format_gib
from .vae_bytes import Size, image_bytes, latent_bytes, whole_bytes
from .vae_choice import Choice, Direction, How, Place, Request, largest_tile
from .vae_steps import PIXELS_PER_LATENT, VaeShape

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
    request = Request(direction, shape, latent, itemsize, least, room)
    free = format_gib(max(0, budget or 0))
    whole = request.whole_bytes()
    together = batch if room is None else min(batch, room // whole)
    if least == 1 and together >= 1:
        choice = Choice("whole", (1, 1), "whole", height, 1, together * whole)
        of = "" if room is None else f" of {free} free"
        reason = f"whole, {format_gib(kept + choice.bytes)}{of}"
    else:
        together, choice = 1, request.tiled()
        if not choice:
            raise UnavailableError(
                f"to {direction} {PIXELS_PER_LATENT * width}x{PIXELS_PER_LATENT * height} pixels "
                f"takes at least {-(-(kept + request.least_bytes()) // MIB):,} MiB in the smallest "
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
