"""Describes sizes and layers of the VAEs, and which rows a layer reads for its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

PIXELS_PER_LATENT = 8


class Strips(NamedTuple):
    """Counts what ComfyUI takes for an image whose layers it cuts into strips of rows."""

    # decode, encode: operations of convolutions, and bytes read and written, for a pixel in bf16
    decode: tuple[int, int]
    encode: tuple[int, int]
    encode_bytes: tuple[int, int]  # its peak, of any image and for a pixel
    least_tiles: int  # in which the fused layers take half of that


class VaeCounts(NamedTuple):
    """Counts what the largest layers of a VAE hold, in pixels x channels of full resolution."""

    kept: int = 0  # of a stage, its input, which waits for a shortcut around it
    made: int = 1  # channels that enlarging to full resolution gives, in those of full resolution
    # what it holds with its input, but for strips, in the fused layers; in ComfyUI's; and where
    # frames are padded
    enlarged: tuple[float, float, float] = (1.5, 6.5, 6.6)
    # pixels that a tile reads beyond what it gives, both sides together, where it holds the most:
    # to decode in fused layers, in others, and to encode
    margins: tuple[int, int, int] = (21, 21, 128)


COUNTS = VaeCounts()


@dataclass(frozen=True)
class VaeShape:
    """Holds the sizes that fix a VAE's activations."""

    dim: int = 96  # channels of the decoder at full resolution: 96 in the published VAE
    latent_channels: int = 16  # 16, or 64 in Qwen-Image-2.1
    image_channels: int = 3  # 3, or 4 in Qwen-Image-Layered and Qwen-Image-2.1
    # the frames of the padded copy that a convolution reads of one image: 0 in ComfyUI, where the
    # kernel pads; 3 in diffusers, 1 in its class of Qwen-Image-2.1. Of 16-bit tensors diffusers
    # norms and enlarges copies in fp32.
    padded_frames: int = 0
    encoder_dim: int | None = None  # the same of the encoder; None where it is the decoder's
    # channels of each stage from full to latent resolution, in multiples of those
    widths: tuple[int, ...] = (1, 2, 4, 4)
    shortcuts: bool = False  # whether one leads around each stage that halves or enlarges
    counts: VaeCounts = COUNTS  # what its largest layers hold
    # what ComfyUI's own code takes, where it cuts each layer into strips of rows; None where it
    # runs layers whole
    strips: Strips | None = None
    fused: bool = False  # whether its layers run as `optimizations/vae/flat.py` computes them

    @property
    def pixels(self) -> int:
        return 2 ** (len(self.widths) - 1)

    def channels(self, direction: str) -> tuple[int, ...]:
        """Returns the channels of each stage, from full to latent resolution."""
        dim = self.encoder_dim if direction == "encode" else None
        return tuple((dim or self.dim) * width for width in self.widths)

    def middle_channels(self, direction: str) -> int:
        """Returns the channels at latent resolution, in the middle of encoder or decoder."""
        return self.channels(direction)[-1]


PUBLISHED_VAE = VaeShape()


# The layers of Qwen-Image's VAE as tiles see them: how far each one reads.
#
# The network is Wan 2.1's: stages of residual blocks with halvings between them, and one attention
# over all latent pixels in the middle. Everything else reads at most a pixel to each side in a
# convolution, and norms are per pixel, so that a tile with a margin gives what the whole gives.
# Qwen-Image-2.1's is Wan 2.2's, where a shortcut leads around each stage.

# Numbers of the widest tensor of a strip of rows, or of a slice of attention's scores, in the fused
# layers. An H200 decodes 1328x1328 in 27.9 ms so, in 30.4 with half of it; 26.6 with twice as much
# take 0.13 GiB more. 64 MiB of bf16 fit the cache of an L40S (96).
STRIP = 2**25
# Keys that are together in memory in their attention.
SCORES_TOGETHER = 8

Kind = Literal["convolution", "residual", "attention", "up", "down", "head", "stage"]
Interval = tuple[int, int]


