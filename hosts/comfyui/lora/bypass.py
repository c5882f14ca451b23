"""Bypass: computes a LoRA next to the layers that it changes and leaves their weights alone.

Core has this as "bypass". It is not used, because in ComfyUI 0.33 a second LoRA takes the first
one's place, or with a key of its own recurses without end after a reload (injections are removed in
the order in which they were made); it stays with the modules of the first model when `clone` makes
another one (torch.compile under dynamic VRAM, MultiGPU); it ignores `dora_scale`; and its copies on
the card are not counted as memory.

Here the small matrices of all LoRAs are an additional model, which the host counts, loads, moves
and frees, and an APPLY_MODEL wrapper wraps the layers' `forward` for the length of one call only.
The block executor does not call these: it reads the matrices (`Beside`).
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import comfy.ops
import comfy.weight_adapter
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ....errors import UnavailableError
from ....families.registry import first_reader
from ....optimizations.blocks.block_form import LowRank, is_changed
from ....patches import patched, put
from ....spec.sizes import RANKS_AT_ONCE
from ..linear import AroundLinear

BYPASS_KEY = "qwen_l40s_lora"


class Matrices(NamedTuple):
    """One LoRA of one layer, with strength and alpha in `up`: up [N, R] and down [R, K]."""

    up: torch.Tensor
    down: torch.Tensor


class BesideLayer(torch.nn.Module):
    """y + up(down(x)) for x [..., K] and y [..., N], of all LoRAs of a layer.

    Args:
        up: [N, R].
        down: A linear layer [R or more, K], which others share and `BypassLayers` holds.
        start: The first row of it that is this layer's.
        rank: Of the LoRAs; what `up` has more is zeros.
    """

    def __init__(self, up: torch.Tensor, down: torch.nn.Linear, start: int, rank: int) -> None:
        super().__init__()
        self.up, self.start, self.rank = _linear(up), start, rank
        self.__dict__["down"] = down  # held, moved and counted once

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        down, _ = comfy.ops.cast_bias_weight(self.down, x)
        down = down[self.start : self.start + self.up.in_features]
        return y + self.up(torch.nn.functional.linear(x, down))

    @property
    def matrices(self) -> Matrices:
        """On the CPU, as they are."""
        down = self.down.weight[self.start : self.start + self.rank]
        return Matrices(self.up.weight[:, : self.rank].detach().cpu(), down.detach().cpu())


class Kronecker(torch.nn.Module):
    """y + scale * (outer (x) inner) x, for outer [N1, K1], inner [N2, K2] and x [..., K1 * K2]."""

    def __init__(self, outer: torch.Tensor, inner: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.outer, self.inner, self.scale = _linear(outer), _linear(inner), scale

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        halves = self.inner(x.unflatten(-1, (self.outer.in_features, -1))).transpose(-1, -2)
        return torch.add(y, self.outer(halves).transpose(-1, -2).flatten(-2), alpha=self.scale)


def bypass_change(
    adapter: comfy.weight_adapter.WeightAdapterBase, strength: float, dtype: torch.dtype
) -> Matrices | Kronecker | None:
    """The adapter in `dtype`; None for a kind that must be merged (LoHa, DoRA, and everything that
    is made for a convolution).
    """
    weights = adapter.weights
    if isinstance(adapter, comfy.weight_adapter.LoRAAdapter):
        up, down, alpha, *others = weights
        if any(other is not None for other in others):
            return None
        up = (up.flatten(1).float() * (strength * scale_of(alpha, len(down)))).to(dtype)
        return Matrices(up, down.flatten(1).to(dtype))
    if isinstance(adapter, comfy.weight_adapter.LoKrAdapter):
        outer, inner, alpha, outer_a, outer_b, inner_a, inner_b, *others = weights
        if any(other is not None for other in others):
            return None
        # Core divides alpha by the inner rank where both factors have one.
        rank = next((len(factor) for factor in (inner_b, outer_b) if factor is not None), None)
        scale = scale_of(alpha, rank)
        outer = outer_a.float() @ outer_b.float() if outer is None else outer
        inner = inner_a.float() @ inner_b.float() if inner is None else inner
        return Kronecker(outer.to(dtype), inner.to(dtype), strength * scale)
    return None


def scale_of(alpha: float | None, rank: int | None) -> float:
    """The factor that core puts on a product of matrices of a rank."""
    return 1.0 if alpha is None or rank is None else alpha / rank


def in_rows(change: Matrices | Kronecker, start: int, rows: int) -> Matrices | Kronecker:
    """A change of some rows of a layer as one of all its `rows`: those before `start` and behind
    it stay as they are.
    """
    if isinstance(change, Matrices):
        return change._replace(up=_padded(change.up, start, rows))
    # A row of `outer` makes as many rows as `inner` has.
    inner = change.inner.out_features
    outer = _padded(change.outer.weight.detach(), start // inner, rows // inner)
    return Kronecker(outer, change.inner.weight.detach(), change.scale)


def _padded(matrix: torch.Tensor, start: int, rows: int) -> torch.Tensor:
    return torch.nn.functional.pad(matrix, (0, 0, start, rows - start - len(matrix)))


def add_bypass(patcher: ModelPatcher, changes: Iterable[tuple[str, Matrices | Kronecker]]) -> None:
    """Adds changes, by the dotted name of their layer in the model, to those that are there."""
    there = bypass_models(patcher)
    before = [change for layers in there for change in layers.all()]
    count = 1 + sum(layers.count for layers in there)
    layers = BypassLayers([*before, *changes], count)
    patcher.set_additional_models(
        BYPASS_KEY, [_patcher(layers, patcher.load_device, patcher.offload_device)]
    )
    if not patcher.get_wrappers(WrappersMP.APPLY_MODEL, BYPASS_KEY):
        patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, BYPASS_KEY, run_bypass)


def bypass_models(patcher: ModelPatcher | None) -> list[BypassLayers]:
    """What lies beside the layers of a patcher's model."""
    found = () if patcher is None else patcher.get_additional_models_with_key(BYPASS_KEY)
    return [added.model for added in found]


