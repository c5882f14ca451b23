"""Chooses the steps of a schedule that a step cache forecasts: steps in the middle of a run,
between which the transformer's velocity hardly changes. The choice depends on the sigmas alone and
is made before the run, so that the same workflow always skips the same steps.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from ..caches import remembered
from ..errors import SettingError
from ..families.schedules import official_sigmas

OFF, CUSTOM = "off", "custom"
# A run of fewer steps, such as one with a Lightning LoRA, has none to spare.
FEWEST_STEPS = 11
# Nor does a preset compute fewer, whose image nobody has measured.
FEWEST_COMPUTED = 12
MOST_STEPS = 250
# Computed at both ends, whatever the shares. The forecast needs two steps. The third call finds a
# sampler that asks twice a step, first where an Euler step ends.
FEWEST_HEAD, FEWEST_TAIL = 3, 2
MOST_IN_A_ROW = 8


@dataclass(frozen=True)
class CacheSettings:
    """What a step cache may skip, and how it forecasts; raises SettingError out of range."""

    name: str = CUSTOM
    budget: float = 0.6  # most steps that are skipped, as a share of those beyond the tenth
    # head, tail: shares of all steps that are computed at the beginning and at the end.
    head: float = 0.16
    tail: float = 0.08
    longest: int = 2
    gain: float = 0.5  # of the slope between the last two computed velocities; 0 holds the last

    def __post_init__(self) -> None:
        for name, least, most in (
            *(("budget", 0, 1), ("head", 0, 1), ("tail", 0, 1), ("gain", 0, 1)),
            ("longest", 1, MOST_IN_A_ROW),
        ):
            value, whole = getattr(self, name), name == "longest"
            numeric = isinstance(value, int if whole else (int, float))
            if not numeric or isinstance(value, bool) or not least <= value <= most:  # NaN neither
                kind = "whole number" if whole else "number"
                raise SettingError(
                    f"The step cache's {name} is {value!r}: choose a {kind} from {least} to {most}."
                )


# Of 20, 40 and 50 steps they compute 15, 27 and 34; 14, 22 and 26; 12, 18 and 20.
PRESETS = {
    "faithful": CacheSettings("faithful", budget=0.5, head=0.25, tail=0.10, longest=1),
    "balanced": CacheSettings("balanced", budget=0.6, head=0.16, tail=0.08, longest=2),
    "fast": CacheSettings("fast", budget=0.75, head=0.12, tail=0.08, longest=3),
}
CHOICES = (OFF, *PRESETS)


def cache_settings(name: str) -> CacheSettings | None:
    """Gives a preset, None for `OFF`; raises SettingError for another name."""
    if name == OFF:
        return None
    if name not in CHOICES:  # also what has no hash
        raise SettingError(f"There is no step cache {name!r}: choose {', '.join(CHOICES)}.")
    return PRESETS[name]


@dataclass(frozen=True)
class StepPlan:
    skipped: tuple[bool, ...]
    reason: str = ""  # why none may be, in one clause; empty where some may

    @property
    def steps(self) -> int:
        return len(self.skipped)

    @property
    def computed(self) -> int:
        return self.steps - sum(self.skipped)


def plan_steps(
    sigmas: Sequence[float], settings: CacheSettings, kept: Collection[int] = ()
) -> StepPlan:
    """Chooses the steps that cost the image least, of one more sigmas; those `kept` are computed. A
    skipped step costs its length times the way of the velocity since the last computed one.
    """
    steps = len(sigmas) - 1
    if reason := _unusable(sigmas):
        return StepPlan((False,) * max(0, steps), reason)
    first, last = ends(steps, settings)
    allowed = tuple(first <= i < last and i not in kept for i in range(steps))
    most = min(round(settings.budget * (steps - FEWEST_STEPS + 1)), sum(allowed))
    if settings.name != CUSTOM:
        most = min(most, steps - FEWEST_COMPUTED)
    most = max(0, most)
    skipped = _cheapest(tuple(sigmas), allowed, most, settings.longest)
    return StepPlan(skipped, "" if most else f"no step of {steps} may be skipped")


def _unusable(sigmas: Sequence[float]) -> str:
    steps = len(sigmas) - 1
    if steps < FEWEST_STEPS:
        return f"runs of {FEWEST_STEPS - 1} steps or fewer need every step"
    if steps > MOST_STEPS:
        return f"the run has {steps} steps, more than {MOST_STEPS}"
    falling = all(a > b for a, b in pairwise(sigmas))
    if not falling or not all(map(math.isfinite, sigmas)) or sigmas[-1] < 0:
        return "the sigmas do not fall from step to step"
    return ""


def ends(steps: int, settings: CacheSettings) -> tuple[int, int]:
    """Finds (the first step that may be skipped, the first of the last ones that may not)."""
    head, tail = (
        # 0.07 * 100 is 7.000000000000001.
        max(fewest, math.ceil(round(share * steps, 6)))
        for fewest, share in ((FEWEST_HEAD, settings.head), (FEWEST_TAIL, settings.tail))
    )
    return head, steps - tail


def computed_steps(steps: int, name: str) -> int:
    """Counts the steps that call the transformer, with diffusers' schedule for 1024x1024."""
    settings = cache_settings(name)
    return steps if settings is None else computed_with(steps, settings)


