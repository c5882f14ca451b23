"""Plans how an image goes through the VAE in the memory that is free: whole, or in the fewest
tiles. The attention in its middle sees all latent pixels and runs on the whole, in slices if need
be; tiles with a margin run through the other layers, and make the whole's image up to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..caches import remembered
from ..errors import DoesNotFitError, SettingError
from ..spec.formats import GIB, MIB, format_gib
from ..spec.vae import VaeShape
from .request import RunRequest
from .vae_work import (
    Direction,
    Size,
    image_bytes,
    latent_bytes,
    middle_slices,
    outside_middle_bytes,
    whole_bytes,
)

# A plan for a budget in bytes; None for any number.
Planner = Callable[[int | None], "VaePlan"]

# Latent pixels. Narrower tiles would compute still more margin than image.
LEAST_TILE = 8
# Images that our decoding node decodes together: a bound on what a large batch of small ones asks
# for at once.
MOST_TOGETHER = 16
# What ComfyUI is asked to free at first where too little is: a megapixel whole in bf16, tiles of
# more.
LEAST_ROOM = int(1.5 * GIB)


@dataclass(frozen=True)
class VaePlan:
    direction: Direction
    latent: Size  # latent pixels of the whole, (height, width)
    tiles: Size  # (rows, columns) of tiles
    middle_rows: int  # latent rows in one slice of the middle; all of them when it is not sliced
    batch: int
    peak_bytes: int  # predicted peak of activations on the card, with input and output
    reason: str
    fits: bool = True  # else it has the smallest tiles, and `reason` is what stops it

    @property
    def whole(self) -> bool:
        return self.tiles == (1, 1) and not self.sliced

    @property
    def sliced(self) -> bool:
        return self.middle_rows < self.latent[0]

    @property
    def tile(self) -> Size:
        """Measures the largest tile in latent pixels, without the margin that it reads."""
        return largest_tile(self.latent, self.tiles)

    @property
    def count(self) -> int:
        return self.tiles[0] * self.tiles[1]


def largest_tile(latent: Size, grid: Size) -> Size:
    return -(-latent[0] // grid[0]), -(-latent[1] // grid[1])


@remembered
@functools.lru_cache(maxsize=64)
def plan_vae(
    direction: Direction,
    shape: VaeShape,
    height: int,
    width: int,
    *,
    image_on_card: bool,
    batch: int = 1,
    itemsize: int = 2,
    budget: int | None,
    tiles: int | None = None,
) -> VaePlan:
    """Chooses the fewest tiles that fit the `budget` of bytes, None for any, but no less than
    `tiles`. Sizes are in latent pixels; items that do not fit together run one after another;
    `itemsize` is a number's bytes. Raises SettingError.
    """
    latent = height, width
    named = {"latent height": height, "latent width": width, "batch": batch, "itemsize": itemsize}
    for name, value in named.items():
        if value < 1:
            raise SettingError(f"{name} must be at least 1, got {value}.")
    own = shape.strips.least_tiles if shape.fused and shape.strips else 1
    least = tiles or min(own, height * width)
    if not 1 <= least <= height * width:
        raise SettingError(
            f"the number of tiles must be 0 (automatic) or at most the {height * width} latent "
            f"pixels of the image, got {tiles}."
        )
    # What is there all the time.
    kept = batch * latent_bytes(shape, latent, itemsize)
    kept += batch * image_bytes(shape, latent, itemsize) if image_on_card else 0
    room = None if budget is None else budget - kept
    free = format_gib(max(0, budget or 0))
    sizes = (direction, shape, latent, itemsize)
    whole = whole_bytes(*sizes)
    together = batch if room is None else min(batch, room // whole)
    if least == 1 and together >= 1:
        peak = kept + together * whole
        reason = f"whole, {format_gib(peak)}" + ("" if room is None else f" of {free} free")
        return VaePlan(direction, latent, (1, 1), height, together, peak, reason)

    rows, middle = middle_slices(*sizes, room)

    def bytes_of(grid: Size) -> int:
        return max(middle, outside_middle_bytes(*sizes, largest_tile(latent, grid)))

    most = _most_tiles(latent, least)
    grid = _fewest(latent, least, most, lambda grid: room is None or bytes_of(grid) <= room)
    if grid is None:
        # One row is the least that the middle takes.
        lacking = -(-(kept + bytes_of(most)) // MIB)
        text = (
            f"too little memory to {direction} "
            f"{shape.pixels * width}x{shape.pixels * height} pixels: the smallest tiles "
            f"need {lacking:,} MiB and {max(0, budget or 0) // MIB:,} MiB is free, so choose a "
            "smaller size or batch, or free memory on the GPU."
        )
        return VaePlan(direction, latent, most, rows, 1, kept + bytes_of(most), text, fits=False)
    tall, wide = largest_tile(latent, grid)
    count = grid[0] * grid[1]
    text = f"{count} exact tile{'s' * (count > 1)} of {wide}x{tall} latent pixels"
    if rows < height:
        text += f" with the middle in slices of {rows} rows"
    because = "as requested" if tiles else "for less memory"
    if least == 1 or (not tiles and room is not None and whole > room):
        because = f"because the whole needs {format_gib(kept + whole)} and {free} is free"
    return VaePlan(direction, latent, grid, rows, 1, kept + bytes_of(grid), f"{text}, {because}")


plan_decode = functools.partial(plan_vae, "decode", image_on_card=True)
plan_encode = functools.partial(plan_vae, "encode", image_on_card=False)


def checked(plan: VaePlan) -> VaePlan:
    """Raises DoesNotFitError where a plan does not keep to its budget."""
    if not plan.fits:
        raise DoesNotFitError(plan.reason)
    return plan


def _most_tiles(latent: Size, least: int) -> Size:
    height, width = latent
    rows, columns = max(1, height // LEAST_TILE), max(1, width // LEAST_TILE)
    return (rows, columns) if least <= rows * columns else latent


def _fewest(latent: Size, least: int, most: Size, fits: Callable[[Size], bool]) -> Size | None:
    # Of equally many tiles, the squarest.
    best: tuple[int, int, Size] | None = None
    columns = most[1]
    # More rows never need more columns, so that one walk down the columns is enough.
    for rows in range(1, most[0] + 1):
        if best and rows > best[0]:
            break
        if not fits((rows, columns)):
            continue
        while columns > 1 and fits((rows, columns - 1)):
            columns -= 1
        enough = max(columns, -(-least // rows))
        if enough <= most[1]:
            seams = (rows - 1) * latent[1] + (enough - 1) * latent[0]
            found = (rows * enough, seams, (rows, enough))
            best = min(best, found) if best else found
    return best and best[2]


def decode_plan(request: RunRequest, free: int | None, others: int = 0) -> VaePlan:
    """Plans how our node decodes the request's images in `free` bytes, None for any number, from
    which `others` could leave. Raises UnavailableError where both do not do.
    """
    vae = replace(request.vae, fused=True)
    together = 1 if request.tiles == 1 else min(request.batch * request.frames, MOST_TOGETHER)

    def planner(budget: int | None) -> VaePlan:
        return plan_decode(
            vae,
            request.height // vae.pixels,
            request.width // vae.pixels,
            batch=together,
            budget=None if request.tiles == 1 else budget,
            tiles=request.tiles,
            image_on_card=False,
        )

    if request.tiles != 1:
        return planner(None) if free is None else plan_in_room(planner, max(0, free), others)
    whole = planner(None)
    remedy = "set tiles to 0 (as few as fit), or choose a smaller size"
    most = None if free is None else max(0, free) + others
    if most is not None and whole.peak_bytes > most:
        raise DoesNotFitError(
            f"to decode {request.width}x{request.height} whole takes "
            f"{format_gib(whole.peak_bytes)} and the GPU has {format_gib(most)} with all other "
            f"models off it: {remedy}."
        )
    return whole


def plan_in_room(planner: Planner, free: int, others: int) -> VaePlan:
    """Plans within `free` bytes, else within the least room with `others`, for which the host moves
    other models off the card. Raises UnavailableError where that does not do.
    """
    most, room, found = free + others, LEAST_ROOM, planner(free)
    while not found.fits and room < most:
        found = planner(room) if room > free else found
        room *= 2
    return found if found.fits else checked(planner(most))
