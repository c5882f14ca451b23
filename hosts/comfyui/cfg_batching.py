"""Positive and negative prompt in one forward pass, where that is faster on this card.

One pass of two prompts reads the weights once and fills the card better; its padding and its mask
cost time. Which of the two wins is measured in the steps of a run itself, without a step more, and
kept on disk. The result differs from that of separate passes by rounding: not bit-identical.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import torch

from ...errors import SettingError
from ...optimizations.attention.cache import Cache, Measurement, default_cache
from .cfg_padding import Conds, Merge, find_merges, padded
from .cfg_trial import (
    BATCHED,
    BATCHED_STEPS,
    ORDER,
    SEPARATE,
    Span,
    Trial,
    key_of,
    why_not_measured,
)
from .wrapped_call import is_compiled, options_of

SETTINGS = ("off", "on", "auto")
# The part of the time that a batched pass has to save.
LEAST_GAIN = 0.03
# Steps of one kind that differ by more are no measurement: something else used the card, or another
# node left out a forward pass.
MOST_SPREAD = 0.05
OWN = "cfg: ComfyUI's own forward passes"

Run = Callable[[Conds], list[torch.Tensor]]


class CfgBatching:
    """Merges the prompts of a guided step, by two wrappers of a patcher; clones share it.

    Args:
        setting: "off", "on", or "auto": where it was measured to save `LEAST_GAIN` of the time.
        path: What else decides how long a forward pass takes, such as the attention's name: part
            of what a measurement holds for.
        cache: Where measurements are kept; the user's cache folder by default.

    Raises:
        SettingError: There is no such setting.
    """

    def __init__(self, setting: str, path: str = "", cache: Cache | None = None) -> None:
        if setting not in SETTINGS:
            choices = " or ".join(SETTINGS)
            raise SettingError(f"there is no cfg_batching {setting!r}: use {choices}")
        self._setting = setting
        self._path = path
        self._cache = cache
        self._measured: dict[str, Measurement] = {}
        self._passes: list[int] = []  # the prompts of each forward pass of a step
        self.start_run()

    def start_run(self) -> None:
        """Forgets the last run, not what was measured."""
        self._cases: dict[tuple[Merge, ...], _Case] = {}
        self._aside = ""
        self._seen = False

    def finish_run(self) -> None:
        """Reads the times of a run that was no longer than its measurement."""
        for case in self._cases.values():
            self._conclude(case)

    def calc_cond_batch(
        self,
        executor: Any,
        model: Any,
        conds: Conds,
        x: torch.Tensor,
        sigma: torch.Tensor,
        model_options: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> list[torch.Tensor]:
        """CALC_COND_BATCH wrapper: the prompts of one step."""

        def run(conds: Conds) -> list[torch.Tensor]:
            return executor(model, conds, x, sigma, model_options, *args, **kwargs)

        self._seen = True
        self._passes.clear()
        if "multigpu_clones" in model_options:
            self._aside = "several cards share the prompts of a step"
        if self._setting == "off" or self._aside:
            return run(conds)
        merges = find_merges(conds, x, sigma)
        if not merges:
            return run(conds)
        if merges not in self._cases:
            options = model_options.get("transformer_options", {})
            self._cases[merges] = self._case(merges, model, x.device, options)
        case = self._cases[merges]
        self._conclude(case)
        if case.trial is None:
            return self._merged(run, conds, merges) if case.batched else run(conds)
        kind, timed = case.trial.next_step()
        span = Span(x.device) if timed else None
        output = self._merged(run, conds, merges) if kind == BATCHED else run(conds)
        if span is not None:
            span.end()
        # Without a pass another node has answered without the model.
        if self._passes and not self._aside:
            case.trial.add(kind, span)
        return output

    def apply_model(
        self, executor: Any, x: torch.Tensor, t: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """APPLY_MODEL wrapper: notes how many prompts a forward pass takes."""
        self._passes.append(len(options_of(args, kwargs).get("cond_or_uncond", ())))
        return executor(x, t, *args, **kwargs)

    def lines(self) -> list[str]:
        """How the prompts of the last run were batched and why, a line each."""
        if self._setting == "off":
            return [OWN]
        if not self._seen:
            how = {"on": "are padded and batched", "auto": "are batched where that is faster"}
            return [f"cfg: prompts of different lengths {how[self._setting]}"]
        if self._aside:
            return [f"{OWN}: {self._aside}"]
        if not self._cases:
            return [f"{OWN}: there was nothing that padding would merge"]
        return list(dict.fromkeys(case.line for case in self._cases.values()))

    def _case(
        self,
        merges: tuple[Merge, ...],
        model: Any,
        device: torch.device,
        options: dict[str, Any],
    ) -> _Case:
        """What to do with prompts of these lengths in this run."""
        if self._setting == "on":
            return _Case("cfg: one batched pass, as asked for; not bit-identical", batched=True)
        reason = why_not_measured(device)
        if is_compiled(options):
            reason = "torch.compile would compile the model once more for the batch"
        if reason:
            return _Case(f"{OWN}: {reason}")
        key = key_of(merges, model, device, self._path)
        known = self._measured.get(key) or self._store.get(key)
        if known is not None and known.ms.keys() >= {SEPARATE, BATCHED}:
            self._measured[key] = known
            return _decided(known)
        sigmas = options.get("sample_sigmas")
        if sigmas is not None and len(sigmas) <= len(ORDER):
            few = f"{len(sigmas) - 1} steps are too few to measure in, which takes {len(ORDER)}"
            return _Case(f"{OWN}: {few}")
        tokens = max(math.prod(merge.latent[2:]) // 4 + merge.longest for merge in merges)
        unfinished = f"{OWN}: the run ended before separate and batched passes were timed"
        return _Case(unfinished, trial=Trial(key, tokens))

    def _conclude(self, case: _Case) -> None:
        """Makes a trial that is complete a decision, and keeps it."""
        trial = case.trial
        if trial is None or not trial.complete:
            return
        case.trial = None
        found, spread = trial.result()
        if spread > MOST_SPREAD:
            case.line = (
                f"{OWN}: the times of like steps differ by {100 * spread:.0f} %, which decides "
                "nothing: the next run measures again"
            )
            return
        self._measured[trial.key] = found
        self._store.put(trial.key, found)
        decided = _decided(found)
        case.batched = decided.batched
        case.line = f"{decided.line}; measured in this run, {BATCHED_STEPS} steps of it batched"

    def _merged(self, run: Run, conds: Conds, merges: tuple[Merge, ...]) -> list[torch.Tensor]:
        """One step in one pass; separate passes for the rest of the run where memory is short."""
        try:
            output = run(padded(conds, merges))
        except torch.OutOfMemoryError:
            output = None
        if output is None:
            # Outside of `except`, which holds the failed pass's tensors.
            self._aside = "memory ran out with the prompts in one pass"
            comfy.model_management.soft_empty_cache()
            return run(conds)
        passes = sorted(self._passes, reverse=True)
        wanted = sorted((len(merge.places) for merge in merges), reverse=True)
        if any(found < most for found, most in zip(passes, wanted, strict=False)):
            self._aside = "ComfyUI finds too little free memory for the prompts in one pass"
        return output

    @property
    def _store(self) -> Cache:
        if self._cache is None:
            self._cache = Cache(default_cache().path.with_name("cfg_batching.json"))
        return self._cache


@dataclass
class _Case:
    """What is done with prompts of certain lengths in one run; `trial` while it is measured."""

    line: str
    batched: bool = False
    trial: Trial | None = None


def _decided(found: Measurement) -> _Case:
    separate, batched = found.ms[SEPARATE], found.ms[BATCHED]
    gain = 1 - batched / separate
    change = f"{100 * abs(gain):.1f} % {'less' if gain >= 0 else 'more'} time on this card"
    change += f" ({batched:.1f} ms against {separate:.1f} ms)"
    if gain >= LEAST_GAIN:
        return _Case(f"cfg: one batched pass: {change}; not bit-identical", batched=True)
    least = f"{100 * LEAST_GAIN:.0f} %"
    return _Case(f"{OWN}: one batched pass takes {change}, and has to save {least}")
