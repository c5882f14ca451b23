"""Computes the attention of a block in which some tokens read only a part of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..fused import GuidedRows


class Attend(Protocol):
    """Attends with q, k and v of a block, (batch, tokens, heads, head_dim)."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, /, *, lse: bool = False
    ) -> Any:
        """Gives (batch, queries, heads * head_dim); with `lse`, for guidance, what
        `Backend.gives_lse` says, or None where it cannot.

        Args:
            mask: Added to the scores; of (1, 1, queries, keys) in bool, which keys a query reads.
        """


class BlockGuidance(Protocol):
    """Guides the attention of one block, as the classes of `nag`."""

    @property
    def negative(self) -> int:
        """Counts the tokens of the negative prompt."""

    def guides(self, q: Tensor, k: Tensor) -> bool:
        """Whether attention with such queries and keys is guided."""

    def attend(
        self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mix: GuidedRows
    ) -> Tensor:
        """Attends as `Attend`, by calls of another."""


class Segment(NamedTuple):
    """Tokens from `start` up to `stop`, and the keys from `first` up to `last` that they read."""

    start: int
    stop: int
    first: int
    last: int
    # whether a token reads no key behind its own, which is as far from `last` as the token is from
    # `stop`
    causal: bool


def attend_parts(
    attend: Attend,
    guidance: BlockGuidance | None,
    segments: Sequence[Segment],
    guided_rows: GuidedRows,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Attends as `Attend`, guided and segment by segment; only causal segments have a mask."""
    if guidance is not None:
        attend = partial(guidance.attend, attend, mix=guided_rows)
    if not segments:
        return attend(q, k, v, mask)
    found = []
    for start, stop, first, last, causal in segments:
        mask = None
        queries, keys = stop - start, last - first
        if causal and queries > 1:
            mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=q.device)
            mask = mask.tril_(keys - queries)
        found.append(attend(q[:, start:stop], k[:, first:last], v[:, first:last], mask))
    return found[0] if len(found) == 1 else torch.cat(found, 1)
