"""Computes a LoRA next to the layers that it changes, and leaves their weights alone (bypass).

A LoRA is one of the MODEL's patches, as any node adds it: nodes that save, merge or extract read
patches. During a run, patches that a merge would damage are taken out of the patcher that samples,
and are computed: patches of quantized weights, and patches that were asked for as bypass.

ComfyUI 0.33 has another "bypass", which is not used. A second LoRA replaces the first. It stays
with the first model's modules where `clone` makes another one. It ignores `dora_scale`. Its copies
on the card are not counted as memory, and no node that saves or merges knows it.

Here the small matrices of all LoRAs are an additional model, which ComfyUI counts, loads, moves and
frees. An APPLY_MODEL wrapper wraps the layers' `forward` for one call. The block executor does not
call these: it reads the matrices (`Beside`).
"""

from __future__ import annotations

import copy
import uuid
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import comfy.ops
import comfy.utils
import comfy.weight_adapter
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrappersMP
from comfy.quant_ops import QuantizedTensor

from ....caches import remembered
from ....errors import UnavailableError
from ....families.registry import first_reader
from ....optimizations.blocks.block_form import LowRank
from ....optimizations.inventory import is_changed
from ....optimizations.patches import ABSENT, patched, put, swap
from ....spec.sizes import RANKS_AT_ONCE
from ..linear import AroundLinear
from ..record import harmless
from .few_steps import judge_run, show_few_steps

BYPASS_KEY = "qwen_l40s_lora"
# The highest product of the two ranks of a LoHa that is computed: a pair of that rank adds a sixth
# to the work of a layer 3,072 wide.
LOHA_RANK = 256


Patch = tuple[Any, ...]  # (strength, change, factor of the weight, offset, function), as in core


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
    """

    def __init__(self, up: torch.Tensor, down: torch.nn.Linear, start: int) -> None:
        super().__init__()
        self.up, self.start = _linear(up), start
        self.__dict__["down"] = down  # held, moved and counted once

    def forward(self, x: torch.Tensor, y: torch.Tensor, strength: float = 1.0) -> torch.Tensor:
        down, _ = comfy.ops.cast_bias_weight(self.down, x)
        down = down[self.start : self.start + self.up.in_features]
        return torch.add(y, self.up(torch.nn.functional.linear(x, down)), alpha=strength)


class Kronecker(torch.nn.Module):
    """y + scale * (outer (x) inner) x, for outer [N1, K1], inner [N2, K2] and x [..., K1 * K2]."""

    def __init__(self, outer: torch.Tensor, inner: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.outer, self.inner, self.scale = _linear(outer), _linear(inner), scale

    def forward(self, x: torch.Tensor, y: torch.Tensor, strength: float = 1.0) -> torch.Tensor:
        halves = self.inner(x.unflatten(-1, (self.outer.in_features, -1))).transpose(-1, -2)
        added = self.outer(halves).transpose(-1, -2).flatten(-2)
        return torch.add(y, added, alpha=self.scale * strength)


def bypass_change(
    adapter: comfy.weight_adapter.WeightAdapterBase, strength: float, dtype: torch.dtype
) -> Matrices | Kronecker | None:
    """Returns the adapter in `dtype`; None for a kind that must be merged (DoRA, a LoHa of a high
    rank, and everything that is made for a convolution).
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
        if inner.dim() != 2:
            return None
        return Kronecker(outer.to(dtype), inner.to(dtype), strength * scale)
    if isinstance(adapter, comfy.weight_adapter.LoHaAdapter):
        up, down, alpha, other_up, other_down, *others = weights
        if any(other is not None for other in others) or len(down) * len(other_down) > LOHA_RANK:
            return None
        scale = strength * scale_of(alpha, len(down))
        # (A B) * (C D), value by value, is one product of the rank of both: column i of A times
        # column j of C, row i of B times row j of D (Khatri-Rao).
        up = (up.float()[:, :, None] * other_up.float()[:, None]).flatten(1)
        down = (down.float()[:, None] * other_down.float()[None]).flatten(0, 1)
        return Matrices((up * scale).to(dtype), down.to(dtype))
    return None


