"""What one forward pass of the transformer has to compute and to move, counted from its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..spec import (
    BLOCK_GEMMS,
    BYTES_PER_SCALE,
    PIXELS_PER_TOKEN_SIDE,
    QUANTIZED,
    REFERENCE_TOKENS,
    TransformerShape,
)
from .request import RunRequest

TEXT_LAYERS = ("attn.add_", "attn.to_add_out", "txt_mlp.")


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


class Work(NamedTuple):
    """Counted work; every program has to do at least this.

    Attributes:
        flops: Of products and attention, a multiplication and an addition counted apart.
        bytes: Read and written once.
    """

    flops: int
    bytes: int


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


# Bytes that the fused blocks move between their matrix products, counted from the kernels.

WIDE = 2  # bytes of a bf16 number
ROTATION = 4  # of an fp32 cosine or sine
# Expanding a quantized weight to bf16: read and written once, then scaled in place.
EXPAND = 1 + WIDE + 2 * WIDE


@dataclass(frozen=True)
class Pass:
    """One forward pass.

    Args:
        shape: of the transformer.
        items: images in it.
        text: text tokens of each, with those that references add.
        image: image tokens of each, with those of references.
    """

    shape: TransformerShape
    items: int
    text: int
    image: int

    @classmethod
    def of(cls, request: RunRequest) -> Pass:
        """The forward pass of a request."""
        return cls(request.transformer, request.items, request.prompt_tokens, request.image_tokens)

    @property
    def joint(self) -> int:
        """Tokens of one item."""
        return self.text + self.image

    @property
    def rows(self) -> int:
        """Tokens of all items."""
        return self.items * self.joint

    def products(self, layer: str) -> tuple[int, int]:
        """(how many, rows of each) of the matrix products of a layer of `BLOCK_GEMMS`.

        Attention wants text and image of an item side by side, and what it reads and gives is
        multiplied item by item; the MLPs take a stream at once.
        """
        tokens = self.text if layer.startswith(TEXT_LAYERS) else self.image
        return (self.items, tokens) if layer.startswith("attn.") else (1, self.items * tokens)


def block_bytes(work: Pass, precision: str, *, expanded: bool = False) -> int:
    """What the kernels between the products of one block read and write.

    Of a token of width D: gate, residual, norm and modulation, twice, read two rows and write two,
    the second in the precision of what reads it; the norm of q and k and their rotation read and
    write both; in fp8 and int8 the attention's output and the MLP's hidden rows, four times as
    wide, are quantized, the latter with the GELU, which in bf16 is in the product's epilogue.

    Args:
        expanded: whether the card does not multiply the precision, so that activations stay bf16
            and outputs of products are copied.
    """
    dim = work.shape.dim
    narrow = precision in QUANTIZED and not expanded
    each = 2 * norm_bytes(dim, narrow) + 4 * WIDE * dim + ROTATION * work.shape.head_dim
    if narrow:
        each += (WIDE + 1) * dim + (WIDE + 1) * 4 * dim + 2 * BYTES_PER_SCALE
    elif expanded:
        # q, k, v, the output, the hidden rows and theirs are copied; the GELU runs by itself.
        each += 2 * WIDE * (3 + 1 + 4 + 1) * dim + 2 * WIDE * 4 * dim
    return work.rows * each


def norm_bytes(dim: int, narrow: bool) -> int:
    """Of gate, residual, norm and modulation of one token, quantized where it is narrow."""
    return 3 * WIDE * dim + (dim + BYTES_PER_SCALE if narrow else WIDE * dim)
