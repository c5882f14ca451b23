"""The layers of Qwen-Image's VAE as tiles see them: how far each one reads.

The network is Wan 2.1's: widths of 1, 2, 4 and 4 times `dim`, three halvings, and one attention
over all latent pixels in the middle. Everything else reads at most a pixel to each side in a
convolution, and norms are per pixel, so that a tile with a margin gives what the whole gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..spec import PIXELS_PER_LATENT, VaeShape

Kind = Literal["convolution", "residual", "attention", "up", "down", "head"]
Interval = tuple[int, int]


@dataclass(frozen=True)
class Step:
    """One layer that a tile runs through.

    Args:
        kind: "convolution" is one of 3x3; "residual" is two with norms, and a shortcut;
            "attention" reads every pixel of the whole, so that no tile runs it; "up" doubles the
            pixels before a convolution; "down" is one of stride 2 that pads below and to the
            right; "head" is a norm and a convolution.
    """

    kind: Kind
    channels_in: int
    channels_out: int

    def reads(self, low: int, high: int) -> Interval:
        """The rows (or columns) of the input behind rows [low, high) of the output."""
        if self.kind == "up":
            return (low - 1) // 2, -(-(high + 1) // 2)
        if self.kind == "down":
            return 2 * low, 2 * high + 1
        margin = 2 if self.kind == "residual" else 1
        return low - margin, high + margin

    def gives(self, low: int, high: int) -> Interval:
        """The rows of the output that come out when rows [low, high) go in."""
        if self.kind == "up":
            return 2 * low, 2 * high
        if self.kind == "down":
            return low // 2, high // 2
        return low, high


def up_steps(shape: VaeShape) -> tuple[Step, ...]:
    """The decoder behind its middle: four stages of three residual blocks, and the head."""
    dim, steps = shape.dim, []
    for width, block_in in ((4, 4), (4, 2), (2, 2), (1, 1)):
        steps.append(Step("residual", block_in * dim, width * dim))
        steps += [Step("residual", width * dim, width * dim)] * 2
        if width > 1:
            steps.append(Step("up", width * dim, width * dim // 2))
    return (*steps, Step("head", dim, shape.image_channels))


def down_steps(shape: VaeShape) -> tuple[Step, ...]:
    """The encoder before its middle: the first convolution and four stages of two blocks."""
    dim = shape.dim
    steps = [Step("convolution", shape.image_channels, dim)]
    for stage, (block_in, width) in enumerate(((1, 1), (1, 2), (2, 4), (4, 4))):
        steps.append(Step("residual", block_in * dim, width * dim))
        steps.append(Step("residual", width * dim, width * dim))
        if stage < 3:
            steps.append(Step("down", width * dim, width * dim))
    return tuple(steps)


def before_middle(shape: VaeShape, direction: str) -> tuple[Step, ...]:
    """What precedes the attention and is sliced with it."""
    width = shape.middle_channels
    block = Step("residual", width, width)
    if direction == "encode":
        return (block,)
    return (Step("convolution", shape.latent_channels, width), block)


def after_middle(shape: VaeShape, direction: str) -> tuple[Step, ...]:
    """What follows the attention and is sliced with it."""
    width = shape.middle_channels
    block = Step("residual", width, width)
    if direction == "decode":
        return (block,)
    return (block, Step("head", width, 2 * shape.latent_channels))


def middle_steps(shape: VaeShape, direction: str) -> tuple[Step, ...]:
    """The attention with what precedes and follows it."""
    attention = Step("attention", shape.middle_channels, shape.middle_channels)
    return (*before_middle(shape, direction), attention, *after_middle(shape, direction))


def intervals(
    steps: Sequence[Step], low: int, high: int, size: int | None = None
) -> list[Interval]:
    """What each step needs so that rows [low, high) come out of the last one.

    Args:
        low, high: rows of the last step's output.
        size: rows of the whole at the first step's input, where intervals are cut, so that a
            convolution pads there as it does in the whole; None for a whole without end.

    Returns:
        One interval for each step's input, and (low, high) itself.
    """
    sizes = [size]
    for step in steps[:-1]:
        sizes.append(None if sizes[-1] is None else step.gives(0, sizes[-1])[1])
    found = [(low, high)]
    for step, whole in zip(reversed(steps), reversed(sizes), strict=True):
        low, high = step.reads(low, high)
        if whole is not None:
            low, high = max(0, low), min(whole, high)
        found.append((low, high))
    return found[::-1]


def parts(size: int, count: int) -> list[Interval]:
    """Splits [0, size) into `count` intervals whose lengths differ by at most one."""
    return [(i * size // count, (i + 1) * size // count) for i in range(count)]


# What decoding and encoding hold on the card: counted layer by layer, weights left out.
#
# The counts follow the allocations of ComfyUI's and diffusers' own classes at their worst moments.
# An
# H200 confirmed them in bf16 with ComfyUI's class, in allocated memory: 1,259 bytes a pixel to
# decode, where this counts 1,260, and 960 to encode, where this counts 972 with the image itself.

# cuDNN turns a convolution's input and output into its own layout in a workspace: this share of
# their bytes, by which the counts equal what was measured.
CONVOLUTION_WORKSPACE = 1.0
# The attention's tensors of latent pixels x channels at its worst moment: input, norm, q, k and v
# together and in copies, output, and the output in the order of an image.
ATTENTION_STREAMS = 10
# PyTorch's memory-efficient attention adds up heads wider than 128 in fp32 beside a 16-bit output.
ACCUMULATOR_BYTES = 4
# Latent pixels that a slice of the middle takes at most. Enough queries for every processor of a
# card: an L40S has 142, and each takes 64 or 128 queries.
SLICE_PIXELS = 2**16

Size = tuple[int, int]


def in_pixels(latent: Size) -> Size:
    """Pixels of so many latent pixels, (height, width)."""
    return PIXELS_PER_LATENT * latent[0], PIXELS_PER_LATENT * latent[1]


def step_bytes(step: Step, shape: VaeShape, itemsize: int, size: Size, input_bytes: int) -> int:
    """The most that one layer holds.

    Args:
        size: rows and columns of its input.
        input_bytes: what keeps its input alive; more than the input where that is a view.
    """
    rows, columns = size
    area = step.gives(0, rows)[1] * step.gives(0, columns)[1]
    i = rows * columns * step.channels_in * itemsize
    o = area * step.channels_out * itemsize
    padding = shape.padded_frames > 1
    wide = max(1, 4 // itemsize) if padding else 1  # its fp32 copies of 16-bit tensors

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
            first + 2 * wide * i,
            first + i + convolve(i, step.channels_in),
            first + o + 2 * wide * o,
            first + o + convolve(o, step.channels_out),
            shortcut + convolve(i, step.channels_in),
        )
    else:
        copy = 0 if step.kind == "convolution" else i  # its norm or, going down, its padded input
        most = max(2 * wide * copy, copy + convolve(i, step.channels_in))
    return input_bytes + int(most)


def tile_bytes(
    steps: Sequence[Step],
    shape: VaeShape,
    itemsize: int,
    tile: Size,
    whole: Size,
    *,
    input_held: bool,
) -> int:
    """The most that one tile holds on its way through `steps`.

    Args:
        tile: rows and columns of the last step's output.
        whole: rows and columns of the whole at the first step's input.
        input_held: whether the tile's input is memory of its own, and not a view.
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
    held, most = first if input_held else 0, 0
    for step, rows, columns in zip(steps, *spans, strict=False):
        most = max(most, step_bytes(step, shape, itemsize, (rows, columns), held))
        # What is cut off the output stays in memory until the next step is done.
        held = step.gives(0, rows)[1] * step.gives(0, columns)[1] * step.channels_out * itemsize
    return most


