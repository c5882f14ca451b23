"""diffusers' linear layers as the block executor takes them.

Plain layers and this package's quantized ones are read. Everything else runs itself: what PEFT,
bitsandbytes, torchao or a hook made of a layer keeps its own way.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ...optimizations.block import DENSE, LayerTensors
from ...optimizations.block_form import is_changed
from ...optimizations.linear import Gemm
from ...spec import QUANTIZED
from .quantized import QuantizedLinear


class DiffusersLayers:
    """Implements `optimizations.block.Layers` for one run."""

    def __init__(self) -> None:
        self._gemms: dict[str, Gemm] = {}

    def kind(self, layer: torch.nn.Module) -> str | None:
        kind = kind_of(layer)
        if kind in QUANTIZED and self._gemms.setdefault(kind, layer.product) != layer.product:
            return None  # a format has one GEMM here, and this layer was given another
        return kind

    def tensors(
        self, layer: torch.nn.Module, like: torch.Tensor
    ) -> AbstractContextManager[LayerTensors]:
        scale = getattr(layer, "weight_scale", None)
        return nullcontext(LayerTensors(layer.weight, scale, layer.bias))

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


def kind_of(layer: torch.nn.Module) -> str | None:
    """ "dense", "fp8" or "int8"; None for a layer that has to run itself."""
    if is_changed(layer):
        return None
    if is_plain(layer):
        return DENSE
    if type(layer) is QuantizedLinear and isinstance(layer.product, Gemm):
        return layer.product.format
    return None


def is_plain(layer: torch.nn.Module) -> bool:
    """Whether a layer is PyTorch's own with a weight that is an ordinary tensor: torchao and tensor
    parallelism put classes of their own in its place.
    """
    return type(layer) is torch.nn.Linear and type(layer.weight) is torch.nn.Parameter
