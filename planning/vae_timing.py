"""How long the VAE takes to decode and encode, counted layer by layer, whole or in tiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .rates import Rates
from .vae_bytes import Size, in_pixels
from .vae_choice import Direction
from .vae_steps import (
    PIXELS_PER_LATENT,
    Interval,
    Step,
    VaeShape,
    after_middle,
    before_middle,
    down_steps,
    intervals,
    parts,
    up_steps,
)
from .wish import Wish
from .work import REFERENCE_SIDE, Work

WIDE = 2  # bytes of a bf16 number
# How often a number is read or written beside the arithmetic. cuDNN turns a convolution's input and
# output into its own layout: each is read, written and read, or written twice. A norm's square
# sum, quotient and two factors are kernels of their own, a SiLU and a sum too.
CONVOLVED, NORM, SILU, SUM = 3, 8, 2, 3
# The nodes bring images in fp32 from and to memory that is not pinned (H200: 9.5 ms for the 50 MB
# of 2048x2048).
PIXEL_BYTES, HOST_BYTES_PER_SECOND = 4, 5.3e9
# What each step of a further tile costs beside its arithmetic: launches, and copies of its margins
# (H200: 2 to 3.7 ms for each tile to decode, 1.3 to 3.4 to encode).
TILE_STEP_SECONDS = 0.0002


def decode_seconds(wish: Wish, tiles: Size | int, rates: Rates) -> float:
    """The images of a batch.

    Args:
        tiles: (rows, columns), or how many; 1 is whole.
    """
    return wish.batch * wish.frames * vae_seconds("decode", wish.vae, _latent(wish), tiles, rates)


def encode_image_seconds(wish: Wish, rates: Rates, tiles: Size | int = 1) -> float:
    """The reference images of a run, each of one megapixel; once for all of its prompts."""
    side = REFERENCE_SIDE // PIXELS_PER_LATENT
    return wish.references * vae_seconds("encode", wish.vae, (side, side), tiles, rates)


def vae_seconds(
    direction: Direction, shape: VaeShape, latent: Size, tiles: Size | int, rates: Rates
) -> float:
    """One image, from or to host memory.

    Args:
        latent: latent pixels, (height, width).
        tiles: as of `decode_seconds`; the middle runs whole.
    """
    rows, columns = in_pixels(latent)
    moved = PIXEL_BYTES * shape.image_channels * rows * columns
    copied = moved / min(HOST_BYTES_PER_SECOND, rates.pcie)
    return copied + _seconds(direction, shape, latent, tiles, rates)


def _latent(wish: Wish) -> Size:
    return wish.height // PIXELS_PER_LATENT, wish.width // PIXELS_PER_LATENT


def _seconds(
    direction: Direction, shape: VaeShape, latent: Size, tiles: Size | int, rates: Rates
) -> float:
    attention = Step("attention", shape.middle_channels, shape.middle_channels)
    middle = (*before_middle(shape, direction), attention, *after_middle(shape, direction))
    seconds = sum(_step(step, *latent, rates) for step in middle)
    rows, columns = tiles if isinstance(tiles, tuple) else _grid(tiles)
    decodes = direction == "decode"
    steps = up_steps(shape) if decodes else down_steps(shape)
    end, begin = (in_pixels(latent), latent) if decodes else (latent, in_pixels(latent))
    down, across = (
        _lengths(steps, end[axis], begin[axis], count) for axis, count in ((0, rows), (1, columns))
    )
    for index, step in enumerate(steps):
        for height in down[index]:
            for width in across[index]:
                seconds += _step(step, height, width, rates)
    return seconds + (rows * columns - 1) * len(steps) * TILE_STEP_SECONDS


def _grid(count: int) -> Size:
    """So many tiles, as square as may be."""
    rows = next(rows for rows in range(int(count**0.5), 0, -1) if count % rows == 0)
    return rows, count // rows


def _lengths(steps: Sequence[Step], end: int, begin: int, count: int) -> list[list[int]]:
    """For each step the lengths of its input in every tile of one axis, margins included."""
    tiles: Iterable[list[Interval]] = (
        intervals(steps, low, high, begin) for low, high in parts(end, count)
    )
    return [[high - low for low, high in step] for step in zip(*tiles, strict=True)][:-1]


def step_work(step: Step, rows: int, columns: int) -> Work:
    """One layer with so many rows and columns at its input, in bf16 and eager kernels."""
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
    return Work(flops, WIDE * moved)


def _step(step: Step, rows: int, columns: int, rates: Rates) -> float:
    work = step_work(step, rows, columns)
    return work.flops / rates.convolution + work.bytes / rates.bandwidth


def _products(channels_in: int, channels_out: int, area: int, taps: int) -> int:
    return 2 * taps * channels_in * channels_out * area
