"""Predicts the memory and time of decoding and encoding on the card, whole or in tiles. Memory
follows an implementation's largest layer for each pixel, time the arithmetic of all layers.
"""

from __future__ import annotations

import bisect
import functools
from typing import Literal

from ..spec.transformer import REFERENCE_SIDE
from ..spec.vae import SCORES_TOGETHER, STRIP, VaeShape
from .rates import Rates
from .request import RunRequest

Size = tuple[int, int]
Direction = Literal["decode", "encode"]


# What decoding and encoding hold on the card, weights left out: the allocations of ComfyUI's and
# diffusers' own classes at their worst moments. An H200 confirmed them in bf16 with ComfyUI's
# class, in allocated memory: 1,259 bytes a pixel to decode, where this counts 1,260, and 960 to
# encode, where this counts 972 with the image itself.

# cuDNN turns a convolution's input and output into its own layout in a workspace of as many bytes.
# The attention's tensors of latent pixels x channels at its worst moment: input, norm, q, k and v
# together and in copies, output, and the output in the order of an image.
ATTENTION_STREAMS = 10
# The same of ours: input, keys, values, norm, and q, k and v together.
FUSED_STREAMS = 7
# Of a pixel, in fp32, which torch needs to norm it.
LENGTH = 2
# PyTorch's memory-efficient attention adds up heads wider than 128 in fp32 next to a 16-bit output.
ACCUMULATOR_BYTES = 4
# Latent pixels that a slice of the middle takes at most. Enough queries for every CPU of a
# card: an L40S has 142, and each takes 64 or 128 queries.
SLICE_PIXELS = 2**16
# Latent rows that what precedes and follows the attention reads beyond a slice.
SLICE_MARGIN = 6


