"""The VAE's middle in slices: the one place where every latent pixel sees every other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from ..planning.vae_steps import Interval
from .vae_tiles import Layer, Run


@dataclass(frozen=True)
class Middle:
    """A residual block, attention, and a residual block of a host.

    Args:
        first, attention, last: the host's own, (B, C, 1, height, width) to the same.
        qkv: the attention's norm and projection, (B, C, 1, height, width) to
            (B, 3 C, 1, height, width).
        project: the attention's last layer, (B, C, 1, height, width) to the same.
    """

    first: Layer
    attention: Layer
    last: Layer
    qkv: Layer
    project: Layer

    def attend(
        self, hidden: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """The attention of some pixels, (1, C, 1, rows, columns), to (1, 1, pixels, C)."""
        query = self._split(hidden)[0].contiguous()
        seen = F.scaled_dot_product_attention(query, keys, values)
        return self.project(seen.transpose(-1, -2).reshape(hidden.shape)) + hidden

    def put(self, hidden: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes the keys and values of some pixels, (1, C, 1, rows, columns)."""
        _, key, value = self._split(hidden)
        keys.copy_(key)
        values.copy_(value)

    def _split(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        together = self.qkv(hidden).flatten(2).transpose(1, 2)
        return together[:, None].chunk(3, dim=-1)


def sliced(middle: Middle, before: Run, after: Run, rows: int) -> tuple[Layer, Layer, Layer]:
    """The attention and what directly precedes and follows it, in slices of so many rows.

    Each layer takes and gives a whole (1, channels, 1, height, width), up to rounding the host's;
    the attention works in place.
    """
    return (
        partial(_in_strips, before, rows),
        partial(_attend_in_strips, middle, rows),
        partial(_in_strips, after, rows),
    )


def _in_strips(run: Run, rows: int, source: torch.Tensor) -> torch.Tensor:
    height, width = source.shape[-2:]
    out = None
    for strip in _strips(height, rows):
        result = run.tile(source, (strip, (0, width)))
        if out is None:
            out = result.new_empty((1, result.shape[1], 1, height, width))
        out[..., slice(*strip), :] = result
        del result
    return out


def _attend_in_strips(middle: Middle, rows: int, hidden: torch.Tensor) -> torch.Tensor:
    height, width = hidden.shape[-2:]
    keys = hidden.new_empty((1, 1, height * width, hidden.shape[1]))
    values = torch.empty_like(keys)
    for low, high in _strips(height, rows):
        pixels = slice(low * width, high * width)
        middle.put(hidden[..., low:high, :], keys[:, :, pixels], values[:, :, pixels])
    # A strip's queries come from its own pixels alone, so that the result takes their place.
    for low, high in _strips(height, rows):
        hidden[..., low:high, :] = middle.attend(hidden[..., low:high, :], keys, values)
    return hidden


def _strips(height: int, rows: int) -> Iterator[Interval]:
    for low in range(0, height, rows):
        yield low, min(low + rows, height)
