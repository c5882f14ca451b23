"""What decoding and encoding hold on the card: counted layer by layer, weights left out.

The counts follow the allocations of ComfyUI's and diffusers' own classes at their worst moments. An
H200 confirmed them in bf16 with ComfyUI's class, in allocated memory: 1,259 bytes a pixel to
decode, where this counts 1,260, and 960 to encode, where this counts 972 with the image itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from .vae_steps import (
    PIXELS_PER_LATENT,
    Step,
    VaeShape,
    after_middle,
    before_middle,
    down_steps,
    intervals,
    through_attention,
    up_steps,
)

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

    if step.kind == "attention":
        most = attention_bytes(shape, itemsize, rows * columns)
    elif step.kind == "up":
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


def through_bytes(
    direction: str, shape: VaeShape, latent: Size, itemsize: int, tile: Size, stride: int
) -> int:
    """The most that tiles hold that run the middle too, with one key in stride x stride."""
    steps = through_attention(shape, direction)
    # Values and keys, and beside them those of one tile on the way there.
    kept = 2 * hidden_bytes(shape, tuple(-(-side // stride) for side in latent), itemsize)
    if direction == "decode":
        return kept + tile_bytes(steps, shape, itemsize, in_pixels(tile), latent, input_held=False)
    return kept + tile_bytes(steps, shape, itemsize, tile, in_pixels(latent), input_held=True)


def whole_bytes(direction: str, shape: VaeShape, latent: Size, itemsize: int) -> int:
    """The most that one item holds when it runs whole, without its latents."""
    return max(
        middle_bytes(direction, shape, latent, itemsize, latent[0]),
        outside_middle_bytes(direction, shape, latent, itemsize, latent),
    )
