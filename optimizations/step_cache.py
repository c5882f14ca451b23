"""Runs a sampling run whose transformer is not called at every step.

The forecast is of the guided velocity in latent space, v = (x - x0) / sigma of a rectified flow. So
both branches of CFG, ControlNets, references and weights that move are skipped together, and the
state is three latents. At each computed step that follows skipped ones the forecast is compared
with the velocity that was computed, without waiting for the card.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..planning.step_cache import CacheSettings, plan_steps
from ..verdict import Verdict
from .run import Later

# A forecast that misses by more has the next ones refused. A first guess: the micro model's good
# settings miss by 0.012 to 0.035, its poor ones by 0.05 to 0.14.
MOST_MISSED = 0.15
# How far a latent may be from where the last velocity leads, in parts of that step. Of ComfyUI's
# samplers on the micro model, 20 steps of "simple" (bench/results/step-cache-samplers.json),
# dpmpp_2m, deis and ipndm read up to 1.25 in the first steps, where the velocity changes most, and
# err by 0.015 at most; lms, ipndm_v, gradient_estimation and uni_pc read 1.8 to 5.2 and err by 0.05
# to 0.17; what adds noise reads 7 and more.
MOST_ASTRAY = 1.5
SAME_SIGMA = 1e-3  # relative; float32 rounds by 6e-8
TINY = torch.finfo(torch.float32).tiny
CHANGED = Verdict("size, type, device or CFG changed during the run")
NONE_SKIPPED = Verdict("no step is skipped")
CALLED_AGAIN = Verdict("the sampler calls the model more than once a step")
ENDED = Verdict("the run has ended")


class Computed(NamedTuple):
    """A velocity that the transformer gave, and the step's index and sigma."""

    velocity: torch.Tensor
    step: int
    sigma: float


@dataclass
class CacheFigures:
    name: str  # of the settings
    steps: int  # of the schedule
    skipped: list[int] = field(default_factory=list)  # the steps that were forecast, by index
    # at each computed step after skipped ones, |forecast - computed| / |computed|; what is not
    # finite is left out
    missed: list[float] = field(default_factory=list)
    # estimated relative L2 distance of the final latent from that of a run without the cache; None
    # where nothing was skipped, or the cache went off in mid-run
    distance: float | None = None
    # why the host does not trust `distance`; None where it does
    not_estimated: Verdict | None = None
    # steps that were computed after all, since a forecast had missed by more than `MOST_MISSED`
    refused: int = 0
    forgotten: int = 0  # how often size, type, device or guidance changed in mid-run
    seconds_saved: float = 0.0  # about
    reason: Verdict | None = None  # why the cache was off, or went off in mid-run

    @property
    def computed(self) -> int:
        return self.steps - len(self.skipped)

    def lines(self) -> list[str]:
        changed = CHANGED if self.forgotten else None
        if not self.skipped:
            reason = self.reason or changed or NONE_SKIPPED
            return [f"step cache: {self.name} has no effect: {reason}"]
        said = [
            f"{self.name} computes {self.computed} of {self.steps} steps and saves about "
            f"{self.seconds_saved:.1f} s"
        ]
        if self.missed:
            average, most = sum(self.missed) / len(self.missed), max(self.missed)
            said.append(
                f"forecasts are off by {_percent(average)} on average and {_percent(most)} at "
                "most, measured at the next computed step"
            )
        if self.not_estimated:
            said.append(
                f"the difference in the final latent is not estimated, because {self.not_estimated}"
            )
        elif self.distance is not None:
            said.append(
                f"the estimated difference in the final latent is {_percent(self.distance)}"
            )
        if self.refused:
            said.append(
                f"{self.refused} more steps are computed, because a forecast was off by more than "
                f"{_percent(MOST_MISSED)}"
            )
        if changed:
            said.append(f"starts over: {changed}")
        if self.reason:
            said.append(f"computes the rest of the run: {self.reason}")
        return [f"step cache: {sentence}" for sentence in said]


