"""Computes normalized attention guidance (https://arxiv.org/abs/2505.21179, as diffusers#13089):
what the image reads is pushed away from what it reads with a negative prompt.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .blocks.attend import Attend
from .fused import GuidedRows
from .reference import AttentionPart, Guidance, guided_rows

# Keys, values, and the mask of these keys.
Keys = tuple[Tensor, Tensor, "Tensor | None"]


def attend_both(attend: Attend, q: Tensor, image: Keys, *texts: Keys) -> list[AttentionPart]:
    """Attends to the image with each of two texts beside it; to the image once where `attend` gives
    log-sum-exps, by which parts of the keys are merged.

    Args:
        q: (batch, tokens, heads, head_dim).

    Returns:
        For each text, in memory of its own; with log-sum-exps of the texts, and those of the image.
    """
    shared = attend(q, *image, lse=True)
    if shared is not None:
        return [*(attend(q, *text, lse=True) for text in texts), shared]
    found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    for text in texts:
        k, v = (torch.cat(parts, 1) for parts in zip(text[:2], image[:2], strict=True))
        mask = None if image[2] is None else torch.cat([text[2], image[2]], -1)
        found.append((attend(q, k, v, mask), None))
    return found


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
        mix: GuidedRows = guided_rows,
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
    """Guides an image that reads a prompt's keys and values, then those of a negative prompt."""

    guidance: Guidance
    # keys, values: of the negative prompt, (batch, tokens, heads, head_dim), as of a `Prefix`
    keys: Tensor
    values: Tensor
    image: int
    whole: int  # tokens of prompt and image, which the image alone reads
    first: bool = False  # whether the image's are the first
    negative: int = 0  # of the tokens that are there, those of the negative prompt

    def guides(self, q: Tensor, k: Tensor) -> bool:
        return (q.shape[1], k.shape[1]) == (self.image, self.whole)

    def attend(
        self,
        attend: Attend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        mix: GuidedRows = guided_rows,
    ) -> Tensor:
        """Attends as `JointGuidance.attend`, with more calls for the image."""
        if not self.guides(q, k):
            return attend(q, k, v, mask)
        cut = self.image if self.first else self.whole - self.image
        parts = [(k[:, it], v[:, it], None) for it in (slice(cut), slice(cut, None))]
        image, text = parts if self.first else reversed(parts)
        negative = self.keys, self.values, None
        return mix(self.guidance, attend_both(attend, q, image, text, negative))
