"""The attention of a block whose tokens do not all read all tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

# (q, k, v, mask) -> (batch, queries, heads * head_dim), of q, k and v, (batch, tokens, heads,
# head_dim), and a mask that is added to the scores, or None; a mask of (1, 1, queries, keys) in
# bool says which keys a query reads.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


class Segment(NamedTuple):
    """Tokens that follow one another, and the keys that they read.

    Attributes:
        start, stop: The tokens.
        first, last: The keys, from `first` up to `last`.
        causal: Whether a token reads no key behind its own, which is as far from `last` as the
            token is from `stop`.
    """

    start: int
    stop: int
    first: int
    last: int
    causal: bool


def attend_segments(
    attend: Attend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    segments: Sequence[Segment],
) -> torch.Tensor:
    """Attends segment by segment, without a mask but for those that are causal.

    Args:
        q, k, v: (batch, tokens, heads, head_dim).
        mask: Of all tokens; unused with segments.
        segments: In the order of the tokens, all of them; none where all read all.

    Returns:
        (batch, tokens, heads * head_dim).
    """
    if not segments:
        return attend(q, k, v, mask)
    found = []
    for start, stop, first, last, causal in segments:
        mask = None
        if causal:
            queries, keys = stop - start, last - first
            mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=q.device)
            mask = mask.tril_(keys - queries)
        found.append(attend(q[:, start:stop], k[:, first:last], v[:, first:last], mask))
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def attend_masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Attends as `Attend` with a mask for each query, which no backend of this package takes."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