def _residual_numbers(shape: VaeShape, channels: int, rows: int, columns: int) -> int:
    # A residual block with its input: the largest layer of one resolution.
    pixels = rows * columns
    if shape.fused:  # as of hosts/comfyui/decode/fused.py
        whole = pixels * channels <= STRIP
        strip = min(pixels, STRIP // channels + 4 * columns) * (2 * channels + LENGTH)
        return (2 - whole) * pixels * channels + strip + 19 * channels**2
    # Its input twice, the result twice, and twice what a convolution reads.
    padded = shape.padded_frames * (rows + 2) * (columns + 2)
    return channels * (4 * pixels + padded + (padded or pixels))


def _outside_numbers(direction: str, shape: VaeShape, rows: int, columns: int) -> int:
    # The most outside the middle, of so many rows and columns of pixels.
    dim, pixels, counts = shape.channels(direction)[0], rows * columns, shape.counts
    most = _residual_numbers(shape, dim, rows, columns)
    if direction == "encode":
        halved = (9 * dim // 4 + LENGTH) * pixels if shape.fused else 0  # with a padded copy
        return max(most, halved) + counts.kept * dim * pixels
    fused, plain, padded = counts.enlarged
    if not shape.fused:
        return max(most, int((padded if shape.padded_frames else plain) * dim * pixels))
    # Enlarging in four parts, in strips; the widest weights are those of the first enlarging.
    made = counts.made * dim
    parts = min(5 * made * pixels // 4, 5 * STRIP // 4 + 15 * made * columns // 2)
    wide = shape.middle_channels(direction)
    weights = 43 * counts.made * wide**2 + 12 * wide * pixels // shape.pixels**2
    return max(most, weights, int(fused * dim * pixels) + parts + 64 * dim**2)


def in_pixels(shape: VaeShape, latent: Size) -> Size:
    return shape.pixels * latent[0], shape.pixels * latent[1]


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
    fused, others, encoding = shape.counts.margins
    margin = encoding if direction == "encode" else fused if shape.fused else others
    sides = zip(in_pixels(shape, tile), in_pixels(shape, latent), strict=True)
    rows, columns = (min(side + margin, whole) for side, whole in sides)
    numbers = _outside_numbers(direction, shape, rows, columns)
    return hidden_bytes(direction, shape, latent, itemsize) + itemsize * numbers


def attention_bytes(direction: str, shape: VaeShape, itemsize: int, pixels: int, keys: int) -> int:
    """Counts the most that attention holds with `pixels` queries; `keys` count for ours."""
    channels = shape.middle_channels(direction)
    if shape.fused:
        keys += -keys % SCORES_TOGETHER
        scores = 2 * max(keys, min(pixels * keys, STRIP))
        numbers = pixels * (FUSED_STREAMS * channels + LENGTH) + scores
        return itemsize * (numbers + 3 * channels * (channels + 1))
    accumulator = ACCUMULATOR_BYTES if itemsize < ACCUMULATOR_BYTES else 0
    return pixels * channels * (ATTENTION_STREAMS * itemsize + accumulator)


def middle_bytes(direction: str, shape: VaeShape, latent: Size, itemsize: int, rows: int) -> int:
    """Counts the most that the middle holds in slices of latent `rows`, with its neighbours."""
    height, width = latent
    hidden = hidden_bytes(direction, shape, latent, itemsize)
    read, channels = min(rows + SLICE_MARGIN, height), shape.middle_channels(direction)
    around = itemsize * _residual_numbers(shape, channels, read, width)
    pixels = min(rows, height) * width
    attention = attention_bytes(direction, shape, itemsize, pixels, height * width)
    if rows >= height:
        return max(around, attention)
    # Slices are read from one whole tensor and written into another; the attention changes one in
    # place next to whole keys and values.
    return max(2 * hidden + around, 3 * hidden + attention)


def middle_slices(
    direction: str, shape: VaeShape, latent: Size, itemsize: int, room: int | None
) -> tuple[int, int]:
    """Finds (latent rows of a slice of the middle, its bytes): the most that fit, at least 1."""
    height, width = latent
    whole = middle_bytes(direction, shape, latent, itemsize, height)
    if room is None or whole <= room:
        return height, whole
    sizes = range(1, max(1, min(height - 1, SLICE_PIXELS // width)) + 1)
    needed = functools.partial(middle_bytes, direction, shape, latent, itemsize)
    rows = sizes[max(0, bisect.bisect(sizes, room, key=needed) - 1)]
    return rows, needed(rows)


def whole_bytes(direction: str, shape: VaeShape, latent: Size, itemsize: int) -> int:
    """Counts the most that one item holds when it runs whole, without its latents."""
    return max(
        middle_bytes(direction, shape, latent, itemsize, latent[0]),
        outside_middle_bytes(direction, shape, latent, itemsize, latent),
    )


def encode_peak_bytes(shape: VaeShape, height: int, width: int, itemsize: int) -> int:
    """Counts the peak of encoding one item whole in ComfyUI; height and width are latent pixels."""
    if shape.strips:
        always, pixel = shape.strips.encode_bytes
        return always + pixel * shape.pixels**2 * height * width
    latent = (height, width)
    return latent_bytes(shape, latent, itemsize) + whole_bytes("encode", shape, latent, itemsize)


# How long decoding and encoding take, whole or in tiles.

# Of 1.x in bf16 and eager kernels, the attention left out: operations for a pixel in dim^2, and
# bytes read and written in dim. cuDNN turns a convolution's input and output into its own layout:
# each is read, written and read, or written twice. A norm's square sum, quotient and two factors
# are kernels of their own, a SiLU and a sum too.
WORK = {"decode": (444.75, 455.2), "encode": (252.44, 290.34)}
# Pixels at each seam of tiles that are computed twice, weighted by work; and seconds of a further
# tile besides, for launches and copies of its margins (H200: 2 to 3.7 ms to decode, 1.3 to 3.4 to
# encode).
SEAM = {"decode": 42, "encode": 107}
TILE_SECONDS = {"decode": 0.0032, "encode": 0.0024}
# The nodes bring images in fp32 from and to memory that is not pinned (H200: 9.5 ms for the 50 MB
# of 2048x2048).
PIXEL_BYTES, HOST_BYTES_PER_SECOND = 4, 5.3e9


def decode_seconds(request: RunRequest, tiles: Size | int, rates: Rates) -> float:
    """Predicts the images of a batch; `tiles` are (rows, columns) or a count, 1 for whole."""
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
    """Predicts an image from or to system RAM, in a `share` of the time of ComfyUI's layers."""
    rows, columns = in_pixels(shape, latent)
    copied: float = PIXEL_BYTES * shape.image_channels * rows * columns
    copied /= min(HOST_BYTES_PER_SECOND, rates.pcie)
    if shape.strips:
        operations, moved = getattr(shape.strips, direction)
        seconds = operations / rates.convolution + moved / rates.bandwidth
        return copied + share * rows * columns * seconds
    down, across = tiles if isinstance(tiles, tuple) else _grid(tiles)
    seam, dim = SEAM[direction], shape.channels(direction)[0]
    pixels = (rows + (down - 1) * seam) * (columns + (across - 1) * seam)
    operations, moved = WORK[direction]
    seconds = pixels * (operations * dim**2 / rates.convolution + moved * dim / rates.bandwidth)
    attention = 4 * shape.middle_channels(direction) * (latent[0] * latent[1]) ** 2
    seconds += attention / rates.convolution + (down * across - 1) * TILE_SECONDS[direction]
    return copied + share * seconds


def _grid(count: int) -> Size:
    rows = next(rows for rows in range(int(count**0.5), 0, -1) if count % rows == 0)
    return rows, count // rows