@dataclass(frozen=True)
class VaeLayer:
    """Describes one layer that a tile runs through."""

    # "convolution" is one of 3x3; "residual" is two with norms, and a shortcut; "attention" reads
    # every pixel of the whole, so that no tile runs it; "up" doubles the pixels before a
    # convolution; "down" is one of stride 2 that pads below and to the right; "head" is a norm and
    # a convolution; "stage" is `inner` with a shortcut around all of it, which averages or repeats
    # pixels
    kind: Kind
    channels_in: int
    channels_out: int
    inner: tuple[VaeLayer, ...] = ()

    def reads(self, low: int, high: int) -> Interval:
        """Returns the rows (or columns) of the input behind rows [low, high) of the output."""
        if self.kind == "up":
            return (low - 1) // 2, -(-(high + 1) // 2)
        if self.kind == "down":
            return 2 * low, 2 * high + 1
        if self.kind == "stage":
            for step in reversed(self.inner):
                low, high = step.reads(low, high)
            # Its shortcut averages whole squares of 2x2.
            return low, high + high % 2 if self.inner[-1].kind == "down" else high
        margin = 2 if self.kind == "residual" else 1
        return low - margin, high + margin

    def gives(self, low: int, high: int) -> Interval:
        """Returns the rows of the output that come out when rows [low, high) go in."""
        if self.kind == "up":
            return 2 * low, 2 * high
        if self.kind == "down":
            return low // 2, high // 2
        for step in self.inner:
            low, high = step.gives(low, high)
        return low, high


def _blocks(channels_in: int, channels: int, count: int) -> list[VaeLayer]:
    first = VaeLayer("residual", channels_in, channels)
    return [first] + [VaeLayer("residual", channels, channels)] * (count - 1)


def _stage(steps: list[VaeLayer]) -> VaeLayer:
    return VaeLayer("stage", steps[0].channels_in, steps[-1].channels_out, tuple(steps))


def up_steps(shape: VaeShape) -> tuple[VaeLayer, ...]:
    """Lists the decoder behind its middle: stages of three residual blocks, and the head."""
    stages, staged = shape.channels("decode")[::-1], shape.shortcuts
    steps, given = [], stages[0]
    for index, channels in enumerate(stages):
        stage = _blocks(given, channels, 3)
        if index < len(stages) - 1:
            # Without a shortcut, enlarging halves the channels.
            given = channels if staged else channels // 2
            stage.append(VaeLayer("up", channels, given))
            stage = [_stage(stage)] if staged else stage
        steps += stage
    return (*steps, VaeLayer("head", stages[-1], shape.image_channels))


def down_steps(shape: VaeShape) -> tuple[VaeLayer, ...]:
    """Lists the encoder before its middle: a convolution and stages of two residual blocks."""
    stages, staged = shape.channels("encode"), shape.shortcuts
    steps, given = [VaeLayer("convolution", shape.image_channels, stages[0])], stages[0]
    for index, channels in enumerate(stages):
        stage = _blocks(given, channels, 2)
        if index < len(stages) - 1:
            stage.append(VaeLayer("down", channels, channels))
        steps += [_stage(stage)] if staged else stage
        given = channels
    return tuple(steps)


def before_middle(shape: VaeShape, direction: str) -> tuple[VaeLayer, ...]:
    """Lists what precedes the attention and is sliced with it."""
    width = shape.middle_channels(direction)
    block = VaeLayer("residual", width, width)
    if direction == "encode":
        return (block,)
    return (VaeLayer("convolution", shape.latent_channels, width), block)


def after_middle(shape: VaeShape, direction: str) -> tuple[VaeLayer, ...]:
    """Lists what follows the attention and is sliced with it."""
    width = shape.middle_channels(direction)
    block = VaeLayer("residual", width, width)
    if direction == "decode":
        return (block,)
    return (block, VaeLayer("head", width, 2 * shape.latent_channels))


def intervals(
    steps: Sequence[VaeLayer], low: int, high: int, size: int | None = None
) -> list[Interval]:
    """Returns what each step needs so that rows [low, high) come out of the last one.

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
