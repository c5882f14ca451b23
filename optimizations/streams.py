"""What the fused kernels are told about a block's two streams: their rows, modulation and rotation.

Text and image tokens of a batch are rows of one matrix, in stream order: the text tokens of item 0,
of item 1 and so on, then the image tokens of item 0, of item 1 and so on. Each stream is then one
contiguous matrix for a GEMM, whatever the batch. Attention wants the tokens of an item side by
side, in joint order: text, then image. With a batch of one the two orders are the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tokens(NamedTuple):
    """How many tokens there are of each kind.

    Attributes:
        batch: Items of the batch.
        text: Text tokens of one item.
        image: Image tokens of one item, those of reference images included.
        zero_from: The first image token that is modulated as at timestep 0; `image` where there is
            none. Edit-2511 modulates its reference images so.
    """

    batch: int
    text: int
    image: int
    zero_from: int

    @property
    def joint(self) -> int:
        """Tokens of one item."""
        return self.text + self.image

    @property
    def text_rows(self) -> int:
        """Rows of the text stream; the image stream's follow."""
        return self.batch * self.text

    @property
    def rows(self) -> int:
        """Rows of both streams."""
        return self.batch * self.joint


class Modulation(NamedTuple):
    """Shift, scale and gate of one half of a block (attention or MLP), for both streams.

    Attributes:
        text: (batch, 3 D), any row stride: shift, scale and gate side by side.
        image: (batch, 3 D), or (2 batch, 3 D) where `Tokens.zero_from` is less than `image`: the
            second half of the rows is for timestep 0.
    """

    text: torch.Tensor
    image: torch.Tensor


class QKNorm(NamedTuple):
    """RMSNorm weights of one head, each (head_dim,), of the image stream and of the text stream."""

    query: torch.Tensor
    key: torch.Tensor
    text_query: torch.Tensor
    text_key: torch.Tensor


class Rotary(NamedTuple):
    """Rotation of each token in joint order, each (1 or batch, joint, head_dim / 2), contiguous.

    Elements 2 i and 2 i + 1 of a head turn by the angle i.
    """

    cos: torch.Tensor
    sin: torch.Tensor
