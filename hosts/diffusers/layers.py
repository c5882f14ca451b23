"""diffusers' linear layers as the block executor takes them.

Plain layers and this package's quantized ones are read. Everything else runs itself: what PEFT,
bitsandbytes, torchao or a hook made of a layer keeps its own way.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from ...optimizations.blocks.block import DENSE, LayerTensors
from ...optimizations.blocks.block_form import head_norms, is_changed, token_layers
from ...optimizations.fallback import Fallback
from ...optimizations.linear import Gemm
from ...spec.formats import RowFormat
from .quantized import QuantizedLinear

OWN_WAY = Fallback("some layers run diffusers' own way")
APART = Fallback("some of the weights are elsewhere")


class DiffusersLayers:
    """Implements `optimizations.blocks.block.Layers` for one run."""

    def __init__(self) -> None:
        self._gemms: dict[str, Gemm] = {}
        self._addresses: list[int] | None = None  # of a layer of each block
        self._token: Hashable | None = None
        self.moving: Fallback | None = None

    def hold(self, blocks: Sequence[torch.nn.Module]) -> AbstractContextManager[Hashable | None]:
        if self._addresses is None or not (self.moving or self._addresses == _addresses(blocks)):
            found = self._look(blocks)
            self.moving = found if isinstance(found, Fallback) else None
            self._token = None if self.moving else found
            self._addresses = [] if self.moving else _addresses(blocks)
        return nullcontext(self._token)

    def _look(self, blocks: Sequence[torch.nn.Module]) -> Hashable | Fallback:
        """At every layer: a token of the addresses and layouts of all tensors."""
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

    def kind(self, layer: torch.nn.Module) -> str | RowFormat | None:
        kind = kind_of(layer)
        if isinstance(kind, RowFormat):
            gemm = self._gemms.setdefault(kind.storage, layer.product)
            if gemm != layer.product:
                return None  # a format has one GEMM here, and this layer was given another
        return kind

    def tensors(
        self, layer: torch.nn.Module, like: torch.Tensor
    ) -> AbstractContextManager[LayerTensors]:
        scale = getattr(layer, "weight_scale", None)
        return nullcontext(LayerTensors(layer.weight, scale, layer.bias))

    def low_rank(self, layer: torch.nn.Module) -> None:
        return None  # a layer of PEFT's runs itself

    @staticmethod
    def any_foreign(layers: Sequence[torch.nn.Module]) -> bool:
        return any(map(is_changed, layers))

    def rounds(self, layer: torch.nn.Module) -> bool:
        # A LoRA over a plain weight does not.
        if kind_of(layer) == DENSE:
            return False
        weight = getattr(layer, "weight", None)
        dense = type(weight) is torch.nn.Parameter and weight.dtype.itemsize > 1
        return not (dense and weight.is_floating_point())

    def norm_weight(self, norm: torch.nn.Module, like: torch.Tensor) -> torch.Tensor:
        return norm.weight

    def gemm(self, format: str, device: torch.device) -> Gemm:
        return self._gemms[format]


def _addresses(blocks: Sequence[torch.nn.Module]) -> list[int]:
    return [block.attn.to_q.weight.data_ptr() for block in blocks]


def kind_of(layer: torch.nn.Module) -> str | RowFormat | None:
    """As `optimizations.blocks.block.Layers.kind`, whatever multiplies other layers."""
    if is_changed(layer):
        return None
    if is_plain(layer):
        return DENSE
    if type(layer) is QuantizedLinear and isinstance(layer.product, Gemm):
        return layer.form
    return None


def is_plain(layer: torch.nn.Module) -> bool:
    """Whether a layer is PyTorch's own with a weight that is an ordinary tensor: torchao and tensor
    parallelism put classes of their own in its place.
    """
    return type(layer) is torch.nn.Linear and type(layer.weight) is torch.nn.Parameter
