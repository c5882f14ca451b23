"""What the optimization knows of one model with one set of patches on its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...optimizations.block_form import misfit, token_layers
from ...optimizations.fused import choose_ops
from ...optimizations.self_check import Check
from ...planning.memory import QUANTIZED
from .forward import ForwardPass
from .layers import ComfyLayers
from .modulation import ModelModulation


class Prepared:
    """Kernels and check for one model in one run; between runs it holds no module of it.

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
        self.modulation = ModelModulation.of(model)
        self.passes = self._fused = self._blocks = 0

    def count(self, forward_pass: ForwardPass) -> None:
        """Notes what the executor did in a forward pass."""
        self._fused += forward_pass.fused
        self._blocks += forward_pass.blocks

    def lines(self) -> list[str]:
        """What ran, a line each."""
        lines = [
            f"blocks: fused, {self._fused} of {self._blocks} in {self.passes} forward passes "
            f"({self._ops_reason}); the check's largest difference was {self.check.worst:.2g}"
        ]
        lines += [f"layers: {gemm}" for gemm in self._gemms]
        if self._opaque:
            lines.append(f"layers: {self._opaque} of {self._layers} run ComfyUI's own way")
        return lines + self.modulation.lines()


def blocks_of(model: Any) -> Sequence[torch.nn.Module]:
    """The double-stream blocks of a BaseModel."""
    return tuple(model.diffusion_model.transformer_blocks)


def _device(model: Any) -> torch.device:
    patcher = model.current_patcher
    return next(model.parameters()).device if patcher is None else patcher.load_device
