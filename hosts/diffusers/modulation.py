"""The modulation table of one diffusers transformer, for the length of one marked run.

Nothing in diffusers says that weights have changed: merging a LoRA writes through `Parameter.data`,
which neither moves a weight nor counts its version up. A table therefore ends with its run, and
outside of a run there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel

from ...optimizations.blocks.block_form import blocks_of, is_changed, modulation_layers
from ...optimizations.fallback import Fallback
from ...optimizations.modulation import Entry, ModulationTable, TableFigures, compute_entry
from .layers import is_plain

Timesteps = Callable[[], Sequence[torch.Tensor]]

NO_RUN = Fallback("the call is outside `Optimized.run`")
NOT_PLAIN = Fallback("its layers are not plain linear layers")


class TransformerModulation:
    """Implements `optimizations.blocks.host.RunModulation`."""

    def __init__(self) -> None:
        self.figures = TableFigures()
        self._timesteps: Timesteps | None = None
        self._in_run = False
        self._table: ModulationTable | None = None

    def open_run(self, timesteps: Timesteps | None) -> None:
        """A marked run begins, whose scheduler has these timesteps."""
        self._timesteps, self._in_run, self._table = timesteps, True, None

    def close_run(self) -> None:
        """It is over; frees the table."""
        self._timesteps, self._in_run, self._table = None, False, None

    def start_run(self) -> None:
        """Begins the figures of another run."""
        self.figures = TableFigures()

    def lines(self) -> list[str]:
        """Lines about the run."""
        return self.figures.lines()

    def entry(
        self,
        transformer: QwenImageTransformer2DModel,
        given: dict[str, Any],
        embedding: torch.Tensor,
        batch: int,
    ) -> Entry:
        """The modulation of all blocks for a timestep embedding.

        Args:
            given: What the transformer was called with.
            embedding: (batch, D), or (2 batch, D) where the second half is for timestep 0.
        """
        blocks, figures = blocks_of(transformer), self.figures
        if self._table is None and self._in_run and not figures.fallback:
            if all(map(_is_plain, (layer.module for layer in modulation_layers(blocks)))):
                self._table = ModulationTable(blocks)
            else:
                figures.fallback = NOT_PLAIN
        if self._table is None:
            figures.fallback = figures.fallback or NO_RUN
            figures.direct += 1
            return compute_entry(blocks, embedding, batch)
        table = self._table
        before = table.hits, table.filled
        entry = table.entry(
            embedding, batch, schedule=lambda: self._schedule(transformer, given, embedding, batch)
        )
        figures.add(table, before)
        return entry

    def _schedule(
        self,
        transformer: QwenImageTransformer2DModel,
        given: dict[str, Any],
        embedding: torch.Tensor,
        batch: int,
    ) -> list[torch.Tensor]:
        """The embeddings of the run's timesteps, as the pipelines and the transformer compute them;
        none where more than the timestep reaches the embedding.
        """
        if self._timesteps is None or given.get("guidance") is not None:
            return []
        additional = given.get("additional_t_cond")
        more = () if additional is None else (additional,)
        embeddings = []
        for time in self._timesteps():
            time = time.expand(batch).to(given["hidden_states"]) / 1000
            time = time.to(embedding.dtype)
            if len(embedding) == 2 * batch:
                time = torch.cat([time, time * 0])
            embeddings.append(transformer.time_text_embed(time, embedding, *more))
        return embeddings


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether what a modulation layer gives depends on its weights and the timestep alone."""
    return (
        type(module) is torch.nn.Sequential
        and len(module) == 2
        and type(module[0]) is torch.nn.SiLU
        and is_plain(module[1])
        and not any(map(is_changed, (module, *module)))
    )
