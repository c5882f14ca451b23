"""Predicts what a LoRA's merge rounds away and what a bypass costs, and chooses for `auto`."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.weight_adapter import LoRAAdapter, WeightAdapterBase

from ....families.comfyui import kind_of
from ....machine.store import known_cards
from ....planning.card_list import BUNDLED
from ....planning.cards import DEFAULT_CARD
from ....planning.rates import rates_of
from ....planning.request import Loras, Parts, RunRequest
from ....planning.times import forward_seconds
from ....verdict import read_or
from ..contract import transformer_of
from .bypass import Matrices, bypass_change

# Above it `auto` takes bypass.
MOST_LOSS = 0.2
# Of W and of D, from all layers of a LoRA together: at rank 256 and 840 layers (20 B) 0.3 GFLOP,
# and 80 to 105 ms of one core of a busy server (40 to 65 at rank 64). Where rows, columns and
# layers differ much in size (log-normal, 0.5, 0.5 and 0.7), the share of 840 layers was off by 2.4%
# of itself, of 28 by 3.1% (one deviation).
ELEMENTS = 2**19


def merge_loss(
    patches: Mapping[Any, Any],
    weight_of: Callable[[Any], torch.Tensor],
    strength: float,
    dtype_of: Callable[[Any], torch.dtype | None] = lambda key: None,
) -> float | None:
    """Measures ||round(W + D) - W - D|| / ||D|| over all layers that a LoRA changes.

    W is a layer's weight and D its change in fp32; the sum is rounded to the dtype of the merge.
    Both are read in one block of each layer, from a fixed seed: rows that lie together, because
    weights may still be in their file, and columns that do, because whole rows need all of `down`.

    Args:
        patches: as ComfyUI makes them; a change given as a whole tensor is always merged and does
            not count.
        weight_of: gives the weight [N, K] of a key, in 16 or 32 bits.

    Returns:
        The share, 0 for a LoRA of zeros; None where a change is no sum of products.
    """
    adapters = {key: it for key, it in patches.items() if isinstance(it, WeightAdapterBase)}
    chosen, lost, changed = random.Random(0), 0.0, 0.0
    side = max(1, math.isqrt(ELEMENTS // max(1, len(adapters))))
    alike: dict[Any, list[tuple[Any, ...]]] = defaultdict(list)
    for key, adapter in adapters.items():
        weight = weight_of(key)
        if weight.dim() != 2:
            return None
        columns = min(weight.shape[1], side)
        rows = min(weight.shape[0], side * side // columns)
        row = chosen.randrange(weight.shape[0] - rows + 1)
        column = chosen.randrange(weight.shape[1] - columns + 1)
        part = slice(row, row + rows), slice(column, column + columns)
        factors = _factors(adapter, part)
        if factors is None:
            return None
        left, right, scale = factors
        found = weight[part].to(dtype_of(key) or weight.dtype)
        same = found.dtype, found.device, left.dtype, right.dtype, left.shape, right.shape
        sampled = found, left, right, strength * scale, weight.numel() / (rows * columns)
        alike[same].append(sampled)
    for layers in alike.values():  # together: 840 layers one by one take longer than their sums
        *matrices, scales, shares = zip(*layers, strict=True)
        found, left, right = map(torch.stack, matrices)
        change = (left.float() @ right.float()).mul_(torch.tensor(scales)[:, None, None])
        total = found.to("cpu", torch.float32) + change
        weights = torch.tensor(shares)
        lost += (weights @ (total.to(found.dtype) - total).square().sum((1, 2))).item()
        changed += (weights @ change.square().sum((1, 2))).item()
    share = math.sqrt(lost / changed) if changed else 0.0 if adapters else None
    return share if share is None or math.isfinite(share) else None  # NaN in the weights


def told(loss: float, asked: str, how: str, cost: str) -> str:
    """Says what follows from `merge_loss` and `step_cost` for the mode asked for, and is taken."""
    share = f"{loss:.0%}" if loss >= 0.1 else f"{loss:.1%}"
    if how == "bypass":
        return (
            f"A merge would round away {share} of this LoRA's change, more than {MOST_LOSS:.0%}. "
            f"So auto chose bypass, which keeps it and makes {cost}; lora_mode merge adds no time."
        )
    chosen = f", at most {MOST_LOSS:.0%}, so auto merges" if asked == "auto" else ""
    return (
        f"The merge rounds away {share} of this LoRA's change{chosen}; lora_mode bypass keeps it "
        f"and makes {cost}."
    )


def step_cost(model: ModelPatcher, patches: Mapping[Any, Any]) -> str:
    """Predicts what a bypass makes of a step in bf16, on an L40S at the family's size; no
    figure where a change is not two matrices. `patches` as of `merge_loss`.
    """
    adapters = [it for it in patches.values() if isinstance(it, WeightAdapterBase)]
    if not all(isinstance(it, LoRAAdapter) for it in adapters):
        return "each step longer"
    kind = kind_of(model.model)
    shape = read_or(None, kind.shape, transformer_of(model))
    if shape is None:
        return "each step longer"
    size = sum(matrix.numel() for it in adapters for matrix in it.weights[:2])
    rank = math.ceil(size / sum(map(sum, shape.quantizable_layers().values())))
    family = kind.family.members[0].name
    plain = RunRequest(family, width=None, height=None, cfg="off", parts=Parts(transformer=shape))
    beside = replace(plain, loras=Loras(1, rank, "bypass"))
    more = sorted(
        forward_seconds(beside, "bf16", rates) / forward_seconds(plain, "bf16", rates) - 1
        for rates in rates_of(known_cards(BUNDLED)[DEFAULT_CARD])[:2]
    )
    return f"a step {more[0]:.0%} to {more[1]:.0%} longer (predicted for an {DEFAULT_CARD})"


def _factors(
    adapter: WeightAdapterBase, part: tuple[slice, slice]
) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    # Whose product is these rows and columns of the change; None for a kind without a bypass.
    rows, columns = part
    change = bypass_change(adapter, 1.0, torch.float32)
    if change is None:
        return None
    if isinstance(change, Matrices):
        return change.up[rows], change.down[:, columns], 1.0
    outer, inner = change.outer.weight, change.inner.weight
    for axis, ends in enumerate(part):
        at, size = torch.arange(ends.start, ends.stop), change.inner.weight.shape[axis]
        outer, inner = outer.index_select(axis, at // size), inner.index_select(axis, at % size)
    return outer * inner, torch.eye(columns.stop - columns.start), change.scale
