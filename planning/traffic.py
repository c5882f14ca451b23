"""Bytes that the fused blocks move between their matrix products, counted from the kernels."""

from __future__ import annotations

from dataclasses import dataclass

from .memory import BYTES_PER_SCALE, QUANTIZED, TransformerShape
from .wish import Wish
from .work import TEXT_LAYERS

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
    def of(cls, wish: Wish) -> Pass:
        """The forward pass of a wish."""
        return cls(wish.transformer, wish.items, wish.prompt_tokens, wish.image_tokens)

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
