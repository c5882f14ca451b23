"""Computes the attention of a block in which some tokens read only a part of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

# (q, k, v, mask) -> (batch, queries, heads * head_dim), of q, k and v, (batch, tokens, heads,
# head_dim), and a mask that is added to the scores, or None; a mask of (1, 1, queries, keys) in
# bool says which keys a query reads. Guidance calls it with `lse=True` too: then it gives what
# `Backend.gives_lse` says, or None where it cannot.
Attend = Callable[..., Any]


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


def attend_parts(
    attend: Attend,
    guidance: Any,
    segments: Sequence[Segment],
    guided_rows: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Attends with q, k and v of a block, guided and segment by segment; segments have no mask,
    but for causal ones.

    Args:
        guidance, segments: As of a `Step`.
        guided_rows: As of `Ops`.
        q, k, v: (batch, tokens, heads, head_dim).

    Returns:
        (batch, tokens, heads * head_dim).
    """
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
