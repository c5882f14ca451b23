"""Attention in slices, for cards and processors without any better: exact, in bounded memory."""

from __future__ import annotations

import torch

from .request import ANY, Backend

# The scores of 40,000 tokens and 24 heads would take 143 GiB in fp32.
SCORE_BYTES = 2**28


def slices(heads: int, tokens: int, score_bytes: int = SCORE_BYTES) -> tuple[int, int]:
    """How many heads and queries to take at once.

    Whole heads while one fits, else queries of one head; at least one query, whatever it takes.
    """
    rows = score_bytes // (4 * tokens)
    if rows >= tokens:
        return min(heads, rows // tokens), tokens
    return 1, max(rows, 1)


def sliced(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Softmax of q @ k.T / sqrt(head_dim) + mask, times v, in fp32 with one rounding at the end."""
    batch, tokens, heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    heads_at_once, rows = slices(heads, tokens)
    for item in range(batch):
        for head in range(0, heads, heads_at_once):
            these = (item, slice(None), slice(head, head + heads_at_once))
            keys = k[these].permute(1, 2, 0).float()  # (heads, head_dim, tokens)
            values = v[these].transpose(0, 1).float()
            for row in range(0, tokens, rows):
                queries = q[these][row : row + rows].transpose(0, 1).float()
                scores = (queries * head_dim**-0.5) @ keys
                if mask is not None:
                    scores += mask[item]
                scores -= scores.amax(-1, keepdim=True)
                weights = scores.exp_()
                part = (weights @ values) / weights.sum(-1, keepdim=True)
                out[these][row : row + rows] = part.transpose(0, 1)
    return out.flatten(2)


SLICED = Backend("sliced", sliced, card=ANY, cpu=ANY, other=ANY, whole_scores=True)
