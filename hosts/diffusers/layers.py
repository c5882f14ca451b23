"""Reads diffusers' linear layers and modulation for the block executor.

Plain layers and this package's quantized ones are read. Everything else runs itself: what PEFT,
bitsandbytes, torchao or a hook made of a layer keeps its own way.

Nothing in diffusers says that weights have changed: merging a LoRA writes through `Parameter.data`,
which neither moves a weight nor counts its version up. The modulation table therefore ends with a
marked run, and outside of one there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel

from ...families.registry import blocks_of, spec_of
from ...optimizations.blocks.block import LayerTensors
from ...optimizations.blocks.block_form import (
    DENSE,
    head_norms,
    part_of,
    token_layers,
)
from ...optimizations.inventory import is_changed
from ...optimizations.linear import Gemm
from ...optimizations.modulation import (
    Entry,
    ModulationTable,
    TableFigures,
    compute_entry,
    modulation_layers,
)
from ...spec.formats import RowFormat
from ...verdict import Verdict
from .quantized import QuantizedLinear

OWN_WAY = Verdict("some layers run diffusers' code")
APART = Verdict("some of the weights are on another device")
NO_RUN = Verdict("the call is outside `Optimized.run`")
NOT_PLAIN = Verdict("its layers are not plain linear layers")

Timesteps = Callable[[], Sequence[torch.Tensor]]


class DiffusersLayers:
    """Implements `optimizations.blocks.block.Layers` for one run."""

    def __init__(self) -> None:
        self._gemms: dict[str, Gemm] = {}
        self._addresses: list[int] | None = None  # of a layer of each block
        self._token: Hashable | None = None
        self.moving: Verdict | None = None

    def hold(self, blocks: Sequence[torch.nn.Module]) -> AbstractContextManager[Hashable | None]:
        # One layer of each block tells in every pass whether its weights have moved.
        if self._addresses is None or not (self.moving or self._addresses == _addresses(blocks)):
            found = self._look(blocks)
            self.moving = found if isinstance(found, Verdict) else None
            self._token = None if self.moving else found
            self._addresses = [] if self.moving else _addresses(blocks)
        return nullcontext(self._token)

    def _look(self, blocks: Sequence[torch.nn.Module]) -> Hashable | Verdict:
        if not all(map(token_layers, blocks)):
            return OWN_WAY
        norms = [norm for block in blocks for norm in head_norms(block)]
        layers = [layer for block in blocks for layer in token_layers(block)]
        if any(map(is_changed, norms)) or None in map(self.kind, layers):
            return OWN_WAY
        tensors = [norm.weight for norm in norms]
        for layer in layers:
            tensors += [*layer.parameters(), *layer.buffers()]
        if len({tensor.device for tensor in tensors}) > 1:
            return APART
        return hash(tuple((it.data_ptr(), it.dtype, it.shape, it.stride()) for it in tensors))

    def kind(self, layer: Any) -> str | RowFormat | None:
        kind = _kind_of(layer)
        if isinstance(kind, RowFormat):
            gemm = self._gemms.setdefault(kind.storage, layer.product)
            if gemm != layer.product:
                return None  # a format has one GEMM here, and this layer was given another
        return kind

    def tensors(self, layer: Any, like: torch.Tensor) -> AbstractContextManager[LayerTensors]:
        scale = getattr(layer, "weight_scale", None)
        return nullcontext(LayerTensors(layer.weight, scale, layer.bias))

    def low_rank(self, layer: torch.nn.Module) -> None:
        return None  # a layer of PEFT's runs itself

    is_foreign = staticmethod(is_changed)

    def rounds(self, layer: torch.nn.Module) -> bool:
        # A LoRA over a plain weight does not.
        weight = getattr(layer, "weight", None)
        dense = type(weight) is torch.nn.Parameter and weight.dtype.itemsize > 1
        return not (dense and weight.is_floating_point())

    def norm_weight(self, norm: Any, like: torch.Tensor) -> torch.Tensor:
        return norm.weight

    def gemm(self, format: str, device: torch.device) -> Gemm:
        return self._gemms[format]


def _addresses(blocks: Sequence[torch.nn.Module]) -> list[int]:
    first = spec_of(blocks[0]).query
    return [part_of(block, first).weight.data_ptr() for block in blocks]


def _kind_of(layer: torch.nn.Module) -> str | RowFormat | None:
    if is_changed(layer):
        return None
    if _is_plain(layer):
        return DENSE
    if type(layer) is QuantizedLinear and isinstance(layer.product, Gemm):
        return layer.form
    return None


def _is_plain(layer: torch.nn.Module) -> bool:
    # torchao and tensor parallelism replace it by weights of their own classes.
    return type(layer) is torch.nn.Linear and type(layer.weight) is torch.nn.Parameter


class TransformerModulation:
    """Implements `HostPass.modulation`."""

    def __init__(self) -> None:
        self.figures = TableFigures()
        self._timesteps: Timesteps | None = None
        self._in_run = False
        self._table: ModulationTable | None = None

    def open_run(self, timesteps: Timesteps | None) -> None:
        self._timesteps, self._in_run, self._table = timesteps, True, None

    def close_run(self) -> None:
        self._timesteps, self._in_run, self._table = None, False, None

    def start_run(self) -> None:
        self.figures = TableFigures()

    def lines(self) -> list[str]:
        return self.figures.lines()

    def entry(
        self,
        transformer: QwenImageTransformer2DModel,
        given: dict[str, Any],
        embedding: torch.Tensor,
        batch: int,
    ) -> Entry:
        """Returns the modulation of all blocks for a timestep embedding."""
        blocks, figures = blocks_of(transformer), self.figures
        if self._table is None and self._in_run and not figures.fallback:
            if all(_is_modulation(layer.module) for layer in modulation_layers(blocks)):
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
        """Computes the embeddings of the run's timesteps, as the pipelines and the transformer do;
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


def _is_modulation(module: torch.nn.Module) -> bool:
    # What it gives then depends on its weights and the timestep alone.
    return (
        type(module) is torch.nn.Sequential
        and len(module) == 2
        and type(module[0]) is torch.nn.SiLU
        and _is_plain(module[1])
        and not any(map(is_changed, (module, *module)))
    )