def _is_sum(adapter: comfy.weight_adapter.WeightAdapterBase) -> bool:
    """Returns whether an adapter's change is the same for every weight: without `dora_scale`, and
    of no other shape than the weight.
    """
    if isinstance(adapter, comfy.weight_adapter.LoRAAdapter):
        return adapter.weights[4] is None and adapter.weights[5] is None
    if isinstance(adapter, (comfy.weight_adapter.LoHaAdapter, comfy.weight_adapter.LoKrAdapter)):
        return adapter.weights[-1] is None
    return False


def scale_of(alpha: float | None, rank: int | None) -> float:
    """Returns the factor that core puts on a product of matrices of a rank."""
    return 1.0 if alpha is None or rank is None else alpha / rank


def in_rows(change: Matrices | Kronecker, start: int, rows: int) -> Matrices | Kronecker:
    """Returns a change of some rows, from `start` on, as one of all `rows` of the layer."""
    if isinstance(change, Matrices):
        return change._replace(up=_padded(change.up, start, rows))
    # A row of `outer` makes as many rows as `inner` has.
    inner = change.inner.out_features
    outer = _padded(change.outer.weight.detach(), start // inner, rows // inner)
    return Kronecker(outer, change.inner.weight.detach(), change.scale)


def _padded(matrix: torch.Tensor, start: int, rows: int) -> torch.Tensor:
    return torch.nn.functional.pad(matrix, (0, 0, start, rows - start - len(matrix)))


# What a patch of ours has as an attribute: how it is applied, whatever the weight is.
MODE = "qwen_l40s_lora_mode"
# What a run takes from the patcher of a MODEL into its own: a node that changes one of these has
# made a clone, or has changed it in place.
FACTS = (
    *("patches_uuid", "object_patches", "weight_wrapper_patches", "model_options", "attachments"),
    *("additional_models", "callbacks", "wrappers", "injections", "load_device"),
)
SAMPLING = "qwen_l40s_sampling"


class SplitPatches(NamedTuple):
    merged: dict[str, list[Patch]]  # {key: patches} that ComfyUI merges
    # {hook's reference: {key: patches}} that ComfyUI merges while the hook is on
    hooks: dict[Any, dict[str, list[Patch]]]
    bypass: tuple[ModelPatcher, ...]  # what is computed: of all LoRAs, and of each hook's
    rounded: int  # quantized weights that a merge rounds again
    token: uuid.UUID  # the `patches_uuid` of `merged` alone


# By the patches_uuid, which clones with the same patches share. A run takes its hooks' patches away
# and leaves that as it is.
_splits: WeakKeyDictionary[uuid.UUID, dict[frozenset[Any], SplitPatches]] = remembered(
    WeakKeyDictionary()
)


def compute_loras(patcher: ModelPatcher, key: str = BYPASS_KEY) -> None:
    """Has every run of a patcher, and of its clones, compute LoRAs that a merge would damage, and
    lets hooks and merges of two MODELs read quantized weights.
    """
    if outer_sample not in patcher.get_all_wrappers(WrappersMP.OUTER_SAMPLE):
        patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, key, outer_sample)
        patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, key, run_bypass)
        patcher.add_callback_with_key(CallbacksMP.ON_CLONE, key, _readable)
        _readable(None, patcher)


def _readable(_: ModelPatcher | None, patcher: ModelPatcher) -> None:
    """Reads the patches of what is an attribute, as an ON_CLONE callback. ComfyUI's method fails on
    the scale and the marker that a quantized layer has in its state dict alone.
    """
    own = weakref.ref(patcher)  # a cycle would keep the model until a collection

    def get_key_patches(filter_prefix: str | None = None) -> dict[str, list[Any]]:
        patcher, method = own(), type(own()).get_key_patches
        found = patcher.model_state_dict().items()
        there = {name: it for name, it in found if _is_attribute(patcher.model, name)}
        with patched([(patcher.__dict__, "model_state_dict", lambda: there)]):
            return method(patcher, filter_prefix)

    put(patcher, get_key_patches=get_key_patches)


def _is_attribute(model: torch.nn.Module, name: str) -> bool:
    try:
        comfy.utils.get_attr(model, name)
    except AttributeError:
        return False
    return True


