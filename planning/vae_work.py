"""What the VAE's layers hold and how long they take, counted one by one, whole or in tiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from ..spec.transformer import REFERENCE_SIDE
from ..spec.vae import (
    SCORES_TOGETHER,
    STRIP,
    Interval,
    VaeLayer,
    VaeShape,
    after_middle,
    before_middle,
    down_steps,
    intervals,
    middle_steps,
    parts,
    up_steps,
)
from .rates import Rates
from .request import RunRequest

Size = tuple[int, int]
Direction = Literal["decode", "encode"]
WIDE = 2  # bytes of a bf16 number


# What decoding and encoding hold on the card, weights left out: the allocations of ComfyUI's and
# diffusers' own classes at their worst moments. An H200 confirmed them in bf16 with ComfyUI's
# class, in allocated memory: 1,259 bytes a pixel to decode, where this counts 1,260, and 960 to
# encode, where this counts 972 with the image itself.

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
    return latent[0] * latent[1] * shape.latent_channels * itemsize


def image_bytes(shape: VaeShape, latent: Size, itemsize: int) -> int:
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


def encode_peak_bytes(shape: VaeShape, height: int, width: int, itemsize: int) -> int:
    """Counts the peak of encoding one item whole in ComfyUI; height and width are latent pixels.

    Strips of rows read what they need of their neighbours.
    """
    if shape.strips:
        always, pixel = shape.strips.encode_bytes
        return always + pixel * shape.pixels**2 * height * width
    latent = (height, width)
    return latent_bytes(shape, latent, itemsize) + whole_bytes("encode", shape, latent, itemsize)


# How long decoding and encoding take, whole or in tiles.

# How often a number is read or written around the arithmetic. cuDNN turns a convolution's input and
# output into its own layout: each is read, written and read, or written twice. A norm's square
# sum, quotient and two factors are kernels of their own, a SiLU and a sum too.
CONVOLVED, NORM, SILU, SUM = 3, 8, 2, 3
# The nodes bring images in fp32 from and to memory that is not pinned (H200: 9.5 ms for the 50 MB
# of 2048x2048).
PIXEL_BYTES, HOST_BYTES_PER_SECOND = 4, 5.3e9
# What each step of a further tile costs besides its arithmetic: launches, and copies of its margins
# (H200: 2 to 3.7 ms for each tile to decode, 1.3 to 3.4 to encode).
TILE_STEP_SECONDS = 0.0002


def decode_seconds(request: RunRequest, tiles: Size | int, rates: Rates) -> float:
    """Predicts the images of a batch.

    Args:
        tiles: (rows, columns), or how many; 1 is whole.
    """
    side = request.vae.pixels
    latent = request.height // side, request.width // side
    one = vae_seconds("decode", request.vae, latent, tiles, rates, rates.vae)
    return request.batch * request.frames * one


def encode_image_seconds(request: RunRequest, rates: Rates) -> float:
    """Predicts the reference images of a run, each of one megapixel, once for all its prompts."""
    side = REFERENCE_SIDE // request.vae.pixels
    return request.references * vae_seconds("encode", request.vae, (side, side), 1, rates)


def vae_seconds(
    direction: Direction,
    shape: VaeShape,
    latent: Size,
    tiles: Size | int,
    rates: Rates,
    share: float = 1.0,
) -> float:
    """Predicts an image from or to host memory, in ComfyUI's layers or a share of their time.

    Args:
        latent: latent pixels, (height, width).
        tiles: as of `decode_seconds`; the middle runs whole.
    """
    rows, columns = (shape.pixels * side for side in latent)
    moved = PIXEL_BYTES * shape.image_channels * rows * columns
    copied = moved / min(HOST_BYTES_PER_SECOND, rates.pcie)
    if shape.strips:
        operations, moved = getattr(shape.strips, direction)
        seconds = operations / rates.convolution + moved / rates.bandwidth
        return copied + share * rows * columns * seconds
    return copied + share * _seconds(direction, shape, latent, tiles, rates)


def _seconds(
    direction: Direction, shape: VaeShape, latent: Size, tiles: Size | int, rates: Rates
) -> float:
    seconds = sum(_step(step, *latent, rates) for step in middle_steps(shape, direction))
    rows, columns = tiles if isinstance(tiles, tuple) else _grid(tiles)
    decodes = direction == "decode"
    steps = up_steps(shape) if decodes else down_steps(shape)
    end, begin = (
        (in_pixels(shape, latent), latent) if decodes else (latent, in_pixels(shape, latent))
    )
    down, across = (
        _lengths(steps, end[axis], begin[axis], count) for axis, count in ((0, rows), (1, columns))
    )
    for index, step in enumerate(steps):
        for height in down[index]:
            for width in across[index]:
                seconds += _step(step, height, width, rates)
    return seconds + (rows * columns - 1) * len(steps) * TILE_STEP_SECONDS


def _grid(count: int) -> Size:
    rows = next(rows for rows in range(int(count**0.5), 0, -1) if count % rows == 0)
    return rows, count // rows


def _lengths(steps: Sequence[VaeLayer], end: int, begin: int, count: int) -> list[list[int]]:
    # Of each step's input in every tile of one axis, margins included.
    tiles: Iterable[list[Interval]] = (
        intervals(steps, low, high, begin) for low, high in parts(end, count)
    )
    return [[high - low for low, high in step] for step in zip(*tiles, strict=True)][:-1]


def step_work(step: VaeLayer, rows: int, columns: int) -> tuple[int, int]:
    """Counts (operations of products and attention, bytes read and written) of one layer with so
    many rows and columns at its input, in bf16 and eager kernels.
    """
    area = rows * columns
    given, made = area * step.channels_in, area * step.channels_out
    if step.kind == "attention":
        width = step.channels_in
        flops = 2 * 4 * width * width * area + 4 * area * area * width
        moved = (NORM + 2 * CONVOLVED * 2 + SUM) * given
    elif step.kind == "residual":
        flops = _products(step.channels_in, step.channels_out, area, 9)
        flops += _products(step.channels_out, step.channels_out, area, 9)
        moved = (NORM + SILU) * (given + made) + CONVOLVED * (given + 3 * made) + SUM * made
        if given != made:
            flops += _products(step.channels_in, step.channels_out, area, 1)
            moved += CONVOLVED * (given + made)
    elif step.kind == "up":
        flops = _products(step.channels_in, step.channels_out, 4 * area, 9)
        moved = given + 4 * given + CONVOLVED * 4 * (given + made)
    elif step.kind == "down":
        flops = _products(step.channels_in, step.channels_out, area // 4, 9)
        moved = 2 * given + CONVOLVED * (given + made // 4)
    else:
        flops = _products(step.channels_in, step.channels_out, area, 9)
        moved = CONVOLVED * (given + made)
        if step.kind == "head":
            moved += (NORM + SILU) * given
    return flops, WIDE * moved


def _step(step: VaeLayer, rows: int, columns: int, rates: Rates) -> float:
    operations, moved = step_work(step, rows, columns)
    return operations / rates.convolution + moved / rates.bandwidth


def _products(channels_in: int, channels_out: int, area: int, taps: int) -> int:
    return 2 * taps * channels_in * channels_out * area
