"""Applies a LoRA file to a MODEL by ComfyUI's protocol, and reports what came of it.

Everything that is wrong with the file is found here, before sampling: ComfyUI itself logs a line
for each tensor that it skips or cannot add, and samples on.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import comfy.lora
import comfy.lora_convert
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy.weight_adapter import WeightAdapterBase
from torch.overrides import TorchFunctionMode

from ....errors import CheckpointError, SettingError
from ....families.comfyui import kind_of
from ....families.identify import FOREIGN_STACKS, normalize_name
from ....families.registry import adapts_other
from ....loaders.checkpoint import CheckpointPart
from ....optimizations.patches import put
from ....planning.request import LORA_MODES
from ....spec.formats import format_gib
from ...loading import check_known
from ..contract import unsupported_model
from .bypass import MODE, bypass_change, compute_loras, is_quantized
from .few_steps import FILE, few_steps
from .file import LoraFile, inspect_lora, module_of, read_lora
from .loss import MOST_LOSS, merge_loss, step_cost, told

LISTED = 3  # names in a message
# What the report says where `auto` has chosen for quantized weights.
ROUNDED = (
    "auto chose bypass, because a merge would round the quantized weights again, which others "
    "report to cause grid patterns."
)
NO_BYPASS = "auto chose merge, because this kind of LoRA has no bypass."
UNTOLD = (
    "The loss of a merge is unknown, because this LoRA is not a sum of matrix products: auto "
    "chose merge, the only way to apply it."
)
NOT_READ = "ComfyUI's loader did not read it"
TEXT_ENCODER_PREFIXES = ("text_encoder", "text_model", "lora_te", "te_", "clip", "cond_stage_model")
# What `comfy.lora.load_lora` makes of a module: an adapter, or ("diff", (tensor,)).
Patch = Any  # a WeightAdapterBase, or (kind, its parts)
# How ComfyUI names what a patch changes: a weight, or (weight, (dim, start, length)) inside it.
Key = str | tuple[str, tuple[int, int, int]]


@dataclass(frozen=True)
class LoraReport:
    path: Path
    how: str  # "merge" or "bypass"
    strength: float
    applied: int = 0  # modules of the model that the LoRA changes
    modules: int = 0  # modules that the file names
    # (name as in the file, reason) of the others, and of tensors left out
    not_applied: tuple[tuple[str, str], ...] = ()
    # smallest and largest, or None where the kind of LoRA has none
    ranks: tuple[int, int] | None = None
    bytes: int = 0  # of the tensors in the file
    quantized: int = 0
    why: str = ""  # what "auto" went by, or what the merge that was asked for loses
    # of `merge_loss`; None on quantized weights and where bypass was asked for
    loss: float | None = None
    # what a few-step LoRA is trained for, and what is wrong with it here, in sentences
    steps: tuple[str, ...] = ()

    def summary(self) -> str:
        if self.strength == 0:
            return "Not applied: strength 0"
        merged = "merged" if self.how == "merge" else "bypass"
        lines = [f"{self.applied} of {self.modules} keys applied, {merged}"]
        if self.not_applied:
            lines.append(f"Not applied: {_list_names(self.not_applied)}")
        return "\n".join([*lines, *self.steps])

    def text(self) -> str:
        size = [format_gib(self.bytes)]
        if self.ranks:
            low, high = self.ranks
            size.insert(0, f"rank {low}" if low == high else f"ranks {low} to {high}")
        if self.strength == 0:
            return f"{self.path.name}: not applied, because the strength is 0 ({', '.join(size)})."
        how = "merged into the weights" if self.how == "merge" else "as a bypass"
        line = (
            f"{self.path.name}: {self.applied} of {self.modules} keys applied at strength "
            f"{self.strength:g}, {how} ({', '.join(size)})."
        )
        notes = [self.why] if self.why else []
        if self.quantized and self.how == "merge":
            notes.append(
                f"{self.quantized} of these weights are quantized and were rounded again with the "
                'LoRA merged in; "bypass" leaves them unchanged and is exact.'
            )
        if self.not_applied:
            notes.append(f"Not applied: {_list_names(self.not_applied)}.")
        return "\n".join([line, *([" ".join(notes)] if notes else []), *self.steps])


def apply_lora(
    model: ModelPatcher, path: str | os.PathLike[str], strength: float, *, how: str
) -> tuple[ModelPatcher, LoraReport]:
    """Returns a clone of the model with the LoRA, and the report.

    Args:
        model: a Qwen-Image MODEL, 2.1 too, quantized or not, with or without other LoRAs.
        path: a safetensors file with a LoRA of any kind that ComfyUI's Load LoRA takes, in any of
            the usual key styles.
        strength: factor on the change, also negative; 0 returns the model itself.
        how: "merge" adds the change to the weights as ComfyUI does, which rounds quantized weights
            again; "bypass" computes it in the dtype of the activations and leaves weights alone;
            "auto" is bypass where weights are quantized or a merge loses more than `MOST_LOSS`,
            as far as the kind of LoRA has one.

    Raises:
        CheckpointError: the file is not a LoRA, is for another model or width, is damaged, holds
            NaN or infinity, or changes nothing in this model.
        SettingError: `strength` or `how` is invalid, this kind of LoRA can only be merged, or the
            model is not Qwen-Image or keeps what the LoRA changes in other rows than its own.
    """
    check_known("lora_mode", how, LORA_MODES)
    if not math.isfinite(strength):
        raise SettingError(f"LoRA strength must be a finite number, got {strength}.")
    path = Path(path)
    part = inspect_lora(path)
    ranks = [int(part.dims[name]) for name in ("rank", "largest_rank") if name in part.dims]
    report = LoraReport(
        path=path,
        how="merge" if how == "auto" else how,
        strength=strength,
        modules=int(part.dims.get("modules", 0)),
        ranks=(ranks[0], ranks[-1]) if ranks else None,
        bytes=part.bytes,
    )
    if strength == 0:
        return model, report
    _check_family(model, part, path)
    file = read_lora(path)
    patches, applied, not_applied = _patches(model, file)
    modules = {*file.modules, *applied}
    if not patches:
        raise CheckpointError(
            f"This LoRA changes nothing, because this model has none of its {len(modules)} keys "
            f"({_list_names(not_applied)}). It looks like {part.family} with {part.variant}: "
            "choose a LoRA for this model.",
            path,
        )
    weights = {key: comfy.utils.get_attr(model.model, _name(key)) for key in patches}
    magnitudes = {id(it) for name, it in file.tensors.items() if name.endswith(".dora_scale")}
    checked = set()
    for key, patch in patches.items():
        rows, *others = weights[key].shape
        shape = (rows if isinstance(key, str) else key[1][2], *others)
        alike = type(patch), shape, str([getattr(it, "shape", it) for it in _parts(patch)])
        if alike not in checked:  # of 840 layers some ten
            _check_shape(path, _name(key), patch, shape, magnitudes)
        checked.add(alike)
    clone = model.clone()
    quantized = sum(map(is_quantized, weights.values()))
    loss = None
    if how != "bypass" and not quantized:
        loss = merge_loss(
            patches, lambda key: _stored(clone, key), strength, lambda key: _merged_in(clone, key)
        )
    wanted = how == "bypass" or (how == "auto" and (quantized or (loss or 0) > MOST_LOSS))
    refusing = _without_bypass(clone, patches, weights) if wanted else None
    if refusing and how == "bypass":
        raise SettingError(
            f"This LoRA changes {refusing!r} by more than two matrices, which a bypass does not "
            "support: choose merge.",
            path,
        )
    whole = sum(not isinstance(patch, WeightAdapterBase) for patch in patches.values())
    taken = "bypass" if wanted and not refusing and whole < len(patches) else "merge"
    why = ""
    if loss is not None:
        why = told(loss, how, taken, step_cost(clone, patches))
    elif how == "auto":
        why = UNTOLD if not quantized else NO_BYPASS if taken == "merge" else ROUNDED
    if whole and taken == "bypass":
        why = f"{why} {whole} of its changes are whole tensors and are merged.".lstrip()
    for patch in patches.values():
        if isinstance(patch, WeightAdapterBase):
            put(patch, **{MODE: taken, FILE: path})
    clone.add_patches(patches, strength)
    compute_loras(clone)
    if file.metadata:
        clone.set_attachments("lora_metadata", file.metadata)  # as core does
    found = few_steps(clone)
    own = [it.words() for it in found.parts if it.what == repr(path.name)]
    return clone, replace(
        report,
        how=taken,
        applied=len(applied),
        modules=len(modules),
        not_applied=(*not_applied, *_choose_attention(clone, file)),
        quantized=quantized,
        why=why,
        loss=loss,
        steps=(*own, *(found.faults() if own else ())),
    )


def _stored(clone: ModelPatcher, key: Key) -> torch.Tensor:
    # As the file has it: in a model that is loaded another LoRA may be merged into it.
    kept = clone.backup.get(_name(key))
    weight = kept.weight if kept else comfy.utils.get_attr(clone.model, _name(key))
    return weight if isinstance(key, str) else weight.narrow(*key[1])


def _merged_in(clone: ModelPatcher, key: Key) -> torch.dtype | None:
    # Under dynamic VRAM a mapped fp32 or fp16 weight keeps its dtype until it is merged, in this.
    module, _, name = _name(key).rpartition(".")
    return getattr(comfy.utils.get_attr(clone.model, module), f"{name}_comfy_model_dtype", None)


def _check_family(model: ModelPatcher, part: CheckpointPart, path: Path) -> None:
    if unsupported_model(model):
        raise SettingError(
            f"The MODEL is {type(model.model).__name__}, but this node is for Qwen-Image: use "
            "ComfyUI's Load LoRA."
        )
    family = kind_of(model.model).family
    if adapts_other(part.family, family):  # of others the shapes tell
        raise CheckpointError(
            f"This is a {part.family}, but the MODEL is {family.label}: choose a LoRA for "
            f"{family.label}, or load the model of this LoRA.",
            path,
        )


def _name(key: Key) -> str:
    return key if isinstance(key, str) else key[0]


def _patches(
    model: ModelPatcher, file: LoraFile
) -> tuple[dict[Key, Patch], list[str], list[tuple[str, str]]]:
    """Has ComfyUI's own loader make patches of the tensors."""
    mapped = comfy.lora.model_lora_keys_unet(model.model, {})
    known = {normalize_name(name): key for name, key in mapped.items()}
    foreign = [
        name
        for module, name in file.modules.items()
        if module not in known and any(stack in module for stack in FOREIGN_STACKS)
    ]
    if foreign:
        raise CheckpointError(
            f"This LoRA is for a model with {foreign[0]!r}, which Qwen-Image does not have: "
            "choose a LoRA for Qwen-Image.",
            file.path,
        )
    targets = {module: known[module] for module in file.modules if module in known}
    sliced = [
        file.modules[module]
        for module, key in targets.items()
        if not isinstance(key, str) and (len(key) > 2 or key[1][0])
    ]
    if sliced:
        raise SettingError(
            f"This LoRA changes {sliced[0]!r}, which this MODEL stores inside a larger weight: "
            "use ComfyUI's Load LoRA.",
            file.path,
        )
    if len(set(targets.values())) < len(targets):
        raise CheckpointError(
            "This LoRA changes one module of the model under two names, but may name it only "
            "once: split the LoRA into two files.",
            file.path,
        )
    try:
        loaded = comfy.lora.load_lora(
            comfy.lora_convert.convert_lora(file.tensors), known, log_missing=False
        )
    except KeyError as error:
        raise CheckpointError(
            f"A matrix of a pair is missing in this LoRA, {error}: download the file again.",
            file.path,
        ) from error
    weights = model.model.state_dict()
    patches = {key: patch for key, patch in loaded.items() if _name(key) in weights}
    found, used = (
        {id(part) for patch in some.values() for part in _parts(patch)}
        for some in (loaded, patches)
    )
    names: dict[str, list[str]] = defaultdict(list)
    for name in file.names:
        names[module_of(name)].append(name)
    applied, others = [], []
    for module, own in names.items():
        kept = [name for name in own if id(file.tensors[name]) in used]
        if kept:
            applied.append(module)
            numbers = (f"{module}.alpha", f"{module}.reshape_weight")  # which no patch holds
            left = (file.names[name] for name in own if name not in (*kept, *numbers))
            others += [(name, NOT_READ) for name in left]
        elif module not in file.modules:
            others.append((file.names[module], NOT_READ))
        elif module.startswith(TEXT_ENCODER_PREFIXES):
            others.append((file.modules[module], "text encoder"))
        elif module in known and found.isdisjoint(id(file.tensors[name]) for name in own):
            others.append((file.modules[module], "its tensors are incomplete"))
        else:
            others.append((file.modules[module], "this model has no such module"))
    return patches, applied, others


