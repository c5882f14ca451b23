"""What the optimization knows of one model with one set of patches on its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...optimizations.block_form import is_changed, misfit, token_layers
from ...optimizations.fused import choose_ops
from ...optimizations.modulation import ModulationTable
from ...optimizations.self_check import Check
from ...planning.memory import QUANTIZED, format_gib
from .forward import ForwardPass
from .layers import ComfyLayers

# A schedule of more steps is filled in as its timesteps come.
LONGEST_SCHEDULE = 64


class Prepared:
    """Kernels, check and table for one model in one run; between runs it holds no module of it.

    Args:
        model: ComfyUI's BaseModel.
        lossy_attention: Whether attention differs from exact attention by more than rounding.
    """

    def __init__(self, model: Any, lossy_attention: bool) -> None:
        blocks = blocks_of(model)
        layers = ComfyLayers()
        dtype, device = model.get_dtype_inference(), _device(model)
        ops, self._ops_reason = choose_ops(device)
        self.ops = ops
        faults = (misfit(block, dtype) for block in blocks)
        self.misfit = self._ops_reason if ops is None else next(filter(None, faults), "")
        read = [] if self.misfit else [layer for block in blocks for layer in token_layers(block)]
        kinds = list(map(layers.kind, read))
        formats = sorted(set(kinds) & set(QUANTIZED))
        self._gemms = [str(layers.gemm(format, device)) for format in formats]
        self._opaque, self._layers = kinds.count(None), len(kinds)
        self.check = Check(quantized=bool(formats) or lossy_attention)
        self._table: ModulationTable | None = None
        self._filled: set[tuple[int, int, bool]] = set()
        self._totals = "", 0, 0
        self.passes = self._fused = self._blocks = 0

    def count(self, forward_pass: ForwardPass) -> None:
        """Notes what the executor did in a forward pass."""
        self._fused += forward_pass.fused
        self._blocks += forward_pass.blocks
        if self._table is not None:
            table = self._table
            self._totals = format_gib(table.bytes), len(table), table.hits

    def table(self, model: Any) -> ModulationTable | None:
        """The modulation table; None where something else than the timestep changes its rows."""
        blocks = blocks_of(model)
        linears = (linear for block in blocks for linear in (block.img_mod[1], block.txt_mod[1]))
        patcher = model.current_patcher
        # Without a patcher nobody says when weights change, nor when the table may go.
        if patcher is None or patcher.current_hooks or any(map(is_changed, linears)):
            return None
        if self._table is None:
            self._table = ModulationTable(blocks)
        return self._table

    def drop_table(self) -> None:
        """Frees the table."""
        self._table = None
        self._filled.clear()

    def schedule(
        self, model: Any, t: torch.Tensor, options: dict[str, Any], extra: dict[str, Any]
    ) -> Callable[[dict[str, Any], ModulationTable], None]:
        """What fills a table with the run's schedule before its first step.

        Args:
            t: Sigmas as APPLY_MODEL wrappers get them, (batch,).
            options: The transformer_options; ComfyUI's samplers put the schedule into them.
            extra: The further conditions of the forward pass.
        """

        def fill(arguments: dict[str, Any], table: ModulationTable) -> None:
            sigmas = options.get("sample_sigmas")
            if sigmas is None or not 1 < len(sigmas) <= LONGEST_SCHEDULE + 1:
                return
            batch, zero = len(t), arguments["timestep_zero_index"] is not None
            # Of the schedule's length: the tensor itself is another one on every second card.
            kind = len(sigmas), batch, zero
            if kind in self._filled:
                return
            self._filled.add(kind)
            hidden, additional = arguments["hidden_states"], extra.get("additional_t_cond")
            if additional is not None:
                additional = additional.to(hidden.device)
            embeddings = []
            for sigma in sigmas[:-1].to(t):
                timestep = model.model_sampling.timestep(sigma.expand(batch)).float()
                if zero:
                    timestep = torch.cat([timestep, timestep * 0])
                embed = model.diffusion_model.time_text_embed
                embeddings.append(embed(timestep, hidden, additional))
            table.fill(embeddings, batch)

        return fill

    def lines(self) -> list[str]:
        """What ran, a line each."""
        lines = [
            f"blocks: fused, {self._fused} of {self._blocks} in {self.passes} forward passes "
            f"({self._ops_reason}); the check's largest difference was {self.check.worst:.2g}"
        ]
        lines += [f"layers: {gemm}" for gemm in self._gemms]
        if self._opaque:
            lines.append(f"layers: {self._opaque} of {self._layers} run ComfyUI's own way")
        size, entries, hits = self._totals
        if entries:
            lines.append(f"modulation: {entries} timesteps in a table of {size}, read {hits} times")
        else:
            lines.append("modulation: computed in each forward pass")
        return lines


def blocks_of(model: Any) -> Sequence[torch.nn.Module]:
    """The double-stream blocks of a BaseModel."""
    return tuple(model.diffusion_model.transformer_blocks)


def _device(model: Any) -> torch.device:
    patcher = model.current_patcher
    return next(model.parameters()).device if patcher is None else patcher.load_device