def outer_sample(executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Runs one sampling run with the patcher that has other LoRAs (OUTER_SAMPLE)."""
    guider = executor.class_obj
    before = guider.model_patcher
    with harmless():
        judge_run(guider, *args)
    put(guider, model_patcher=sampling_patcher(before))
    try:
        output = executor(*args, **kwargs)
    finally:
        put(guider, model_patcher=before)
    show_few_steps(guider)
    return output


def sampling_patcher(patcher: ModelPatcher) -> ModelPatcher:
    """Returns the patcher that samples: itself where ComfyUI merges all patches, else a clone, the
    same in each run.
    """
    found = split_patches(patcher)
    if not found.bypass:
        return patcher
    facts, clone = _leaves([found.token, *(getattr(patcher, name) for name in FACTS)]), None
    if SAMPLING in patcher.__dict__:
        known, clone = patcher.__dict__[SAMPLING]
        clone = clone if known == facts else None
    if clone is None:
        swap(patcher.__dict__, SAMPLING, ABSENT)  # gone before others load
        clone = patcher.clone()
        # Not this one, which would keep itself alive by it.
        put(clone, patches=found.merged, patches_uuid=found.token, parent=patcher.parent)
        clone.set_additional_models(BYPASS_KEY, [added.clone() for added in found.bypass])
        swap(patcher.__dict__, SAMPLING, (facts, clone))
    # Of this run.
    put(clone, hook_patches=found.hooks, hook_mode=patcher.hook_mode)
    return clone


def _leaves(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _leaves(it)) for key, it in value.items())
    return tuple(map(_leaves, value)) if isinstance(value, (list, tuple)) else id(value)


def split_patches(patcher: ModelPatcher) -> SplitPatches:
    """Splits the patches of a MODEL and of its hooks into what is merged and what is computed."""
    known = _splits.setdefault(patcher.patches_uuid, {})
    found = known.get(refs := frozenset(patcher.hook_patches))
    if found is None:
        merged, layers = _split(patcher.model, patcher.patches)
        hooks = {ref: _split(patcher.model, it, ref) for ref, it in patcher.hook_patches.items()}
        computed = [it for it in (layers, *(its for _, its in hooks.values())) if it is not None]
        bypass = tuple(_patcher(it, patcher.load_device, patcher.offload_device) for it in computed)
        left = {ref: patches for ref, (patches, _) in hooks.items()}
        weights = (comfy.utils.get_attr(patcher.model, key) for key in merged)
        rounded = sum(map(is_quantized, weights))
        found = known[refs] = SplitPatches(merged, left, bypass, rounded, uuid.uuid4())
    return found


def _split(
    model: Any, patches: Mapping[str, Sequence[Patch]], hook: Any = None
) -> tuple[dict[str, list[Patch]], BypassLayers | None]:
    merged: dict[str, list[Patch]] = {}
    changes: list[Any] = []
    count = 0
    for key, its in patches.items():
        computed = _computed(model, key, its, hook)
        count = max(count, len(computed))
        changes += computed.values()
        if left := [it for place, it in enumerate(its) if place not in computed]:
            merged[key] = left
    return merged, BypassLayers(changes, count, hook) if changes else None


def _computed(
    model: Any, key: str, patches: Sequence[Patch], hook: Any
) -> dict[int, tuple[str, Matrices | Kronecker]]:
    """Returns {place among the patches of a weight: (layer, change)} of those that are computed."""
    name, _, part = key.rpartition(".")
    if part != "weight" or not any(map(_is_adapter, patches)):
        return {}
    # One that depends on the weight, as a DoRA does, depends on the patches before it.
    if not all(map(_adds, patches)):
        return {}
    layer = comfy.utils.get_attr(model, name)
    dtype = model.get_dtype_inference()
    damages = is_quantized(layer.weight) or (hook and not hook_merges(layer, part))
    found = {}
    for place, (strength, adapter, _, offset, _) in enumerate(patches):
        mode = getattr(adapter, MODE, "bypass" if damages else "merge")
        if mode == "merge" or not _is_adapter(patches[place]) or not hasattr(layer, "in_features"):
            continue
        change = bypass_change(adapter, strength, dtype)
        if change is not None:
            if offset is not None:
                change = in_rows(change, offset[1], layer.out_features)
            found[place] = name, change
    return found


def _is_adapter(patch: Patch) -> bool:
    return isinstance(patch[1], comfy.weight_adapter.WeightAdapterBase)


def _adds(patch: Patch) -> bool:
    """Returns whether a patch adds the same to every weight, and so may be added in any order."""
    _, change, of_model, offset, function = patch
    if of_model != 1.0 or function is not None or (offset is not None and offset[0]):
        return False
    if isinstance(change, comfy.weight_adapter.WeightAdapterBase):
        return _is_sum(change)
    return isinstance(change, tuple) and (len(change) == 1 or change[0] == "diff")


def is_quantized(weight: torch.Tensor) -> bool:
    return isinstance(weight, QuantizedTensor) or weight.itemsize == 1


def hook_merges(layer: torch.nn.Module, name: str) -> bool:
    """Returns whether ComfyUI can merge what a hook changes into a layer's weight or bias during a
    run: it cannot in a model that has quantized layers.
    """
    return not hasattr(layer, f"set_{name}")


def bypass_models(patcher: ModelPatcher | None) -> dict[BypassLayers, float]:
    """Returns {what lies beside the layers of a patcher's model now: its strength}. What is a
    hook's is there while the hook is on, with the strength of its keyframe.
    """
    if patcher is None:
        return {}
    on = patcher.current_hooks.hooks if patcher.current_hooks else ()
    strengths = {None: 1.0, **{hook.hook_ref: hook.strength for hook in on}}
    found = (added.model for added in patcher.get_additional_models_with_key(BYPASS_KEY))
    return {it: strengths[it.hook] for it in found if it.hook in strengths}


def state_of(patcher: ModelPatcher | None) -> Hashable:
    """Changes with what lies beside the layers, and with its strength."""
    return tuple((weakref.ref(it), strength) for it, strength in bypass_models(patcher).items())


def _joined(pairs: Sequence[Matrices]) -> Matrices:
    """Joins all into one pair of matrices, with zeros up to a multiple of RANKS_AT_ONCE."""
    up, down = torch.cat([it.up for it in pairs], dim=1), torch.cat([it.down for it in pairs])
    missing, pad = -len(down) % RANKS_AT_ONCE, torch.nn.functional.pad
    return Matrices(pad(up, (0, missing)), pad(down, (0, 0, 0, missing)))


class BypassLayers(torch.nn.Module):
    """Holds what all LoRAs of a patcher change.

    Args:
        changes: (name of a layer, change), as often as there are LoRAs.
        hook: The reference of the hook that switches them; None where they are always on.
    """

    def __init__(
        self,
        changes: Iterable[tuple[str, Matrices | Kronecker]],
        count: int = 1,
        hook: Any = None,
    ) -> None:
        super().__init__()
        self.count, self.hook = count, hook
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
        self.downs = torch.nn.ModuleList()  # that the `BesideLayer` of `changes` share
        found: list[tuple[str, torch.nn.Module]] = []
        for names in readers.values():
            joined = [_joined(pairs[name]) for name in names]
            down = _linear(torch.cat([pair.down for pair in joined]))
            self.downs.append(down)
            start = 0
            for name, pair in zip(names, joined, strict=True):
                low = BesideLayer(pair.up, down, start)
                start += low.up.in_features
                found.append((name, low))
        found += others
        # of the layers, for each of `changes`; a ModuleDict takes no names with dots
        self.names = tuple(name for name, _ in found)
        self.changes = torch.nn.ModuleList(change for _, change in found)
        self._linears = (*self.downs, *(low.up for _, low in found if isinstance(low, BesideLayer)))
        self._placed: tuple[Any, list[weakref.ref]] | None = None

    def of(self, model: torch.nn.Module) -> list[tuple[Any, Any]]:
        """Returns (layer, change) of each; finding the layers takes 5 ms the first time."""
        if self._placed is None or self._placed[0]() is not model:
            # Weakly: the model has to go when it goes.
            layers = [weakref.ref(model.get_submodule(name)) for name in self.names]
            self._placed = weakref.ref(model), layers
        there = [layer() for layer in self._placed[1]]
        if None in there:
            self._placed = None
            return self.of(model)
        return list(zip(there, self.changes, strict=True))

    def is_there(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Returns whether all pairs of matrices are on a device, in a dtype."""
        weights = (linear._parameters["weight"] for linear in self._linears)
        return all(weight.device == device and weight.dtype == dtype for weight in weights)

    @property
    def place(self) -> Hashable:
        """Changes with every way in which the host moves it."""
        ends = (self._linears[0], self._linears[-1]) if self._linears else ()
        return weakref.ref(self), *(linear._parameters["weight"].data_ptr() for linear in ends)


class Beside:
    """What lies beside the layers of ComfyUI's BaseModel in one pass."""

    def __init__(self, model: Any) -> None:
        # Of each layer that is changed: what the executor adds. None where the layer runs itself,
        # because a change is not two matrices or has a strength, or because matrices are elsewhere.
        self.lows: dict[torch.nn.Module, LowRank | None] = {}
        place: list[Hashable] = []
        patcher = model.current_patcher
        for layers, strength in bypass_models(patcher).items():
            there = layers.is_there(patcher.load_device, model.get_dtype_inference())
            there = there and strength == 1
            place += (there, layers.place)
            for layer, change in layers.of(model):
                low = None
                if there and layer not in self.lows and isinstance(change, BesideLayer):
                    down: Any = change.down
                    low = LowRank(down.weight, change.start, change.up.weight)
                self.lows[layer] = low
        self.place = tuple(place)  # changes where the host moves them

    def runs_itself(self, layer: torch.nn.Module) -> bool:
        """Returns whether the layer has a change that only its `forward` knows."""
        changed = isinstance(layer.__dict__.get("forward"), BypassForward) or layer in self.lows
        return changed and self.lows.get(layer) is None


def is_foreign(layer: torch.nn.Module) -> bool:
    """Returns whether somebody else than a LoRA of ours has changed what a layer computes."""
    forward = layer.__dict__.get("forward")
    if not isinstance(forward, BypassForward) or layer._forward_hooks or layer._forward_pre_hooks:
        return is_changed(layer)
    while isinstance(forward, BypassForward):
        forward = forward.forward
    return getattr(forward, "__func__", None) is not type(layer).forward


def run_bypass(executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Runs a forward pass with every change of the patcher that samples (APPLY_MODEL)."""
    with bypassed(executor.class_obj):
        return executor(*args, **kwargs)


@contextmanager
def bypassed(model: Any) -> Iterator[None]:
    """Puts every change of the patcher that samples into the layers of a BaseModel."""
    with patched(_changes(model)):
        yield


def _changes(model: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    for layers, strength in bypass_models(model.current_patcher).items():
        for layer, change in layers.of(model):
            own = layer.__dict__  # past Module.__setattr__
            change = change if strength == 1 else partial(change, strength=strength)
            yield own, "forward", BypassForward(layer.forward, change)
            # By this newer ComfyUI (#16862), whose fused linear layers read weights past `forward`,
            # knows that this forward counts.
            yield own, "comfy_force_forward", True


class BypassForward:
    def __init__(
        self, forward: Callable[..., torch.Tensor], change: Callable[..., torch.Tensor]
    ) -> None:
        self.forward = forward
        self._change = change

    def leave(self) -> None:
        self._change = lambda _, y: y

    def __call__(self, x: torch.Tensor, *given: Any, **around: Any) -> torch.Tensor:
        if others := [name for name in around if name not in AroundLinear._fields]:
            raise UnavailableError(
                f"This ComfyUI calls linear layers with {', '.join(others)}, which a LoRA as a "
                "bypass does not support: choose lora_mode merge."
            )
        return AroundLinear(*given, **around).run(lambda x: self._change(x, self.forward(x)), x)


def _patcher(
    layers: BypassLayers, load_device: torch.device, offload_device: torch.device
) -> ModelPatcher:
    # Never the dynamic class: torch.compile cannot trace a weight that is faulted in.
    patcher = ModelPatcher(layers, load_device=load_device, offload_device=offload_device)
    # For MultiGPU, which loads every model once more.
    second = _second_patcher, (layers, load_device, offload_device)
    put(patcher, cached_patcher_init=second)
    return patcher


def _second_patcher(
    layers: BypassLayers,
    load_device: torch.device,
    offload_device: torch.device,
    disable_dynamic: bool = True,  # ComfyUI passes it; there is no other kind
) -> ModelPatcher:
    # A hook is told by its reference, not by a copy of it.
    copied = copy.deepcopy(layers, {id(layers.hook): layers.hook})
    return _patcher(copied, load_device, offload_device)


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    rows, columns = weight.shape
    linear = comfy.ops.manual_cast.Linear(columns, rows, bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    return linear