def _parts(patch: Patch) -> tuple[Any, ...]:
    return patch.weights if isinstance(patch, WeightAdapterBase) else patch[1]


def _check_shape(
    path: Path, key: str, patch: Patch, shape: tuple[int, ...], magnitudes: Container[int]
) -> None:
    try:
        changed = _changed_shape(patch, shape)
        if not changed or any(
            it.shape not in ((shape[0], 1), (1, *shape[1:]))
            for it in _parts(patch)
            if id(it) in magnitudes
        ):
            raise ValueError
    except Exception as error:  # whatever ComfyUI's code says of such tensors
        raise CheckpointError(
            f"The matrices for {key!r} are incomplete or their shapes differ: download the file "
            "again.",
            path,
        ) from error
    if changed != shape:
        raise CheckpointError(
            f"The LoRA's {key!r} has the shape {changed}, but the model's has {shape}: choose a "
            "LoRA for this model.",
            path,
        )


class _Products(TorchFunctionMode):
    """Records what is reshaped to a weight's shape: reshape takes any shape of that size."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.found: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.reshape and args[1:] == (self.shape,):
            self.found.append(args[0].flatten(len(self.shape) - 1))
        return func(*args, **(kwargs or {}))


def _changed_shape(patch: Patch, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Has ComfyUI compute a change's shape; empty where it only logs that matrices do not fit."""
    if not isinstance(patch, WeightAdapterBase):
        return tuple(patch[1][0].shape)
    # Of the numbers in an adapter, OFT compares one with what it computes.
    weights = (0.0 if isinstance(it, (int, float)) else it for it in patch.weights)
    adapter = type(patch)(set(), tuple(weights))
    added: Any = []
    with _Products(shape) as products:
        adapter.calculate_weight(
            torch.empty(shape, device="meta"), "", 1.0, 1.0, None, lambda it: added.append(it) or it
        )
    shapes = [tuple(it.shape) for it in (*products.found, *added)]
    return next((it for it in shapes if it != shape), shape if added else ())


