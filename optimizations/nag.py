"""Normalized attention guidance (https://arxiv.org/abs/2505.21179, as diffusers#13089): what the
image reads is pushed away from what it reads with a negative prompt in the prompt's place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
            negative: The same of the negative prompt, written over with the result.
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


# Keys, values, and the mask of these keys.
Keys = tuple[Tensor, Tensor, "Tensor | None"]
# What attention gives, (batch, tokens, heads * head_dim), and the logarithms of the sums of
# exp(scores), (batch, heads, tokens), where it is to a part of the keys.
Part = tuple[Tensor, "Tensor | None"]


def attend_both(attend: Attend, q: Tensor, image: Keys, *texts: Keys) -> list[Part]:
    """Attends to the image with each of two texts beside it; to the image once where `attend` gives
    log-sum-exps, by which parts of the keys are merged.

    Args:
        attend: An `Attend`.
        q: (batch, tokens, heads, head_dim).

    Returns:
        For each text, in memory of its own; with log-sum-exps of the texts, and those of the image.
    """
    shared = attend(q, *image, lse=True)
    if shared is not None:
        return [*(attend(q, *text, lse=True) for text in texts), shared]
    found = []
    for text in texts:
        k, v = (torch.cat(parts, 1) for parts in zip(text[:2], image[:2], strict=True))
        mask = None if image[2] is None else torch.cat([text[2], image[2]], -1)
        found.append((attend(q, k, v, mask), None))
    return found


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """Merges attention to two parts of the keys into that to both, in fp32.

        out = (out1 * exp(lse1) + out2 * exp(lse2)) / (exp(lse1) + exp(lse2))

    Args:
        first, second: A `Part` each, of which the second is written over with the result.
    """
    (out, lse), (other, lse_2) = first, second
    share = (lse - lse_2).sigmoid().transpose(1, 2).unsqueeze(-1)
    part, into = (it.unflatten(2, (lse.shape[1], -1)) for it in (out, other))
    torch.addcmul(part * share, into, 1 - share, out=into)
    return other


def guided_rows(
    guidance: Guidance, parts: Sequence[Part], first: int = 0, second: int = 0
) -> Tensor:
    """Merges what `attend_both` gives and guides it; the plain-torch twin of `kernels.guided_rows`.

    Args:
        parts: Of the prompt, of the negative prompt, which is written over, and of the image.
        first: How many of the rows are the prompt's: they stay as they are with it.
        second: Up to where rows are the negative prompt's: they stay as they are with that.
    """
    (positive, _), (out, _), *shared = parts
    for image in shared:
        for text in parts[:2]:
            merge(image, text)
    guidance.guide(positive[:, second:], out[:, second:])
    out[:, :first] = positive[:, :first]
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
        self,
        attend: Attend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        mix: Callable[..., Tensor] = guided_rows,
    ) -> Tensor:
        """Attends as `Attend`, by calls of another; `mix` is `guided_rows` or its kernel."""
        cut, texts = self.positive, self.positive + self.negative
        # Masks in memory of their own: a slice may begin where kernels cannot read it.
        parts = (
            (k[:, it], v[:, it], None if mask is None else mask[..., it].clone())
            for it in (slice(texts, None), slice(cut), slice(cut, texts))
        )
        return mix(self.guidance, attend_both(attend, q, *parts), cut, texts)


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
        self,
        attend: Attend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        mix: Callable[..., Tensor] = guided_rows,
    ) -> Tensor:
        """Attends as `JointGuidance.attend`, with more calls for the image."""
        if not self.guides(q, k):
            return attend(q, k, v, mask)
        cut = self.image if self.first else self.whole - self.image
        parts = [(k[:, it], v[:, it], None) for it in (slice(cut), slice(cut, None))]
        image, text = parts if self.first else reversed(parts)
        negative = self.keys, self.values, None
        return mix(self.guidance, attend_both(attend, q, image, text, negative))