def latent_bytes(shape: VaeShape, latent: Size, itemsize: int) -> int:
    """Bytes of one item's latents."""
    return latent[0] * latent[1] * shape.latent_channels * itemsize


def image_bytes(shape: VaeShape, latent: Size, itemsize: int) -> int:
    """Bytes of one item's image."""
    rows, columns = in_pixels(latent)
    return rows * columns * shape.image_channels * itemsize


def hidden_bytes(shape: VaeShape, latent: Size, itemsize: int) -> int:
    """Bytes of what goes between the middle and the tiles of the rest."""
    return latent[0] * latent[1] * shape.middle_channels * itemsize


def outside_middle_bytes(
    direction: str, shape: VaeShape, latent: Size, itemsize: int, tile: Size
) -> int:
    """The most that one tile of latent pixels `tile` holds outside the middle."""
    hidden = hidden_bytes(shape, latent, itemsize)
    if direction == "decode":
        most = tile_bytes(
            up_steps(shape), shape, itemsize, in_pixels(tile), latent, input_held=False
        )
    else:
        most = tile_bytes(
            down_steps(shape), shape, itemsize, tile, in_pixels(latent), input_held=True
        )
    return hidden + most


def attention_bytes(shape: VaeShape, itemsize: int, pixels: int) -> int:
    """The most that attention holds with `pixels` queries and as many keys, with its input."""
    accumulator = ACCUMULATOR_BYTES if itemsize < ACCUMULATOR_BYTES else 0
    return pixels * shape.middle_channels * (ATTENTION_STREAMS * itemsize + accumulator)


def middle_bytes(direction: str, shape: VaeShape, latent: Size, itemsize: int, rows: int) -> int:
    """The most that the middle holds, with what directly precedes and follows it.

    Args:
        rows: latent rows of a slice; all of them for a middle that runs whole.
    """
    hidden = hidden_bytes(shape, latent, itemsize)
    whole = rows >= latent[0]
    around = [
        tile_bytes(
            steps, shape, itemsize, (min(rows, latent[0]), latent[1]), latent, input_held=whole
        )
        for steps in (before_middle(shape, direction), after_middle(shape, direction))
    ]
    attention = attention_bytes(shape, itemsize, min(rows, latent[0]) * latent[1])
    if whole:
        return max(*around, attention)
    # Slices are read from one whole tensor and written into another; the attention changes one in
    # place beside whole keys and values.
    return max(2 * hidden + around[0], 3 * hidden + attention, 2 * hidden + around[1])


def middle_slices(
    direction: str, shape: VaeShape, latent: Size, itemsize: int, room: int | None
) -> tuple[int, int]:
    """(latent rows of a slice of the middle, its bytes): the most rows that fit, and at least 1."""
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
    """The most that one item holds when it runs whole, without its latents."""
    return max(
        middle_bytes(direction, shape, latent, itemsize, latent[0]),
        outside_middle_bytes(direction, shape, latent, itemsize, latent),
    )
