"""Bypass: computes a LoRA next to the layers that it changes and leaves their weights alone.

Core has this as "bypass". It is not used, because in ComfyUI 0.33 a second LoRA takes the first
one's place, or with a key of its own recurses without end after a reload (injections are removed in
the order in which they were made); it stays with the modules of the first model when `clone` makes
another one (torch.compile under dynamic VRAM, MultiGPU); it ignores `dora_scale`; and its copies on
the card are not counted as memory.

Here the small matrices are an additional model, which the host counts, loads, moves and frees, and
an APPLY_MODEL wrapper wraps the layers' `forward` for the length of one call only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import comfy.ops
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from comfy.weight_adapter import LoKrAdapter, LoRAAdapter, WeightAdapterBase

from ....errors import UnavailableError
from ..load.linear import AroundLinear

BYPASS_KEY = "qwen_l40s_lora"
# The second tells newer ComfyUI (#16862), whose fused linear layers read weights past `forward`,
# that this forward counts.
REPLACED = ("forward", "comfy_force_forward")


class LowRank(torch.nn.Module):
    """y + scale * up(down(x)), for x [..., K] and y [..., N]."""

    def __init__(self, up: torch.Tensor, down: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.up, self.down, self.scale = _linear(up), _linear(down), scale

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.add(y, self.up(self.down(x)), alpha=self.scale)


class Kronecker(torch.nn.Module):
    """y + scale * (outer (x) inner) x, for outer [N1, K1], inner [N2, K2] and x [..., K1 * K2]."""

    def __init__(self, outer: torch.Tensor, inner: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.outer, self.inner, self.scale = _linear(outer), _linear(inner), scale

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        halves = self.inner(x.unflatten(-1, (self.outer.in_features, -1))).transpose(-1, -2)
        return torch.add(y, self.outer(halves).transpose(-1, -2).flatten(-2), alpha=self.scale)


def bypass_module(
    adapter: WeightAdapterBase, strength: float, dtype: torch.dtype
) -> torch.nn.Module | None:
    """The adapter as a module in `dtype`; None for a kind that must be merged (LoHa, DoRA, and
    everything that is made for a convolution).
    """
    weights = adapter.weights
    if isinstance(adapter, LoRAAdapter):
        up, down, alpha, *others = weights
        if any(other is not None for other in others):
            return None
        scale = 1.0 if alpha is None else alpha / len(down)
        return LowRank(up.flatten(1).to(dtype), down.flatten(1).to(dtype), strength * scale)
    if isinstance(adapter, LoKrAdapter):
        outer, inner, alpha, outer_a, outer_b, inner_a, inner_b, *others = weights
        if any(other is not None for other in others):
            return None
        # Core divides alpha by the inner rank where both factors have one.
        rank = next((len(factor) for factor in (inner_b, outer_b) if factor is not None), None)
        scale = 1.0 if alpha is None or rank is None else alpha / rank
        outer = outer_a.float() @ outer_b.float() if outer is None else outer
        inner = inner_a.float() @ inner_b.float() if inner is None else inner
        return Kronecker(outer.to(dtype), inner.to(dtype), strength * scale)
    return None


def add_bypass(patcher: ModelPatcher, changes: Mapping[str, torch.nn.Module]) -> None:
    """Adds changes, by the dotted name of their layer in the model, to those that are there."""
    layers = BypassLayers(changes)
    added = _patcher(layers, patcher.load_device, patcher.offload_device)
    others = patcher.get_additional_models_with_key(BYPASS_KEY)
    patcher.set_additional_models(BYPASS_KEY, [*others, added])
    if not patcher.get_wrappers(WrappersMP.APPLY_MODEL, BYPASS_KEY):
        patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, BYPASS_KEY, run_bypass)


class BypassLayers(torch.nn.Module):
    """Holds the changes of one LoRA; a ModuleDict takes no names with dots."""

    def __init__(self, changes: Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        self.names = tuple(changes)
        self.changes = torch.nn.ModuleList(changes.values())


def run_bypass(executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """APPLY_MODEL wrapper: one forward with every change of the patcher that samples."""
    model = executor.class_obj
    wrapped: list[tuple[torch.nn.Module, dict[str, Any]]] = []
    try:
        for loras in model.current_patcher.get_additional_models_with_key(BYPASS_KEY):
            for name, change in zip(loras.model.names, loras.model.changes, strict=True):
                layer = model.get_submodule(name)
                own = layer.__dict__
                wrapped.append((layer, {name: own[name] for name in REPLACED if name in own}))
                layer.forward = BypassForward(layer.forward, change)
                layer.comfy_force_forward = True
        return executor(*args, **kwargs)
    finally:
        for layer, before in reversed(wrapped):
            for name in REPLACED:
                layer.__dict__.pop(name, None)
            layer.__dict__.update(before)


class BypassForward:
    """The `forward` of a layer with a bypass.

    Attributes:
        forward: What it was before.
    """

    def __init__(self, forward: Callable[..., torch.Tensor], change: torch.nn.Module) -> None:
        self.forward = forward
        self._change = change

    def __call__(
        self,
        x: torch.Tensor,
        input_act: str | None = None,
        act_weight: torch.Tensor | torch.nn.Module | None = None,
        residual: torch.Tensor | None = None,
        residual_scale: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        if others:
            raise UnavailableError(
                f"This ComfyUI calls linear layers with {', '.join(others)}, which a LoRA in "
                "bypass does not know: apply the LoRA with lora_mode merge."
            )
        around = AroundLinear(input_act, act_weight, residual, residual_scale)
        return around.run(lambda x: self._change(x, self.forward(x)), x)


def _patcher(
    layers: BypassLayers, load_device: torch.device, offload_device: torch.device
) -> ModelPatcher:
    # Never the dynamic class: torch.compile cannot trace a weight that is faulted in.
    patcher = ModelPatcher(layers, load_device=load_device, offload_device=offload_device)
    # For MultiGPU, which loads every model once more.
    patcher.cached_patcher_init = (_second_patcher, (layers, load_device, offload_device))
    return patcher


def _second_patcher(
    layers: BypassLayers,
    load_device: torch.device,
    offload_device: torch.device,
    disable_dynamic: bool = True,  # ComfyUI passes it; there is no other kind
) -> ModelPatcher:
    return _patcher(copy.deepcopy(layers), load_device, offload_device)


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    rows, columns = weight.shape
    linear = comfy.ops.manual_cast.Linear(columns, rows, bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    return linear
