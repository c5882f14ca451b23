"""Makes and undoes every change to an object of ComfyUI, torch, Triton or diffusers.

A row of `CHANGES` stands for each. ComfyUI's hooks for it (wrappers, callbacks and attachments on a
clone of a ModelPatcher) are none, nor is a layer that a model is built of from the start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, NamedTuple

ABSENT = object()  # the value of a name that is not there
CORE = "ComfyUI 0.33, and 0.33 with 0.40's model code"
TORCH = "torch 2.13"
DIFFUSERS = "diffusers 0.42, accelerate 1.15"


class Change(NamedTuple):
    """One kind of change.

    Attributes:
        what: The object, and what is changed of it; attributes in backquotes.
        checked: The versions that it was checked with.
    """

    what: str
    why: str
    checked: str = CORE


CHANGES: Mapping[str, Change] = {
    # Undone when the pass, the call or the run ends.
    "block": Change(
        "`forward` of each block of a transformer",
        "the host's own loop calls the fused block, with what other nodes do around it",
        f"{CORE}; {DIFFUSERS}",
    ),
    "transformer": Change(
        "`_forward` of ComfyUI's transformer",
        "a pass that is made twice is one step to the wrappers around it",
    ),
    "bypass": Change(
        "`forward` of a Linear; and `comfy_force_forward`, for fused layers of newer ComfyUI",
        "a LoRA is computed beside the weight",
    ),
    "copies on the card": Change(
        "`_parameters` of a modulation's Linear", "its weights stay in host memory"
    ),
    "options": Change(
        "transformer_options of a run or a call: keys of ours, and attention's",
        "passes learn of skipped steps and idle cards; a file's choice of attention counts",
    ),
    "sampling patcher": Change(
        "`model_patcher` of a guider; of its clone `patches`, `patches_uuid`, `parent`, hooks",
        "a run computes LoRAs that a merge would damage",
    ),
    "key patches": Change(
        "`get_key_patches` of a patcher; `model_state_dict` while it runs",
        "ComfyUI's fails on quantized layers, which hooks and merges of two MODELs read",
    ),
    "LoRA": Change("a patch of ours: how it is applied", "a run merges or computes it"),
    "prompts": Change("`conds` of a guider", "a run that begins again needs them as they were"),
    "forward": Change(
        "`forward` of diffusers' transformer and ControlNet, or accelerate's `_old_forward`",
        "fused blocks and step cache run in its place, until `restore` or `cache_steps` ends",
        DIFFUSERS,
    ),
    "scheduler": Change(
        "`step` of diffusers' scheduler", "a skipped step gets the forecast", DIFFUSERS
    ),
    "switches": Change("torch's TF32 and cuDNN's benchmark", "the user asks for them", TORCH),
    "generator": Change(
        "state of the default CUDA generator",
        "the one that takes part in a capture raises in other threads",
        TORCH,
    ),
    "layer errors": Change("a forward hook of each audited layer", "its output is compared", TORCH),
    # Goes with the object.
    "attention": Change(
        "transformer_options of a clone: optimized_attention_override",
        "ComfyUI has this one place for it, and no function that fills it",
    ),
    "off-card layers": Change(
        "`img_mod`, `txt_mod`, `modulation` of a block, and in it `comfy_cast_weights`",
        "their weights stay in host memory: ComfyUI counts and moves what has parameters",
    ),
    "patcher": Change(
        "`size` and `__class__` of a patcher with off-card layers",
        "ComfyUI counts state_dict(), and clones for torch.compile and hooks to another class",
    ),
    "memory": Change(
        "`memory_usage_factor` and `memory_required` of a BaseModel",
        "ComfyUI reserves 2.5 GiB more than weights and a step take",
    ),
    "second load": Change(
        "`cached_patcher_init` of a patcher",
        "by it ComfyUI loads a model again, for other cards and without dynamic VRAM",
    ),
    "operations": Change(
        "`custom_operations` of a model's configuration", "its Linear layers are ours"
    ),
    "weights": Change(
        "a layer's `weight` and `bias`, the whole layer, and what tells its format",
        "they are taken over as they are mapped or quantized, where loading copies them",
        f"{CORE}; {DIFFUSERS}",
    ),
    "resident weights": Change(
        "`_v_weight`, `_v_bias`, `_v_signature` of a layer under dynamic VRAM",
        "weights go straight to the card, without ComfyUI's copy in pinned memory",
        "ComfyUI 0.33, comfy-aimdo 0.4.13",
    ),
    "table": Change("`qwen_l40s_modulation` of a BaseModel", "its clones share one table"),
    # Stays, in what a whole process shares.
    "layout": Change(
        "comfy-kitchen's registry of layouts",
        "QuantizedTensor finds FP8RowsLayout by its name",
        f"{CORE}; comfy-kitchen 0.2.40",
    ),
    "operator": Change("torch.ops.qwen_l40s", "torch.compile takes a product as one", TORCH),
    "broken capture": Change(
        "torch's allocator", "it keeps what is freed after a capture that broke off", TORCH
    ),
    "gone models": Change(
        "entries of `current_loaded_models`", "0.33 fails on one without a model"
    ),
    "prefix cache": Change(
        "`prefix_cache` of Qwen-Image-2.1's transformer",
        "a pass that is made twice fills it anew",
        "ComfyUI 0.33 with 0.40's model code",
    ),
    "queues": Change("`PREFETCH_QUEUES`", "after an error the pages of blocks stay pinned"),
    "watermark": Change(
        "comfy-aimdo's, of pages", "it stays below those that were pinned", "comfy-aimdo 0.4.13"
    ),
    "peak": Change("torch's peak of allocated memory", "each reported phase has its own", TORCH),
}


def put(change: str, owner: Any, **values: Any) -> None:
    """Sets attributes that the owner keeps."""
    assert change in CHANGES
    for name, value in values.items():
        setattr(owner, name, value)


def swap(change: str, own: MutableMapping[str, Any], name: str, value: Any) -> Any:
    """Puts a value into a namespace, or takes out what is ABSENT; returns what was there."""
    assert change in CHANGES
    before = own.pop(name, ABSENT)
    if value is not ABSENT:
        own[name] = value
    return before


def call(change: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls what changes an object of the host's."""
    assert change in CHANGES
    return function(*args)


