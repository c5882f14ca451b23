"""Sets rules for skipping steps to a number of computed steps, by prompts that are not held out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from ...micro.scene import SEEN_PAIRS, sample_prompts
from .field import Micro, Prompts, noise
from .rules import (
    AdaCache,
    EasyCache,
    LazyCache,
    TeaCache,
    magcache_steps,
    relative_change,
)
from .run import Field, Rule, Run, guided, sample

SEED = 2
GATED = {"EasyCache": EasyCache, "LazyCache": LazyCache, "AdaCache": AdaCache}
# Halvings of a threshold's range, and how near the number of computed steps has to come.
HALVINGS, NEAR = 9, 0.15
THRESHOLDS = 1e-3, 10.0
MAGCACHE_ROWS = (2, 3, 4)  # steps in a row, the fewest that reach the number of computed steps


Make = Callable[[Run], Rule]


class Calibration(NamedTuple):
    """What rules know of the model beforehand, from an uncached run of other prompts.

    Attributes:
        ratios: Of each step, the residual's size over that of the step before; the first is 1.
        curve: How far the prompt's velocity changes, by how far the first block's input does: a
            polynomial's coefficients, the highest power first.
    """

    ratios: list[float]
    curve: list[float]


def calibrate(field: Field, sigmas: Sequence[float], x: torch.Tensor) -> Calibration:
    """Runs without a cache; x is noise [N, ...]."""
    rows = torch.arange(len(x), device=x.device)
    ratios, inputs, outputs = [1.0], [], []
    before: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    for sigma, following in pairwise(sigmas):
        found, modulated = field.compute(x, sigma, rows), field.modulated(x, sigma)
        sizes = found.residual.norm(dim=-1)
        if before is not None:
            ratios.append((sizes / before[0]).mean().item())
            inputs.append(relative_change(modulated, before[1]).cpu())
            outputs.append(relative_change(found.velocity[:, 0], before[2]).cpu())
        before = sizes, modulated, found.velocity[:, 0]
        x = x + (following - sigma) * guided(found.velocity)
    changes, moved = torch.cat(inputs).double(), torch.cat(outputs).double()
    return Calibration(ratios, np.polyfit(changes, moved, 4).tolist())


class Calibrated:
    """Sets rules to a number of computed steps, by prompts that are not held out."""

    def __init__(self, micro: Micro, count: int) -> None:
        prompts = sample_prompts(count, SEED, SEEN_PAIRS)
        self._field = Prompts(micro, [prompt for prompt, _ in prompts])
        self._noise = noise(range(count), micro.device)
        self._known: dict[int, Calibration] = {}

    def of(self, sigmas: Sequence[float]) -> Calibration:
        """Of a schedule."""
        steps = len(sigmas) - 1
        if steps not in self._known:
            self._known[steps] = calibrate(self._field, sigmas, self._noise)
        return self._known[steps]

    def gated(self, name: str, sigmas: Sequence[float], wanted: int) -> tuple[Make, float]:
        """A rule with the threshold at which it computes so many steps, or as near as it comes."""
        curve = self.of(sigmas).curve

        def make(threshold: float) -> Make:
            if name == "TeaCache":
                return partial(TeaCache, threshold=threshold, curve=curve)
            return partial(GATED[name], threshold=threshold)

        def count(threshold: float) -> float:
            found = sample(self._field, sigmas, self._noise, make(threshold))
            return found.computed.mean().item()

        threshold = halve(count, wanted, THRESHOLDS)
        return make(threshold), threshold


def halve(count: Callable[[float], float], wanted: float, ends: tuple[float, float]) -> float:
    """The value, of a falling function, whose count comes nearest."""
    low, high = map(math.log, ends)
    best, nearest = ends[0], math.inf
    for _ in range(HALVINGS):
        value = math.exp((low + high) / 2)
        found = count(value)
        if abs(found - wanted) < nearest:
            best, nearest = value, abs(found - wanted)
        if nearest <= NEAR:
            break
        low, high = (math.log(value), high) if found > wanted else (low, math.log(value))
    return best


def magcache(ratios: Sequence[float], wanted: int) -> tuple[set[int], dict[str, float]]:
    """(the steps that MagCache skips, what sets them) for so many computed steps."""
    found = []
    for row in MAGCACHE_ROWS:

        def count(error: float, row: int = row) -> int:
            return len(ratios) - len(magcache_steps(ratios, error, row))

        error = halve(count, wanted, THRESHOLDS)
        found.append((abs(count(error) - wanted), row, error))
    _, row, error = min(found)
    return magcache_steps(ratios, error, row), {"error": error, "in_a_row": row}
