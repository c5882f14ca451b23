"""What a forward pass is asked for in a benchmark, and the least work that it is."""

from __future__ import annotations

from dataclasses import dataclass

from ..planning.times import TEXT_LAYERS, Work
from ..spec.formats import BYTES_PER_SCALE, QUANTIZED
from ..spec.transformer import (
    BLOCK_GEMMS,
    PIXELS_PER_TOKEN_SIDE,
    REFERENCE_TOKENS,
    TransformerShape,
)


@dataclass(frozen=True)
class Inputs:
    """What a forward pass is asked for.

    Args:
        width: pixels, as `height` divisible by 16.
        batch: images in one pass.
        text: text tokens of each.
        references: reference images of 1024x1024 of each; Edit-2511 modulates them as at timestep
            zero.
    """

    width: int
    height: int
    batch: int = 1
    text: int = 200
    references: int = 0

    @property
    def size(self) -> str:
        """As `--size` takes it."""
        return f"{self.width}x{self.height}"

    @property
    def image_tokens(self) -> int:
        """Tokens of one image that is painted."""
        return self.width // PIXELS_PER_TOKEN_SIDE * (self.height // PIXELS_PER_TOKEN_SIDE)

    @property
    def stream_tokens(self) -> int:
        """Tokens of one item's image stream, with those of its references."""
        return self.image_tokens + self.references * REFERENCE_TOKENS


def rope_axes(head_dim: int) -> tuple[int, int, int]:
    """How a head splits into frame, height and width: 16, 56 and 56 of the published 128."""
    frame = head_dim // 8
    side = (head_dim - frame) // 2
    return frame, side, side


def forward_work(shape: TransformerShape, inputs: Inputs, precision: str = "bf16") -> Work:
    """Counts the blocks of one forward pass.

    Each product and attention reads its inputs and weights once and writes its output once, in
    bf16 or, where the precision is fp8 or int8, reads one byte a value. What lies between them is
    not counted, and neither are the modulation's linears: their outputs depend on the timestep
    alone and can be kept.

    Args:
        precision: bf16, fp8 or int8.
    """
    size = 1 if precision in QUANTIZED else 2
    flops = moved = 0
    for name, (rows, columns) in BLOCK_GEMMS.items():
        n, k = rows * shape.dim, columns * shape.dim
        tokens = inputs.text if name.startswith(TEXT_LAYERS) else inputs.stream_tokens
        m = inputs.batch * tokens
        flops += 2 * m * n * k
        moved += (n * k + m * k) * size + 2 * m * n
        moved += BYTES_PER_SCALE * (n + m) if precision in QUANTIZED else 0
    joint = inputs.text + inputs.stream_tokens
    flops += 4 * inputs.batch * joint * joint * shape.dim
    moved += 4 * 2 * inputs.batch * joint * shape.dim
    return Work(shape.blocks * flops, shape.blocks * moved)
