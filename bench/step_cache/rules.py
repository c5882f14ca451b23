"""Rules for skipping steps of a sampling run: ours, and those of papers and of ComfyUI's nodes.

Each says which images skip a step, and gives a velocity in place of the model's. Images skip on
their own where a rule decides by the image.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch

from ...optimizations.step_cache import CachedRun, CacheFigures
from ...step_cache import CacheSettings
from .run import Found, Rule, Run, guided


def _put(kept: torch.Tensor | None, rows: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """What is known of each image, with the news of some; the first news is of all."""
    if kept is None or len(new) == len(kept):
        return new
    kept[rows] = new
    return kept


def _mean(x: torch.Tensor) -> torch.Tensor:
    """Of each image's absolute values, [N]."""
    return x.flatten(1).abs().mean(1)


class Ours(Rule):
    """This package's step cache, one `CachedRun` an image, called as a host calls it."""

    def __init__(self, run: Run, settings: CacheSettings) -> None:
        super().__init__(run)
        self._runs = [CachedRun(settings, run.sigmas) for _ in range(run.count)]
        self._found: list[torch.Tensor | None] = []

    def skips(self, step: int, x: torch.Tensor, sigma: float) -> torch.Tensor:
        at = torch.tensor([sigma], device=x.device)
        self._found = [run.forecast(x[i : i + 1], at) for i, run in enumerate(self._runs)]
        return torch.tensor([found is not None for found in self._found])

    def reuse(self, step: int, x: torch.Tensor, sigma: float) -> torch.Tensor:
        return torch.cat([x[:1] if found is None else found for found in self._found])

    def computed(
        self, step: int, x: torch.Tensor, sigma: float, rows: torch.Tensor, found: Found
    ) -> None:
        velocity = guided(found.velocity)
        for place, i in enumerate(rows.tolist()):
            self._runs[i].computed(x[i : i + 1], velocity[place : place + 1])

    def figures(self) -> list[CacheFigures]:
        """Of each image, once the run is over."""
        return [run.finish() for run in self._runs]


class HeldResidual(Rule):
    """The residual of each branch held over given steps."""

    def __init__(self, run: Run, skipped: Collection[int] = ()) -> None:
        super().__init__(run)
        self._skipped = frozenset(skipped)
        self._residual: torch.Tensor | None = None

    def skips(self, step: int, x: torch.Tensor, sigma: float) -> bool | torch.Tensor:
        return step in self._skipped

    def reuse(self, step: int, x: torch.Tensor, sigma: float) -> torch.Tensor:
        return guided(self.run.field.finish(x, sigma, self._residual))

    def computed(
        self, step: int, x: torch.Tensor, sigma: float, rows: torch.Tensor, found: Found
    ) -> None:
        self._residual = _put(self._residual, rows, found.residual)


