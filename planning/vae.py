"""How an image goes through the VAE in the memory that is free: whole, or in the fewest tiles.

Only the attention in the VAE's middle sees all latent pixels. The middle therefore runs on the
whole, in slices if need be, and tiles with a margin run through the rest: their image is the
whole's up to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..caches import remembered
from ..errors import DoesNotFitError, SettingError, UnavailableError
from ..spec.formats import GIB, MIB, format_gib
from ..spec.vae import (
    SCORES_TOGETHER,
    STRIP,
    VaeLayer,
    VaeShape,
    after_middle,
    before_middle,
    down_steps,
    intervals,
    up_steps,
)
from .request import RunRequest

Size = tuple[int, int]
Direction = Literal["decode", "encode"]
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
    """How a batch is decoded or encoded.

    Attributes:
        latent: Latent pixels of the whole, (height, width).
        tiles: (rows, columns) of tiles.
        middle_rows: Latent rows in one slice of the middle; all of them when it is not sliced.
        batch: Items that run together.
        peak_bytes: Predicted peak of activations on the card, with input and output.
        reason: One clause for the user.
    """

    direction: Direction
    latent: Size
    tiles: Size
    middle_rows: int
    batch: int
    peak_bytes: int
    reason: str

    @property
    def whole(self) -> bool:
        return self.tiles == (1, 1) and not self.sliced

    @property
    def sliced(self) -> bool:
        """Tells whether the middle runs in slices."""
        return self.middle_rows < self.latent[0]

    @property
    def tile(self) -> Size:
        """Measures the largest tile in latent pixels, without the margin that it reads."""
        return largest_tile(self.latent, self.tiles)

    @property
    def count(self) -> int:
        """Counts the tiles of one item."""
        return self.tiles[0] * self.tiles[1]


def largest_tile(latent: Size, grid: Size) -> Size:
    """Measures the largest tile of a grid in latent pixels."""
    return -(-latent[0] // grid[0]), -(-latent[1] // grid[1])


def encode_peak_bytes(shape: VaeShape, height: int, width: int, itemsize: int) -> int:
    """Counts the peak of encoding one item whole in ComfyUI; height and width are latent pixels.

    Strips of rows read what they need of their neighbours.
    """
    if shape.strips:
        always, pixel = shape.strips.encode_bytes
        return always + pixel * shape.pixels**2 * height * width
    latent = (height, width)
    return latent_bytes(shape, latent, itemsize) + whole_bytes("encode", shape, latent, itemsize)


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
    """Chooses the fewest tiles that fit.

    Args:
        height, width: latent pixels.
        image_on_card: whether the image is kept on the card, or goes to host memory in tiles.
        batch: items; those that do not fit together run one after another.
        itemsize: bytes of a number in the VAE's dtype.
        budget: bytes that are free for activations; None where memory is no concern.
        tiles: at least this many tiles; None or 0 leaves it to the plan.

    Raises:
        SettingError: a size is not positive, or there are to be more tiles than latent pixels.
        UnavailableError: not even the smallest tiles fit.
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
        raise DoesNotFitError(
            f"too little memory to {direction} "
            f"{shape.pixels * width}x{shape.pixels * height} pixels: the smallest tiles "
            f"need {lacking:,} MiB and {max(0, budget or 0) // MIB:,} MiB is free, so choose a "
            "smaller size or batch, or free memory on the card."
        )
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
    """Plans how our decoding node decodes the request's images in `free` bytes.

    Args:
        free: bytes for what comes and goes; None for any number.
        others: bytes of other models' weights that could leave the card.

    Raises:
        UnavailableError: it does not fit `free` and `others` together.
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
            f"{format_gib(whole.peak_bytes)} and the card has {format_gib(most)} with all other "
            f"models off it: {remedy}."
        )
    return whole


def plan_in_room(planner: Planner, free: int, others: int) -> VaePlan:
    """Plans within what is free; else within the least room that does.

    Args:
        free: bytes that are free for what the plan counts.
        others: bytes of other models' weights that could leave the card.

    Returns:
        A plan whose `peak_bytes` are more than `free` needs the host to move other models off the
        card.

    Raises:
        UnavailableError: it would not fit even with all other models off the card.
    """
    most, room, found = free + others, LEAST_ROOM, plan_within(planner, free)
    while not found and room < most:
        found = plan_within(planner, room) if room > free else None
        room *= 2
    return found or planner(most)


def plan_within(planner: Planner, budget: int) -> VaePlan | None:
    """Plans within a budget; None where nothing fits."""
    try:
        return planner(budget)
    except UnavailableError:
        return None


# What decoding and encoding hold on the card: counted layer by layer, weights left out.
#
# The counts follow the allocations of ComfyUI's and diffusers' own classes at their worst moments.
# An H200 confirmed them in bf16 with ComfyUI's class, in allocated memory: 1,259 bytes a pixel to
# decode, where this counts 1,260, and 960 to encode, where this counts 972 with the image itself.

# cuDNN turns a convolution's input and output into its own layout in a workspace: this share of
# their bytes, by which the counts equal what was measured.
CONVOLUTION_WORKSPACE = 1.0
# The attention's tensors of latent pixels x channels at its worst moment: input, norm, q, k and v
# together and in copies, output, and the output in the order of an image.
ATTENTION_STREAMS = 10
# The same of ours: input, keys, values, norm, and q, k and v together.
FUSED_STREAMS = 7
# Of a pixel, in fp32, which torch needs to norm it.
LENGTH = 2
# PyTorch's memory-efficient attention adds up heads wider than 128 in fp32 next to a 16-bit output.
ACCUMULATOR_BYTES = 4
# Latent pixels that a slice of the middle takes at most. Enough queries for every processor of a
# card: an L40S has 142, and each takes 64 or 128 queries.
SLICE_PIXELS = 2**16


def in_pixels(shape: VaeShape, latent: Size) -> Size:
    """Counts the pixels of so many latent pixels, (height, width)."""
    return shape.pixels * latent[0], shape.pixels * latent[1]


def layer_bytes(
    step: VaeLayer, shape: VaeShape, itemsize: int, size: Size, input_bytes: int
) -> int:
    """Counts the most that one layer holds.

    Args:
        size: rows and columns of its input.
        input_bytes: what keeps its input alive; more than the input where that is a view.
    """
    if step.kind == "stage":
        return _stage_bytes(step, shape, itemsize, size, input_bytes)
    if shape.fused:
        return input_bytes + _fused_layer_numbers(step, *size) * itemsize
    rows, columns = size
    area = step.gives(0, rows)[1] * step.gives(0, columns)[1]
    i = rows * columns * step.channels_in * itemsize
    o = area * step.channels_out * itemsize
    padding = shape.padded_frames > 0
    wide = max(1, 4 // itemsize) if padding else 1  # its fp32 copies of 16-bit tensors
    sums = 4 * rows * columns if padding else 0  # its norm's, in fp32

    def convolve(given: int, channels: int) -> float:
        copy = 0
        if padding and step.kind not in ("up", "down"):
            copy = shape.padded_frames * (rows + 2) * (columns + 2) * channels * itemsize
        return copy + o + CONVOLUTION_WORKSPACE * ((copy or given) + o)

    if step.kind == "up":
        u = area * step.channels_in * itemsize
        most = max(u + convolve(u, step.channels_in), wide * i + wide * u, wide * u + u)
    elif step.kind == "residual":
        shortcut = o if step.channels_in != step.channels_out else 0
        first = shortcut if padding else 0  # diffusers computes it before the rest
        most = max(
            first + 2 * wide * i + sums,
            first + i + convolve(i, step.channels_in),
            first + o + 2 * wide * o + sums,
            first + o + convolve(o, step.channels_out),
            shortcut + convolve(i, step.channels_in),
        )
    else:
        copy = 0 if step.kind == "convolution" else i  # its norm or, going down, its padded input
        most = max(2 * wide * copy, copy + convolve(i, step.channels_in))
    return input_bytes + int(most)


def _fused_layer_numbers(step: VaeLayer, rows: int, columns: int) -> int:
    # Of our form of a layer (hosts/comfyui/decode/fused.py), besides its input: its output, what a
    # strip holds, and copies of weights.
    given, made = step.channels_in, step.channels_out
    out = step.gives(0, rows)[1] * step.gives(0, columns)[1] * made
    most = max(given, 4 * made if step.kind == "up" else made)
    if step.kind == "up":
        # Four parts, and what torch takes of a shortcut for one of them; weights of 2x2, which are
        # sums in fp32, of three by four and of four by four.
        parts = 5 * made * min((rows + 1) * (columns + 1), STRIP // most + 3 * (columns + 1))
        return max(out + parts, (9 + 2 * (12 + 16)) * given * made) + (16 * given + 1) * made
    if step.kind == "residual":
        whole = rows * columns * most <= STRIP
        strip = min(rows * columns, STRIP // most + 4 * columns) * (most + made + LENGTH)
        return (9 * given + 10 * made) * made + strip + (0 if whole else out)
    # Its norm, or what precedes: a padded copy, or two of latents.
    copies = (2 if step.kind == "convolution" else 1) * given + LENGTH
    return 9 * given * made + (rows + 1) * (columns + 1) * copies + out


def _stage_bytes(
    step: VaeLayer, shape: VaeShape, itemsize: int, size: Size, input_bytes: int
) -> int:
    # Layers with a shortcut around them, for which their input stays.
    rows, columns = size
    given = rows * columns * step.channels_in * itemsize
    most, kept, made = 0, input_bytes, 0
    for inner in step.inner:
        most = max(most, layer_bytes(inner, shape, itemsize, (rows, columns), kept))
        rows, columns = inner.gives(0, rows)[1], inner.gives(0, columns)[1]
        made = rows * columns * inner.channels_out * itemsize
        kept = input_bytes + made
    if shape.fused:  # what is averaged of the input; where it is repeated, the last step does it
        return max(most, kept + (made if step.inner[-1].kind != "up" else 0))
    # The shortcut copies the larger of both twice, and averages the input into one more.
    spread = step.frames * max(given, made)
    return max(most, kept + max(2 * spread, spread + made))


def tile_bytes(
    steps: Sequence[VaeLayer],
    shape: VaeShape,
    itemsize: int,
    tile: Size,
    whole: Size,
    *,
    owns_input: bool,
) -> int:
    """Counts the most that one tile holds on its way through `steps`.

    Args:
        tile: rows and columns of the last step's output.
        whole: rows and columns of the whole at the first step's input.
        owns_input: whether the tile's input is memory of its own, and not a view.
    """
    spans = []
    for length, size in zip(tile, whole, strict=True):
        # Of a tile amid the whole: at a border it reads less.
        inner = [high - low for low, high in intervals(steps, 0, length)]
        sizes = [size]
        for step in steps:
            sizes.append(step.gives(0, sizes[-1])[1])
        spans.append([min(pair) for pair in zip(inner, sizes, strict=True)])
    first = spans[0][0] * spans[1][0] * steps[0].channels_in * itemsize
    kept, most = first if owns_input else 0, 0
    for step, rows, columns in zip(steps, *spans, strict=False):
        most = max(most, layer_bytes(step, shape, itemsize, (rows, columns), kept))
        # What is cut off the output stays in memory until the next step is done.
        kept = step.gives(0, rows)[1] * step.gives(0, columns)[1] * step.channels_out * itemsize
    return most


def latent_bytes(shape: VaeShape, latent: Size, itemsize: int) -> int:
    """Counts the bytes of one item's latents."""
    return latent[0] * latent[1] * shape.latent_channels * itemsize


