"""Normalized attention guidance (https://arxiv.org/abs/2505.21179, as diffusers#13089): what the
image reads is pushed away from what it reads with a negative prompt in the prompt's place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .blocks.attend import Attend
from .reference import wide_dtype


class Guidance(NamedTuple):
    """How far the image's rows are pushed.

    Attributes:
        scale: How far from the negative prompt; at 1 nothing changes.
        tau: How many times the norm of a row may grow.
        alpha: The share of the result that is guided.
        on: For each item of a batch, whether it is guided; empty for all.
    """

    scale: float
    tau: float
    alpha: float
    on: tuple[bool, ...] = ()

    def guide(self, positive: Tensor, negative: Tensor) -> Tensor:
        """Pushes rows, with the norms that are the sums of their magnitudes.

            g = negative + scale * (positive - negative)
            g = g * tau * |positive| / (|g| + 1e-7) where |g| > tau * |positive|
            out = alpha * g + (1 - alpha) * positive

        Args:
            positive: What attention gives, (batch, rows, heads * head_dim).
            negative: The same of the negative prompt, written over.
        """
        guided = torch.lerp(negative, positive, self.scale, out=negative)
        was, grown = (
            torch.linalg.vector_norm(it, 1, -1, keepdim=True, dtype=wide_dtype(it))
            for it in (positive, guided)
        )
        guided.mul_(torch.where(grown > self.tau * was, self.tau * was / (grown + 1e-7), 1.0))
        out = torch.lerp(positive, guided, self.alpha, out=guided)
        for item, on in enumerate(self.on):
            if not on:
                out[item] = positive[item]
        return out


class JointGuidance(NamedTuple):
    """Guidance where the tokens are so many of the prompt, of the negative prompt, and the image's,
    and no prompt reads the other.
    """

    guidance: Guidance
    positive: int
    negative: int

    def guides(self, q: Tensor, k: Tensor) -> bool:
        return q.shape == k.shape and k.shape[1] > self.positive + self.negative

    def attend(
        self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Attends as `Attend`, by two calls of another."""
        cut, texts = self.positive, self.positive + self.negative
        both = []
        for text in (slice(0, cut), slice(cut, texts)):
            parts = [torch.cat([it[:, text], it[:, texts:]], 1) for it in (q, k, v)]
            if mask is not None:
                mask_of = torch.cat([mask[..., text], mask[..., texts:]], -1)
            both.append(attend(*parts, None if mask is None else mask_of))
        positive, negative = both
        image = self.guidance.guide(positive[:, cut:], negative[:, self.negative :])
        return torch.cat([positive[:, :cut], negative[:, : self.negative], image], 1)


class PrefixGuidance(NamedTuple):
    """Guidance of an image that reads keys and values of a prompt beside its own, and in its place
    those of a negative prompt.

    Attributes:
        guidance: How far.
        keys, values: Of the negative prompt, (batch, tokens, heads, head_dim), as of a `Prefix`.
        image: Tokens of the image.
        whole: Tokens of prompt and image, which the image alone reads.
        first: Whether the image's are the first.
        negative: Of the tokens that are there, those of the negative prompt.
    """

    guidance: Guidance
    keys: Tensor
    values: Tensor
    image: int
    whole: int
    first: bool = False
    negative: int = 0

    def guides(self, q: Tensor, k: Tensor) -> bool:
        return (q.shape[1], k.shape[1]) == (self.image, self.whole)

    def attend(
        self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Attends as `Attend`, with one more call for the image."""
        positive = attend(q, k, v, mask)
        if not self.guides(q, k):
            return positive
        own = slice(0, self.image) if self.first else slice(self.whole - self.image, None)
        parts = (
            torch.cat([part, it[:, own]], 1) for part, it in ((self.keys, k), (self.values, v))
        )
        return self.guidance.guide(positive, attend(q, *parts, None))