def _joined(pairs: Sequence[Matrices]) -> Matrices:
    """One pair of them all, with zeros up to a multiple of RANKS_AT_ONCE."""
    up, down = torch.cat([it.up for it in pairs], dim=1), torch.cat([it.down for it in pairs])
    missing, pad = -len(down) % RANKS_AT_ONCE, torch.nn.functional.pad
    return Matrices(pad(up, (0, missing)), pad(down, (0, 0, 0, missing)))


class BypassLayers(torch.nn.Module):
    """Holds what all LoRAs of a patcher change.

    Args:
        changes: (name of a layer, change), as often as there are LoRAs.
        count: Of the LoRAs.

    Attributes:
        count: As given.
        names: Of the layers, for each of `changes`; a ModuleDict takes no names with dots.
        downs: That the `BesideLayer` of `changes` share.
    """

    def __init__(self, changes: Iterable[tuple[str, Matrices | Kronecker]], count: int = 1) -> None:
        super().__init__()
        self.count = count
        pairs: dict[str, list[Matrices]] = defaultdict(list)
        others: list[tuple[str, Kronecker]] = []
        for name, change in changes:
            if isinstance(change, Matrices):
                pairs[name].append(change)
            else:
                others.append((name, change))
        readers: dict[str, list[str]] = defaultdict(list)
        for name in pairs:
            readers[first_reader(name)].append(name)
        self.downs = torch.nn.ModuleList()
        found: list[tuple[str, torch.nn.Module]] = []
        for names in readers.values():
            joined = [_joined(pairs[name]) for name in names]
            down = _linear(torch.cat([pair.down for pair in joined]))
            self.downs.append(down)
            start = 0
            for name, pair in zip(names, joined, strict=True):
                rank = sum(len(it.down) for it in pairs[name])
                low = BesideLayer(pair.up, down, start, rank)
                start += low.up.in_features
                found.append((name, low))
        found += others
        self.names = tuple(name for name, _ in found)
        self.changes = torch.nn.ModuleList(change for _, change in found)
        self._linears = (*self.downs, *(low.up for _, low in found if isinstance(low, BesideLayer)))
        self._placed: tuple[Any, list[weakref.ref]] | None = None

    def all(self) -> list[tuple[str, Matrices | Kronecker]]:
        """The changes that it was made of, those of a layer as one."""
        return [
            (
                name,
                change.matrices if isinstance(change, BesideLayer) else copy.deepcopy(change).cpu(),
            )
            for name, change in zip(self.names, self.changes, strict=True)
        ]

    def of(self, model: torch.nn.Module) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
        """(layer of the model, change) of each; finding the layers takes 5 ms the first time."""
        if self._placed is None or self._placed[0]() is not model:
            # Weakly: the model has to go when it goes.
            layers = [weakref.ref(model.get_submodule(name)) for name in self.names]
            self._placed = weakref.ref(model), layers
        layers = [layer() for layer in self._placed[1]]
        if None in layers:
            self._placed = None
            return self.of(model)
        return list(zip(layers, self.changes, strict=True))

    def is_there(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether all pairs of matrices are on a device, in a dtype."""
        weights = (linear._parameters["weight"] for linear in self._linears)
        return all(weight.device == device and weight.dtype == dtype for weight in weights)

    @property
    def place(self) -> Hashable:
        """Changes with every way in which the host moves it."""
        ends = (self._linears[0], self._linears[-1]) if self._linears else ()
        return weakref.ref(self), *(linear._parameters["weight"].data_ptr() for linear in ends)


class Beside:
    """What lies beside the layers of ComfyUI's BaseModel in one pass.

    Attributes:
        lows: Of each layer that is changed: what the executor adds. None where the layer runs
            itself, because a change is not two matrices, or because matrices are elsewhere.
        place: Changes where the host moves them.
    """

    def __init__(self, model: Any) -> None:
        self.lows: dict[torch.nn.Module, LowRank | None] = {}
        place: list[Hashable] = []
        patcher = model.current_patcher
        for layers in bypass_models(patcher):
            there = layers.is_there(patcher.load_device, model.get_dtype_inference())
            place += (there, layers.place)
            for layer, change in layers.of(model):
                low = None
                if there and layer not in self.lows and isinstance(change, BesideLayer):
                    weights = change.down.weight, change.start, change.up.weight
                    low = LowRank(*weights)
                self.lows[layer] = low
        self.place = tuple(place)

    def runs_itself(self, layer: torch.nn.Module) -> bool:
        """Whether the layer has a change that only its `forward` knows."""
        changed = isinstance(layer.__dict__.get("forward"), BypassForward) or layer in self.lows
        return changed and self.lows.get(layer) is None


def is_foreign(layer: torch.nn.Module) -> bool:
    """Whether somebody else than a LoRA of ours has changed what a layer computes."""
    forward = layer.__dict__.get("forward")
    if not isinstance(forward, BypassForward) or layer._forward_hooks or layer._forward_pre_hooks:
        return is_changed(layer)
    while isinstance(forward, BypassForward):
        forward = forward.forward
    return getattr(forward, "__func__", None) is not type(layer).forward


def is_of_comfyui(layer: torch.nn.Module) -> bool:
    """Whether ComfyUI's own LoRA in bypass has changed what a layer computes."""
    owner = getattr(layer.__dict__.get("forward"), "__self__", None)
    return type(owner).__module__ == "comfy.weight_adapter.bypass"


def run_bypass(executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """APPLY_MODEL wrapper: one forward with every change of the patcher that samples."""
    with bypassed(executor.class_obj):
        return executor(*args, **kwargs)


@contextmanager
def bypassed(model: Any) -> Iterator[None]:
    """Puts every change of the patcher that samples into the layers of a BaseModel."""
    with patched("bypass", _changes(model)):
        yield


def _changes(model: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    for layers in bypass_models(model.current_patcher):
        for layer, change in layers.of(model):
            own = layer.__dict__  # past Module.__setattr__
            yield own, "forward", BypassForward(layer.forward, change)
            # By this newer ComfyUI (#16862), whose fused linear layers read weights past `forward`,
            # knows that this forward counts.
            yield own, "comfy_force_forward", True


class BypassForward:
    """The `forward` of a layer with a bypass."""

    def __init__(self, forward: Callable[..., torch.Tensor], change: torch.nn.Module) -> None:
        self.forward = forward
        self._change = change

    def leave(self) -> None:
        self._change = lambda _, y: y

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
    second = _second_patcher, (layers, load_device, offload_device)
    put("second load", patcher, cached_patcher_init=second)
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