def image_bytes(shape: VaeShape, latent: Size, itemsize: int) -> int:
    """Counts the bytes of one item's image."""
    rows, columns = in_pixels(shape, latent)
    return rows * columns * shape.image_channels * itemsize


def hidden_bytes(direction: str, shape: VaeShape, latent: Size, itemsize: int) -> int:
    """Counts the bytes of what goes between the middle and the tiles of the rest."""
    return latent[0] * latent[1] * shape.middle_channels(direction) * itemsize


def outside_middle_bytes(
    direction: str, shape: VaeShape, latent: Size, itemsize: int, tile: Size
) -> int:
    """Counts the most that one tile of latent pixels `tile` holds outside the middle."""
    hidden = hidden_bytes(direction, shape, latent, itemsize)
    if direction == "decode":
        most = tile_bytes(
            up_steps(shape), shape, itemsize, in_pixels(shape, tile), latent, owns_input=False
        )
    else:
        most = tile_bytes(
            down_steps(shape), shape, itemsize, tile, in_pixels(shape, latent), owns_input=True
        )
    return hidden + most


def attention_bytes(
    direction: str, shape: VaeShape, itemsize: int, pixels: int, keys: int | None = None
) -> int:
    """Counts the most that attention holds with `pixels` queries, with its input.

    Args:
        keys: of ours, whose scores are in memory; as many as queries by default.
    """
    channels = shape.middle_channels(direction)
    if shape.fused:
        seen = keys or pixels
        seen += -seen % SCORES_TOGETHER
        scores = 2 * max(seen, min(pixels * seen, STRIP))
        numbers = pixels * (FUSED_STREAMS * channels + LENGTH) + scores
        return itemsize * (numbers + 3 * channels * (channels + 1))
    accumulator = ACCUMULATOR_BYTES if itemsize < ACCUMULATOR_BYTES else 0
    return pixels * channels * (ATTENTION_STREAMS * itemsize + accumulator)