@contextmanager
def patched(
    change: str, values: Iterable[tuple[MutableMapping[str, Any], str, Any]]
) -> Iterator[None]:
    """Puts values into namespaces, one after the other, and at the end what was there: last first,
    and not where another extension has wrapped the value, which learns by its `leave` that it is
    over.

    Args:
        values: (namespace, name, value).
    """
    assert change in CHANGES
    done = []
    try:
        for item in values:  # of each block in a pass: 1 us
            own, name, value = item
            done.append((item, own.get(name, ABSENT)))
            own[name] = value
        yield
    finally:
        for (own, name, value), before in reversed(done):
            if leave := getattr(value, "leave", None):
                leave()
            if own.get(name) is not value:
                continue
            if before is ABSENT:
                del own[name]
            else:
                own[name] = before


# {(id of an owner, name): how many have it switched, what it was before}, of what lasts.
_switched: dict[tuple[int, str], tuple[int, Any]] = {}
_switching = threading.Lock()


@contextmanager
def switched(change: str, switches: Iterable[tuple[object, str, Any]]) -> Iterator[None]:
    """Sets attributes, and at the end what they were; of threads that do so at a time the last.

    Args:
        switches: (owner, name, value).
    """
    assert change in CHANGES
    done = []
    try:
        for owner, name, value in switches:
            with _switching:
                count, before = _switched.get((id(owner), name)) or (0, getattr(owner, name))
                setattr(owner, name, value)
                _switched[id(owner), name] = count + 1, before
            done.append((owner, name))
        yield
    finally:
        for owner, name in done:
            with _switching:
                count, before = _switched.pop((id(owner), name))
                if count > 1:
                    _switched[id(owner), name] = count - 1, before
                else:
                    setattr(owner, name, before)
