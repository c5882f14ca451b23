"""Runs the step cache on ComfyUI's hooks: one wrapper around a run, one around a step's prediction.

Both branches of CFG, with their ControlNets and patches, are inside of PREDICT_NOISE, so that a
skipped step calls nothing of the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.model_sampling import CONST
from comfy.patcher_extension import WrappersMP

from ....optimizations.patches import patched
from ....optimizations.step_cache import CachedRun, CacheFigures
from ....planning.options import label_of
from ....planning.step_cache import CacheSettings
from ....verdict import Verdict, read_or
from ..on_node import show_run
from .forward import COMPUTED_STEPS
from .measure import record_runs
from .run import STEP_CACHE_KEY, UNREAD

NOT_A_FLOW = Verdict("the model is not a rectified flow")
READS_MORE = Verdict("the sampler uses a step's prompts separately, as cfg_pp samplers do")
# With APG's momentum of 0.8, forecasts of 14 of 20 steps miss by 0.5 % and the final latent by 53 %
# (micro model, CFG 4): a step that is skipped does not come into its average.
REMEMBERS = Verdict("guidance uses earlier steps, as APG with momentum does")
COMBINED = Verdict("several prompts are combined")
HOOKS = Verdict("hooks change the weights during the run")
ALL_KEPT = Verdict("the mask has no area that is generated in full")
# Where a sampler can put functions of its own around the guidance.
AROUND_GUIDANCE = ("sampler_pre_cfg_function", "sampler_cfg_function", "sampler_post_cfg_function")

# Of ComfyUI's guiders. Other numbers of a guider may change in every step, as a counter does.
SCALES = ("cfg", "cfg1", "cfg2", "neg_scale")


class SamplerStepCache:
    """The attachment that `cache_steps` puts on a patcher; clones of the patcher share it."""

    def __init__(self, settings: CacheSettings) -> None:
        self.settings = settings
        self._run: CachedRun | None = None
        self._remembered: list[torch.Tensor] | None = None  # after the last computed step
        self._last: CacheFigures | None = None

    def outer_sample(
        self,
        executor: Any,
        noise: torch.Tensor,
        latent_image: torch.Tensor,
        sampler: Any,
        sigmas: torch.Tensor,
        denoise_mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Runs one sampling run, which may be inside of another's callback (OUTER_SAMPLE)."""
        guider = executor.class_obj
        before = self._run, self._remembered
        self._run, self._remembered = self._new_run(guider, sigmas, denoise_mask), None
        options = guider.model_options.setdefault("transformer_options", {})
        try:
            with patched([(options, COMPUTED_STEPS, self._run.computed_steps)]):
                output = executor(
                    noise, latent_image, sampler, sigmas, denoise_mask, *args, **kwargs
                )
            self._last = self._run.finish()
        finally:
            self._run, self._remembered = before
        show_run("QwenL40S_StepCache", lines := self.lines(), lines[0])
        return output

    def predict_noise(
        self, executor: Any, x: torch.Tensor, timestep: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Predicts x0 of one step, forecast or computed (PREDICT_NOISE)."""
        run = self._run
        if run is None:
            return executor(x, timestep, *args, **kwargs)
        guider = executor.class_obj
        if _reads_more(guider, *args, **kwargs):
            run.stop(READS_MORE)
        sigma = timestep.reshape(-1, *(1,) * (x.ndim - 1))
        velocity = run.forecast(x, timestep, _guidance(guider))
        if velocity is not None:
            return x - sigma * velocity
        denoised = executor(x, timestep, *args, **kwargs)
        if self._remembers(guider):
            run.stop(REMEMBERS)
        run.computed(x, (x - denoised) / sigma)
        return denoised

    def figures(self) -> CacheFigures | None:
        """Returns the figures of the run whose last step is over, which a record inside of this run
        asks for, or of the last run that has ended. A run that goes on may be the one around it.
        """
        if self._run is not None and self._run.is_over:
            self._last = self._run.finish()
        return self._last

    def lines(self) -> list[str]:
        figures = self.figures()
        return [] if figures is None else figures.lines()

    def _remembers(self, guider: Any) -> bool:
        """Returns whether the guidance keeps another tensor than after the step before."""
        before, self._remembered = self._remembered, _remembered_by(guider)
        return before is not None and not {*map(id, self._remembered)} <= {*map(id, before)}

    def _new_run(self, guider: Any, sigmas: torch.Tensor, mask: torch.Tensor | None) -> CachedRun:
        schedule = sigmas.tolist()
        followed = None if mask is None else (mask >= 1).float()
        limits = lambda: (_refusal(guider), _kept(guider, sigmas))  # noqa: E731
        refusal, kept = read_or((UNREAD, set()), limits)
        if followed is not None and not followed.any():
            refusal = refusal or ALL_KEPT
        run = CachedRun(self.settings, schedule, kept=kept, refusal=refusal, followed=followed)
        run.figures.name = label_of("cache", run.figures.name)
        if read_or(True, lambda: any(map(_overlap, guider.conds.values()))):
            run.figures.not_estimated = COMBINED
        return run


def cache_steps(model: ModelPatcher, settings: CacheSettings | None) -> ModelPatcher:
    """Returns a clone with a step cache, or with none; a second call replaces the first."""
    clone = model.clone()
    for kind in (WrappersMP.OUTER_SAMPLE, WrappersMP.PREDICT_NOISE):
        clone.remove_wrappers_with_key(kind, STEP_CACHE_KEY)
    clone.remove_attachments(STEP_CACHE_KEY)
    if settings is None:
        return clone
    cache = SamplerStepCache(settings)
    clone.set_attachments(STEP_CACHE_KEY, cache)
    record_runs(clone)
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, STEP_CACHE_KEY, cache.outer_sample)
    clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, STEP_CACHE_KEY, cache.predict_noise)
    return clone


def _guidance(guider: Any) -> Hashable:
    scales = (getattr(guider, name, None) for name in SCALES)
    return tuple(scale if isinstance(scale, (int, float)) else None for scale in scales)


def _reads_more(
    guider: Any, model_options: Mapping[str, Any] = MappingProxyType({}), *_: Any, **__: Any
) -> bool:
    own = guider.model_options
    return any(model_options.get(name) != own.get(name) for name in AROUND_GUIDANCE)


def _refusal(guider: Any) -> Verdict | None:
    # Patches of the model are not in place before the run has loaded it.
    if not isinstance(guider.model_patcher.get_model_object("model_sampling"), CONST):
        return NOT_A_FLOW
    options = guider.model_options.get("transformer_options", {})
    wrappers = options.get("wrappers", {}).values()
    names = {*options, *(str(key) for keyed in wrappers for key in keyed)}
    if others := sorted(name for name in names if "cache" in name.lower()):
        return Verdict(f"another cache is on the MODEL: {', '.join(others)}")
    return HOOKS if any(map(_is_scheduled, _conds(guider))) else None


def _conds(guider: Any) -> Iterator[Mapping[str, Any]]:
    return (cond for conds in guider.conds.values() for cond in conds)


def _is_scheduled(cond: Mapping[str, Any]) -> bool:
    hooks = cond.get("hooks")
    return hooks is not None and any(hook.hook_keyframe.keyframes for hook in hooks.hooks)


def _overlap(conds: Sequence[Mapping[str, Any]]) -> bool:
    spans = sorted((it.get("start_percent", 0.0), it.get("end_percent", 1.0)) for it in conds)
    return any(after[0] < before[1] for before, after in pairwise(spans))


def _remembered_by(guider: Any) -> list[torch.Tensor]:
    functions = {name: guider.model_options.get(name) for name in AROUND_GUIDANCE}
    return [*_tensors_in(guider, 2), *_tensors_in(functions, 4)]


def _tensors_in(thing: Any, depth: int) -> Iterator[torch.Tensor]:
    """Finds the tensors of a container, or of an object's or a function's variables; sigmas, which
    the next step tells again, have one dimension.
    """
    if isinstance(thing, torch.Tensor):
        if thing.ndim > 1:
            yield thing
    elif depth:
        for part in _parts_of(thing):
            yield from _tensors_in(part, depth - 1)


def _parts_of(thing: Any) -> Iterator[Any]:
    if isinstance(thing, Mapping):
        yield from thing.values()
    elif isinstance(thing, (list, tuple, deque)):
        yield from thing
    else:
        yield from getattr(thing, "__dict__", {}).values()
        yield from getattr(getattr(thing, "__self__", None), "__dict__", {}).values()
        for cell in getattr(thing, "__closure__", None) or ():
            with suppress(ValueError):  # not filled yet
                yield cell.cell_contents


def _kept(guider: Any, sigmas: torch.Tensor) -> set[int]:
    """Finds the two steps after a prompt or a ControlNet begins or ends: they share no forecast."""
    to_sigma = guider.model_patcher.get_model_object("model_sampling").percent_to_sigma
    kept = set()
    for percent in {p for cond in _conds(guider) for p in _percents(cond)}:
        if 0 < percent < 1:
            # In the sigmas' own precision, as ComfyUI compares: a step may begin at the very edge.
            first = int((sigmas > to_sigma(percent)).sum())
            # A range ends below the sigma at which the next begins.
            kept |= {first, first + 1, first + 2}
    return kept


def _percents(cond: Mapping[str, Any]) -> Iterator[float]:
    for name in ("start_percent", "end_percent"):
        if name in cond:
            yield cond[name]
    control = cond.get("control")
    while control is not None:
        yield from control.timestep_percent_range
        control = control.previous_controlnet
