"""The layers of Qwen-Image's VAE as tiles see them: how far each one reads.

The network is Wan 2.1's: widths of 1, 2, 4 and 4 times `dim`, three halvings, and one attention
over all latent pixels in the middle. Everything else reads at most a pixel to each side in a
convolution, and norms are per pixel, so that a tile with a margin gives what the whole gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PIXELS_PER_LATENT = 8

Kind = Literal["convolution", "residual", "attention", "up", "down", "head"]
Interval = tuple[int, int]


@dataclass(frozen=True)
class VaeShape:
    """The sizes that fix a VAE's activations.

    Args:
        dim: channels at full resolution: 96 in the published VAE.
        latent_channels: 16 in all of them.
        image_channels: 3, or 4 in Qwen-Image-Layered.
        padded_frames: the frames that a convolution over time reads of one image: 1 in ComfyUI,
            which cuts the kernel; 3 in diffusers, which pads the image and, of 16-bit tensors,
            norms and enlarges copies in fp32.
    """

    dim: int = 96
    latent_channels: int = 16
    image_channels: int = 3
    padded_frames: int = 1

    @property
    def middle_channels(self) -> int:
        """Channels at latent resolution, in the middle of the encoder and the decoder."""
        return 4 * self.dim


@dataclass(frozen=True)
class Step:
    """One layer that a tile runs through.

    Args:
        kind: "convolution" is one of 3x3; "residual" is two with norms, beside a shortcut;
            "attention" reads every pixel of the whole, but of its tile only those that it
            replaces; "up" doubles the pixels before a convolution; "down" is one of stride 2 that
            pads below and to the right; "head" is a norm and a convolution.
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
        margin = {"attention": 0, "residual": 2}.get(self.kind, 1)
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


def to_attention(shape: VaeShape, direction: str) -> tuple[Step, ...]:
    """From latents or pixels to what the attention reads."""
    before = before_middle(shape, direction)
    return before if direction == "decode" else (*down_steps(shape), *before)


def through_attention(shape: VaeShape, direction: str) -> tuple[Step, ...]:
    """The complete network."""
    attention = Step("attention", shape.middle_channels, shape.middle_channels)
    after = after_middle(shape, direction)
    after = (*after, *up_steps(shape)) if direction == "decode" else after
    return (*to_attention(shape, direction), attention, *after)


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