class EasyCache(Rule):
    """ComfyUI 0.33's EasyCache node (after arXiv 2507.02860), without writing into its input.

    Skips while the output's predicted change adds up to less than a threshold, between 15 % and
    95 % of the run; holds the difference of each branch's output and the input.
    """

    SHIFT = 1.15  # ComfyUI's for Qwen-Image, by which it turns percent into sigma
    ALWAYS = False  # whether it looks at outputs before 15 %, too

    def __init__(self, run: Run, threshold: float) -> None:
        super().__init__(run)
        self._threshold = threshold
        self._first, self._last = (
            self.SHIFT * s / (1 + (self.SHIFT - 1) * s) for s in (0.85, 0.05)
        )
        self._x = self._output = self._size = self._rate = self._difference = None
        self._change: torch.Tensor | None = None  # of x since the last computed step
        self._total: torch.Tensor | float = 0.0

    def skips(self, step: int, x: torch.Tensor, sigma: float) -> bool | torch.Tensor:
        self._change = None
        if not self._last < sigma <= self._first or self._x is None:
            return False
        self._change = _mean(self._part(x) - self._x)
        if self._rate is None:
            return False
        total = self._total + self._rate * self._change / self._size
        skipped = total < self._threshold
        self._total = total * skipped
        return skipped

    def reuse(self, step: int, x: torch.Tensor, sigma: float) -> torch.Tensor:
        return guided(x[:, None] + self._difference)

    def computed(
        self, step: int, x: torch.Tensor, sigma: float, rows: torch.Tensor, found: Found
    ) -> None:
        if sigma <= self._last or not (self.ALWAYS or sigma <= self._first):
            return
        x = x[rows]
        output, difference = self._watched(x, sigma, found)
        part = self._part(output)
        if self._output is not None and self._change is not None:
            rate = _mean(part - self._output[rows]) / self._change[rows]
            self._rate = _put(self._rate, rows, rate)
        self._difference = _put(self._difference, rows, difference)
        self._x = _put(self._x, rows, self._part(x))
        self._output = _put(self._output, rows, part)
        self._size = _put(self._size, rows, _mean(output))

    def _watched(
        self, x: torch.Tensor, sigma: float, found: Found
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output whose change is predicted, and what is held."""
        return found.velocity[:, 0], found.velocity - x[:, None]

    def _part(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., ::8, ::8].clone()


class LazyCache(EasyCache):
    """ComfyUI 0.33's LazyCache node: the same of the guided x0, whose difference to x is held."""

    ALWAYS = True

    def reuse(self, step: int, x: torch.Tensor, sigma: float) -> torch.Tensor:
        return -self._difference / sigma

    def _watched(
        self, x: torch.Tensor, sigma: float, found: Found
    ) -> tuple[torch.Tensor, torch.Tensor]:
        difference = -sigma * guided(found.velocity)
        return x + difference, difference


def magcache_steps(ratios: Sequence[float], error: float, longest: int) -> set[int]:
    """The steps that MagCache (arXiv 2506.09045) skips, holding the residual.

    Args:
        ratios: Of each step, the size of its residual over that of the step before.
        error: What the deviations of their product from 1 may add up to.
        longest: Most steps in a row.
    """
    skipped, product, total, row = set(), 1.0, 0.0, 0
    for step in range(math.ceil(0.2 * len(ratios)), len(ratios)):
        product *= ratios[step]
        total, row = total + abs(1 - product), row + 1
        if total < error and row <= longest:
            skipped.add(step)
        else:
            product, total, row = 1.0, 0.0, 0
    return skipped


class TeaCache(HeldResidual):
    """arXiv 2411.19108: skips while the output's change, as a polynomial of how much the first
    block's modulated input changes, adds up to less than a threshold; holds the residual.
    """

    def __init__(self, run: Run, threshold: float, curve: Sequence[float]) -> None:
        super().__init__(run)
        self._threshold, self._curve = threshold, curve
        self._input: torch.Tensor | None = None
        self._total: torch.Tensor | float = 0.0

    def skips(self, step: int, x: torch.Tensor, sigma: float) -> bool | torch.Tensor:
        before, self._input = self._input, self.run.field.modulated(x, sigma)
        if before is None or step == self.run.steps - 1:
            return False
        change = relative_change(self._input, before)
        total = self._total
        for power, coefficient in enumerate(reversed(self._curve)):
            total = total + coefficient * change**power
        skipped = total < self._threshold
        self._total = total * skipped
        return skipped


def relative_change(x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Of each image, mean |x - before| / mean |before|."""
    return _mean(x - before) / _mean(before)


class TaylorSeer(HeldResidual):
    """arXiv 2503.06923, of the residual of all blocks: a Taylor series over the step's index, whose
    derivatives are differences between computed steps.
    """

    def __init__(self, run: Run, skipped: Collection[int], order: int) -> None:
        super().__init__(run, skipped)
        self._order, self._step = order, 0
        self._derivatives: list[torch.Tensor] = []

    def reuse(self, step: int, x: torch.Tensor, sigma: float) -> torch.Tensor:
        ahead = step - self._step
        terms = (d * (ahead**i / math.factorial(i)) for i, d in enumerate(self._derivatives))
        return guided(self.run.field.finish(x, sigma, sum(terms)))

    def computed(
        self, step: int, x: torch.Tensor, sigma: float, rows: torch.Tensor, found: Found
    ) -> None:
        derivatives = [found.residual]
        for before in self._derivatives[: self._order]:
            derivatives.append((derivatives[-1] - before) / (step - self._step))
        self._derivatives, self._step = derivatives, step


def taylorseer_steps(steps: int, computed: int) -> set[int]:
    """The steps that TaylorSeer skips: all of the first ones are computed, then every N-th.

    The smallest N that leaves three first ones, as its release has.
    """
    for interval in range(2, steps):
        for head in range(3, computed + 1):
            if head + (steps - head) // interval == computed:
                return {i for i in range(head, steps) if (i - head + 1) % interval}
    raise ValueError(f"of {steps} steps {computed} cannot be computed")


class AdaCache(HeldResidual):
    """arXiv 2411.02397: by how much the middle block's residual changes a step, a codebook says
    how many steps the next ones hold the residual; a threshold scales the codebook's changes.
    Its motion regularization has no form here: an image has no frames.
    """

    # The release's fast codebook for 30 steps: below each change, how many steps a step serves.
    CHANGES, RATES = (0.08, 0.16, 0.24, 0.32, 0.40), (6, 5, 4, 3, 2, 1)

    def __init__(self, run: Run, threshold: float) -> None:
        super().__init__(run)
        self._changes = torch.tensor(self.CHANGES) * threshold
        self._rates = torch.tensor(self.RATES)
        self._middle = self._rate = self._next = None

    def skips(self, step: int, x: torch.Tensor, sigma: float) -> bool | torch.Tensor:
        if self._next is None or step >= self.run.steps - 2:
            return False
        return self._next > step

    def computed(
        self, step: int, x: torch.Tensor, sigma: float, rows: torch.Tensor, found: Found
    ) -> None:
        super().computed(step, x, sigma, rows, found)
        if self._middle is not None:
            change = relative_change(found.middle, self._middle[rows]) / self._rate[rows]
            place = torch.bucketize(change, self._changes.to(change), right=True)
            rate = self._rates.to(change.device)[place]
        else:
            rate = torch.ones(len(rows), dtype=torch.int64, device=x.device)
        self._middle = _put(self._middle, rows, found.middle)
        self._rate = _put(self._rate, rows, rate)
        self._next = _put(self._next, rows, step + rate)


class MeanCache(Rule):
    """arXiv 2601.19961 as released for Qwen-Image: 25 of 50 steps. The velocity is held between
    steps 37 and 44, elsewhere corrected by the average velocity of the last two steps.
    """

    STEPS = 50
    COMPUTED = frozenset({*range(16), 23, 31, 37, *range(44, 50)})
    HELD_FROM = 37

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._velocities: list[torch.Tensor] = []  # of all steps, forecast ones too

    def skips(self, step: int, x: torch.Tensor, sigma: float) -> bool:
        return step not in self.COMPUTED

    def reuse(self, step: int, x: torch.Tensor, sigma: float) -> torch.Tensor:
        before, last = self._velocities[-2:]
        if step > self.HELD_FROM:
            velocity = last
        else:
            s = self.run.sigmas
            length = s[step] - s[step - 2]
            average = (
                before * (s[step - 1] - s[step - 2]) + last * (s[step] - s[step - 1])
            ) / length
            velocity = last - (before - average) / length * (s[step + 1] - s[step])
        self._velocities = [last, velocity]
        return velocity.clone()

    def computed(
        self, step: int, x: torch.Tensor, sigma: float, rows: torch.Tensor, found: Found
    ) -> None:
        self._velocities = [*self._velocities[-1:], guided(found.velocity)]