def computed_with(steps: int, settings: CacheSettings) -> int:
    return plan_steps(official_sigmas(steps), settings).computed


# How far the hidden state after the last block moves from one step to the next: relative L1 of
# Qwen-Image, the mean over 7 prompts of 20 steps at 512x512 with CFG 4, published in
# IonDen/mlx-teacache, scripts/_calibration_qwen.json (Apache-2.0).
PUBLISHED_CHANGES = (
    *(2.1314, 0.6104, 0.5298, 0.3312, 0.2689, 0.1999, 0.1619, 0.1323, 0.1083, 0.0730),
    *(0.0782, 0.0928, 0.0880, 0.1370, 0.1516, 0.2050, 0.2942, 0.3347, 0.5514),
)


@remembered
@lru_cache(maxsize=1)
def _trace() -> tuple[list[float], list[float]]:
    # (sigmas, rising; how far the velocity moves from there to the beginning)
    sigmas = official_sigmas(len(PUBLISHED_CHANGES) + 1, 1024)[:-1]
    moved = [0.0, *accumulate(PUBLISHED_CHANGES)]
    return sigmas[::-1], moved[::-1]


def _moved(sigma: float) -> float:
    """Interpolates how far the velocity moves from the beginning, in the published trace."""
    sigmas, moved = _trace()
    i = min(max(bisect_right(sigmas, sigma) - 1, 0), len(sigmas) - 2)
    slope = (moved[i + 1] - moved[i]) / (sigmas[i + 1] - sigmas[i])
    return moved[i] + slope * (sigma - sigmas[i])


@remembered
@lru_cache(maxsize=64)
def _cheapest(
    sigmas: tuple[float, ...], open_steps: tuple[bool, ...], most: int, longest: int
) -> tuple[bool, ...]:
    steps = len(open_steps)
    moved = [_moved(sigma) for sigma in sigmas]
    # {(skipped so far, skipped in a row): (cost, the steps as bits)}, the cheapest ways to a step.
    ways: dict[tuple[int, int], tuple[float, int]] = {(0, 0): (0.0, 0)}
    for i in range(steps):
        length = sigmas[i] - sigmas[i + 1]
        found: dict[tuple[int, int], tuple[float, int]] = {}
        for (count, row), (cost, chosen) in ways.items():
            found[count, 0] = min(found.get((count, 0), (cost, chosen)), (cost, chosen))
            if open_steps[i] and row < longest and count < most:
                more = length * (moved[i] - moved[i - row - 1])
                found[count + 1, row + 1] = cost + more, chosen | 1 << i
        ways = found
    count = max(count for count, _ in ways)
    _, best = min(way for (skipped, _), way in ways.items() if skipped == count)
    return tuple(bool(best >> i & 1) for i in range(steps))