def middle_bytes(direction: str, shape: VaeShape, latent: Size, itemsize: int, rows: int) -> int:
    """Counts the most that the middle holds, with what directly precedes and follows it.

    Args:
        rows: latent rows of a slice; all of them for a middle that runs whole.
    """
    hidden = hidden_bytes(direction, shape, latent, itemsize)
    whole = rows >= latent[0]
    around = [
        tile_bytes(
            steps, shape, itemsize, (min(rows, latent[0]), latent[1]), latent, owns_input=whole
        )
        for steps in (before_middle(shape, direction), after_middle(shape, direction))
    ]
    pixels = min(rows, latent[0]) * latent[1]
    attention = attention_bytes(direction, shape, itemsize, pixels, latent[0] * latent[1])
    if whole:
        return max(*around, attention)
    # Slices are read from one whole tensor and written into another; the attention changes one in
    # place next to whole keys and values.
    return max(2 * hidden + around[0], 3 * hidden + attention, 2 * hidden + around[1])


def middle_slices(
    direction: str, shape: VaeShape, latent: Size, itemsize: int, room: int | None
) -> tuple[int, int]:
    """Finds (latent rows of a slice of the middle, its bytes): the most that fit, at least 1."""
    height, width = latent
    whole = middle_bytes(direction, shape, latent, itemsize, height)
    if room is None or whole <= room:
        return height, whole
    low, high = 1, max(1, min(height - 1, SLICE_PIXELS // width))
    while low < high:
        rows = (low + high + 1) // 2
        if middle_bytes(direction, shape, latent, itemsize, rows) <= room:
            low = rows
        else:
            high = rows - 1
    return low, middle_bytes(direction, shape, latent, itemsize, low)


def whole_bytes(direction: str, shape: VaeShape, latent: Size, itemsize: int) -> int:
    """Counts the most that one item holds when it runs whole, without its latents."""
    return max(
        middle_bytes(direction, shape, latent, itemsize, latent[0]),
        outside_middle_bytes(direction, shape, latent, itemsize, latent),
    )
