"""Which cards work on a forward pass of a MODEL that ComfyUI has on several.

ComfyUI gives every conditioning of a step to one card. At CFG 1, or with more cards than
conditionings, some get none: these are shared out among the cards that work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from comfy.samplers import get_area_and_mult

# Of transformer_options: {BaseModel that works: the BaseModels of idle cards that help it}.
IDLE = "qwen_l40s_idle"


def idle_models(options: Mapping[str, Any], model: Any) -> Sequence[Any]:
    """The models of the cards that have nothing to do while this one runs a pass.

    Args:
        options: transformer_options of the pass.
        model: ComfyUI's BaseModel.
    """
    return options.get(IDLE, {}).get(model, ())


def share_idle_cards(
    executor: Any,
    model: Any,
    conds: Sequence[Sequence[Mapping[str, Any]] | None],
    x: torch.Tensor,
    timestep: torch.Tensor,
    model_options: dict[str, Any],
) -> Any:
    """CALC_COND_BATCH wrapper: lets the passes of one step know of the idle cards."""
    clones = model_options.get("multigpu_clones", {})
    options = model_options.setdefault("transformer_options", {})
    working = _working(conds, x, timestep, len(clones))
    models = [patcher.model for patcher in clones.values()]
    options[IDLE] = {
        lead: tuple(models[working + place :: working])
        for place, lead in enumerate(models[:working])
    }
    try:
        return executor(model, conds, x, timestep, model_options)
    finally:
        options.pop(IDLE, None)


def _working(
    conds: Sequence[Sequence[Mapping[str, Any]] | None],
    x: torch.Tensor,
    timestep: torch.Tensor,
    cards: int,
) -> int:
    """How many of the cards ComfyUI gives conditionings: it fills them one after the other."""
    given = [cond for prompts in conds if prompts is not None for cond in prompts]
    if not given or not cards or any("default" in cond for cond in given):
        return cards  # a default one is computed where others leave something
    count = sum(get_area_and_mult(cond, x, timestep) is not None for cond in given)
    return math.ceil(count / math.ceil(count / cards)) if count else cards
