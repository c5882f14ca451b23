"""Uses several cards for one MODEL: ComfyUI's clones of it, and who works on which forward pass.

ComfyUI gives every conditioning of a step to one card. At CFG 1, or with more cards than
conditionings, some get none: these are shared out among the cards that work, as evenly as it goes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any
from weakref import WeakSet

import torch
from comfy import model_management as management
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from comfy.samplers import get_area_and_mult

from ....caches import remembered
from ....errors import QwenL40SError
from ....families.comfyui import kind_of
from ....machine.card import InstalledCard, ask_driver
from ....optimizations.patches import patched
from ....spec.formats import format_gib
from ....verdict import Verdict, first_line
from ..contract import unsupported_model
from .forward import IDLE
from .run import CARDS_KEY, OPTIMIZATION_KEY, link_warning

logger = logging.getLogger(__name__)

CLONES = "multigpu_clones"  # of model_options: {card: patcher}, the MODEL's first
# Cards of one kind tell nearly the same memory: error correction and faulty rows take some.
LIKE_MEMORY = 0.1


def split_cards(model: ModelPatcher, cards: int) -> tuple[ModelPatcher, str]:
    """Returns a clone that runs on up to so many cards, and a line for each thing to know of them.

    ComfyUI loads the model once for each further card, and keeps patches, memory and interrupts of
    these copies as it keeps the MODEL's. A second call replaces the first. Where there is one card,
    or no copy can be made, the run has one card and the lines say why.
    """
    if fallback := unsupported_model(model):
        return model, str(fallback)
    clone = model.clone()
    clone.remove_wrappers_with_key(WrappersMP.CALC_COND_BATCH, CARDS_KEY)
    alike: Any
    alike, notes = _cards_like(clone.load_device, cards)
    found = alike if isinstance(alike, Verdict) else _cloned(clone, 1 + len(alike))
    if isinstance(found, Verdict):
        lines = [f"GPUs: one, {found}"]
    else:
        clone = found
        clone.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, CARDS_KEY, share_idle_cards)
        names = ", ".join(map(str, (clone.load_device, *alike)))
        family = kind_of(model.model).family
        rest = "and a GPU without a prompt computes part of another prompt's image tokens"
        if not family.split_rows:
            rest = (
                f"and {family.title}'s image tokens are not shared: without CFG, only one GPU works"
            )
        lines = [f"GPUs: {names}; each prompt of a step runs on one GPU, {rest}"]
        if family.split_rows and clone.get_attachment(OPTIMIZATION_KEY) is None:
            lines.append(
                "GPUs: image tokens are not shared without Qwen-Image Optimize: connect it before "
                "this node"
            )
        lines += [line for device in alike for line in _tight(clone, device)]
    lines += notes
    clone.set_attachments(CARDS_KEY, tuple(lines))
    return clone, "\n".join(lines)


def _cards_like(
    own: torch.device, cards: int
) -> tuple[Sequence[torch.device] | Verdict, list[str]]:
    """Finds the first other cards that ComfyUI takes, as many as are like `own`; and notes."""
    if cards < 2:
        return Verdict("as requested"), []
    visible = management.get_all_torch_devices()
    others = [device for device in visible if device != own]
    if not others:
        there = len(ask_driver()[1])
        if there < 2:
            return Verdict("which is all that ComfyUI sees"), []
        return Verdict(
            f"because ComfyUI sees one of {there}: start it without CUDA_VISIBLE_DEVICES, or with "
            "--cuda-device all"
        ), []
    taken, notes = others[: cards - 1], []
    alike = list(takewhile(lambda device: _are_alike(own, device), taken))
    if len(taken) < cards - 1:
        notes.append(f"GPUs: {cards} were requested, and ComfyUI sees {1 + len(others)}")
    if alike == taken:
        return alike, notes
    other = taken[len(alike)]
    reason = (
        f"{other} ({_kind(other)}) differs from {own} ({_kind(own)}), and the faster GPU would "
        "wait for the slower one"
    )
    if not alike:
        return Verdict(f"because {reason}"), notes
    return alike, [*notes, f"GPUs: {len(alike) + 1} of {cards}, because {reason}"]


def _kind(device: torch.device) -> InstalledCard | str:
    if device.type != "cuda":
        return device.type
    found = torch.cuda.get_device_properties(device)
    return InstalledCard(found.name, (found.major, found.minor), found.total_memory)


def _are_alike(first: torch.device, second: torch.device) -> bool:
    one, other = _kind(first), _kind(second)
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    apart = abs(one.memory_bytes - other.memory_bytes)
    same = (one.name, one.sm) == (other.name, other.sm)
    return same and apart <= LIKE_MEMORY * one.memory_bytes


def _cloned(model: ModelPatcher, cards: int) -> ModelPatcher | Verdict:
    try:
        from comfy.multigpu import create_multigpu_deepclones
    except ImportError:
        return Verdict("because this ComfyUI has no comfy.multigpu", remedy="update ComfyUI")
    if model.cached_patcher_init is None:
        return Verdict(
            "because the node that loaded the MODEL cannot load it again: use Load Qwen-Image "
            "Model or Load Diffusion Model"
        )
    # Where a MODEL is gone and others share its weights, ComfyUI 0.33 unloads the entry no more,
    # and looking for a copy to use again fails.
    loaded = management.current_loaded_models
    for entry in [it for it in loaded if it.model is None]:
        loaded.remove(entry)
    try:
        return create_multigpu_deepclones(model, cards, reuse_loaded=True)
    except (RuntimeError, QwenL40SError) as error:
        return Verdict(f"because the MODEL could not be loaded again: {first_line(error)}")


def _tight(model: ModelPatcher, device: torch.device) -> list[str]:
    loaded = management.loaded_models()
    own = sum(it.loaded_size() for it in loaded if it is not None and it.load_device == device)
    free = management.get_free_memory(device) + own
    if free >= model.model_size():
        return []
    return [
        f"GPUs: {device} has {format_gib(free)} free for {format_gib(model.model_size())} of "
        "weights. The rest stays in system RAM, which slows every step: close other programs on "
        "this GPU"
    ]


def share_idle_cards(
    executor: Any,
    model: Any,
    conds: Sequence[Sequence[Mapping[str, Any]] | None],
    x: torch.Tensor,
    timestep: torch.Tensor,
    model_options: dict[str, Any],
) -> Any:
    """Offers the passes of one step the cards that have none (CALC_COND_BATCH).

    Where copies between cards lose data, as ComfyUI's own would, all prompts stay on one card. Once
    a card has run out of memory, the rest of the run does without the others.
    """
    clones, pool = model_options.get(CLONES, {}), model_options.get("multigpu_thread_pool")
    alone = {name: it for name, it in model_options.items() if name != CLONES}
    if not clones or pool in _full:
        return executor(model, conds, x, timestep, alone)
    own, *others = clones
    unsafe = any(link_warning(own, other) for other in others)
    working = 1 if unsafe else _working(conds, x, timestep, len(clones))
    models = [patcher.model for patcher in clones.values()]
    options = model_options["transformer_options"]
    idle = {
        lead: tuple(models[working + place :: working])
        for place, lead in enumerate(models[:working])
    }
    try:
        with patched([(options, IDLE, idle)]):
            return executor(model, conds, x, timestep, alone if unsafe else model_options)
    except torch.OutOfMemoryError as error:
        logger.warning(
            "Qwen-Image Accelerator, GPUs: %s The run continues on one GPU: close other programs "
            "on the others.",
            first_line(error),
        )
    # The other cards' results still wait in the pool, where the next step would take them.
    if pool is not None:
        _full.add(pool)
    return executor(model, conds, x, timestep, alone)


# ComfyUI's pools of threads in whose run a card had no room.
_full: WeakSet[Any] = remembered(WeakSet())


def _working(
    conds: Sequence[Sequence[Mapping[str, Any]] | None],
    x: torch.Tensor,
    timestep: torch.Tensor,
    cards: int,
) -> int:
    given = [cond for prompts in conds if prompts is not None for cond in prompts]
    if any("default" in cond for cond in given):
        return cards  # which ComfyUI computes where others leave something
    count = sum(get_area_and_mult(cond, x, timestep) is not None for cond in given)
    return math.ceil(count / math.ceil(count / cards)) if count and cards else cards