class CachedRun:
    """One sampling run with a step cache.

    For each call of the model the host asks for a `forecast`; where there is none it computes, and
    tells with `computed`. Nothing is kept for another run.

    Args:
        sigmas: Of the run, one more than it has steps.
        refusal: Why the host wants none skipped; None where it does not mind.
        followed: Where the sampler follows the model's prediction, broadcastable to the latent;
            None for everywhere. Inpainting has a mask.
    """

    def __init__(
        self,
        settings: CacheSettings,
        sigmas: Sequence[float],
        *,
        kept: Collection[int] = (),
        refusal: Verdict | None = None,
        followed: torch.Tensor | None = None,
    ) -> None:
        self.settings = settings
        self._sigmas = list(sigmas)
        self._plan = plan = plan_steps(self._sigmas, settings, kept)
        self.figures = CacheFigures(settings.name, plan.steps)
        self._followed = followed
        self._reason = refusal or (Verdict(plan.reason) if plan.reason else None)
        self._calls = 0
        self._key: Hashable = None
        self._history: list[Computed] = []  # the last two
        self._since: list[int] = []  # skipped since the last computed step
        self._refusing = False
        self._expected: tuple[torch.Tensor, torch.Tensor] | None = None
        self._watched: list[Later] = []
        self._misses: list[tuple[Later, float]] = []  # with the weight of their skipped steps
        self._unread = 0
        self._final: Later | None = None  # |the last latent|
        self._warm = 0.0
        self._ended = False

    @property
    def computed_steps(self) -> int:
        """Says how many steps call the transformer, as far as it is known before the run."""
        return self.figures.steps if self._reason else self._plan.computed

    @property
    def is_over(self) -> bool:
        return self._calls >= self.figures.steps

    def forecast(
        self, x: torch.Tensor, sigma: torch.Tensor, key: Hashable = None
    ) -> torch.Tensor | None:
        """Gives the velocity of a step that is skipped; None for one that is to be computed.

        Args:
            x: The latent, of any shape.
            sigma: Of the call; every item's, on any device.
            key: What else the velocity depends on; when it changes, what is known is forgotten.
        """
        step = self._calls
        self._calls += 1
        if step == 1:  # the first also compiles and fills tables
            self._warm = time.perf_counter()
        if self._reason:
            return None
        if step >= self.figures.steps:
            self.stop(CALLED_AGAIN)
            return None
        self._forget_if_other((x.shape, x.dtype, x.device, key))
        self._watch(step, x, sigma)
        if self._astray() or not self._skips(step):
            return None
        velocity = self._extrapolated(self._sigmas[step])
        self._since.append(step)
        self.figures.skipped.append(step)
        self._expect(step, x, velocity)
        return velocity

    def computed(self, x: torch.Tensor, velocity: torch.Tensor) -> None:
        """Takes the guided velocity that the model gave at x, where `forecast` had none."""
        if self._reason:
            return
        step = self._calls - 1
        if self._since:
            self._compare(step, velocity)
        self._history = [*self._history[-1:], Computed(velocity, step, self._sigmas[step])]
        self._expect(step, x, velocity)

    def stop(self, reason: Verdict) -> None:
        """Has the rest of the run computed; the first reason counts."""
        self._reason = self._reason or reason
        self._history, self._expected = [], None

    def finish(self) -> CacheFigures:
        """Waits for the card, and forgets everything but the figures."""
        figures, ended, self._ended = self.figures, self._ended, True
        if ended:
            return figures
        misses = [later.read() for later, _ in self._misses]
        figures.missed = _relative(misses)
        if self._final is not None and misses:
            moved = sum(m[0] * weight for m, (_, weight) in zip(misses, self._misses, strict=True))
            figures.distance = next(iter(_relative([[moved, *self._final.read()]])), None)
        if figures.skipped and figures.computed > 1:
            seconds = (time.perf_counter() - self._warm) / (figures.computed - 1)
            figures.seconds_saved = seconds * len(figures.skipped)
        figures.reason = self._reason
        self.stop(self._reason or ENDED)
        self._followed = None
        return figures

    def _forget_if_other(self, key: Hashable) -> None:
        if key == self._key:
            return
        self.figures.forgotten += self._key is not None
        self._key = key
        self._history, self._since, self._expected = [], [], None
        self._unread, self._refusing = len(self._misses), False

    def _watch(self, step: int, x: torch.Tensor, sigma: torch.Tensor) -> None:
        found = sigma.flatten()[0].to(x.device, non_blocking=True)
        astray = torch.zeros_like(found, dtype=torch.float32)
        if self._expected is not None:
            expected, length = self._expected
            rounding = torch.finfo(x.dtype).eps * self._norm(x)
            astray = (self._norm(x.float() - expected) - rounding) / length.clamp(min=TINY)
        self._watched.append(Later(step, astray, found))

    def _astray(self) -> bool:
        last = self._history[-1].step if self._history else -1
        while self._watched and self._watched[0].step <= last and not self._reason:
            later = self._watched.pop(0)
            astray, sigma = later.read()
            wanted = self._sigmas[later.step]
            if not abs(sigma - wanted) <= SAME_SIGMA * max(wanted, SAME_SIGMA):
                called = (
                    f"the sampler calls the model at sigma {sigma:.3g} in step {later.step + 1}"
                )
                self.stop(Verdict(f"{called}, whose sigma is {wanted:.3g}"))
            elif math.isnan(astray):
                self.stop(Verdict(f"the model's prediction of step {later.step} is not finite"))
            elif astray > MOST_ASTRAY:
                away = f"the latent is {astray:.3g} steps away from the prediction"
                self.stop(Verdict(away, "the sampler adds noise or combines several predictions"))
        return self._reason is not None

    def _skips(self, step: int) -> bool:
        if not self._plan.skipped[step] or len(self._history) < 2:
            return False
        if not self._since and not (self._refusing and self._plan.skipped[step - 1]):
            self._refusing = self._missed_too_much()  # a row begins
        self.figures.refused += self._refusing
        return not self._refusing

    def _missed_too_much(self) -> bool:
        # That of the last computed step is for the next look: the card still computes it.
        last, found = self._history[-1].step, False
        while self._unread < len(self._misses) and self._misses[self._unread][0].step < last:
            miss, size = self._misses[self._unread][0].read()
            found |= not miss <= MOST_MISSED * size  # NaN misses
            self._unread += 1
        return found

    def _extrapolated(self, sigma: float) -> torch.Tensor:
        """Gives v1 + gain (v1 - v2) (s - s1) / (s1 - s2), the correction no longer than v1 - v2."""
        before, last = self._history
        factor = self.settings.gain * (sigma - last.sigma) / (last.sigma - before.sigma)
        return torch.lerp(last.velocity, before.velocity, -min(factor, 1.0))

    def _compare(self, step: int, velocity: torch.Tensor) -> None:
        # An error grows with the distance from the last computed step.
        last, here = self._history[-1].sigma, self._sigmas[step]
        weight = sum(
            (self._sigmas[i] - self._sigmas[i + 1]) * (last - self._sigmas[i]) / (last - here)
            for i in self._since
        )
        self._misses.append((self._miss(step, velocity), weight))
        self._since = []

    def _miss(self, step: int, velocity: torch.Tensor) -> Later:
        guess = self._extrapolated(self._sigmas[step])
        return Later(step, self._norm(guess.float() - velocity.float()), self._norm(velocity))

    def _expect(self, step: int, x: torch.Tensor, velocity: torch.Tensor) -> None:
        # Where the next call's latent is, if the sampler takes an Euler step.
        change = (self._sigmas[step + 1] - self._sigmas[step]) * velocity.float()
        there = x.float() + change
        self._expected = there, self._norm(change)
        if step + 1 == self.figures.steps:
            self._final = Later(step, self._norm(there))

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() if self._followed is None else x.float() * self._followed).norm()


def _relative(misses: Iterable[Sequence[float]]) -> list[float]:
    return [part for miss, size in misses if math.isfinite(part := miss / max(size, TINY))]


def _percent(share: float) -> str:
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"