def _without_bypass(
    clone: ModelPatcher, patches: Mapping[Key, Patch], weights: Mapping[Key, torch.Tensor]
) -> str | None:
    """Names a layer whose change can only be merged; None where there is none."""
    for key, patch in patches.items():
        name = _name(key).removesuffix(".weight")
        layer = clone.model.get_submodule(name.rpartition(".")[0] if name == key else name)
        adapts = isinstance(patch, WeightAdapterBase)
        if adapts and hasattr(layer, "in_features") and bypass_change(patch, 1.0, torch.float32):
            continue
        if adapts or is_quantized(weights[key]):
            return name
        # Else a norm or a bias, given as its whole change: it is merged.
    return None


def _choose_attention(clone: ModelPatcher, file: LoraFile) -> list[tuple[str, str]]:
    # Whatever the LoRA's strength, as core does.
    missing = []
    for name, config in file.attention.items():
        key = f"diffusion_model.{normalize_name(name).removesuffix('.config')}"
        try:
            choice = type(clone.get_model_object(key))()
        except AttributeError:
            missing.append((name, "this ComfyUI's model has no such setting"))
            continue
        choice.load_state_dict({"config": config})
        clone.add_object_patch(key, choice)
    return missing


def _list_names(not_applied: Sequence[tuple[str, str]]) -> str:
    names = [f"{name} ({reason})" for name, reason in not_applied[:LISTED]]
    more = len(not_applied) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
