"""Runs the step cache in diffusers: around a transformer's `forward` and a scheduler's `step`.

A pipeline calls the transformer once or twice a step and hands the guided velocity to the
scheduler. In a skipped step no call runs, and the scheduler gets the forecast itself, whatever the
pipeline's guidance makes of the calls' outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from ...optimizations.patches import patched
from ...optimizations.step_cache import CachedRun, CacheFigures
from ...planning.step_cache import OFF, CacheSettings, cache_settings
from ...verdict import Verdict
from .patch import Forward

ITS_OWN = Verdict("a cache of diffusers is on the transformer")


@contextmanager
def cache_steps(
    pipeline: DiffusionPipeline, cache: str | CacheSettings
) -> Iterator[PipelineStepCache]:
    """Skips the transformer, until the end of the `with` block, in steps that can be forecast from
    the steps before: nearly the same image, sooner.

    Each call of the pipeline is a run of its own. One of ten steps or fewer computes all of them.

    Args:
        pipeline: Any for Qwen-Image; `optimize` may have made its transformer fast.
        cache: "off", "faithful", "balanced" or "fast"; or settings of one's own.

    Raises:
        SettingError: There is no preset of that name.

    Example:
        with cache_steps(pipeline, "balanced") as cached:
            image = pipeline("a red star", num_inference_steps=50).images[0]
        print(cached.report())
    """
    settings = cache_settings(cache) if isinstance(cache, str) else cache
    transformer, scheduler = pipeline.transformer, pipeline.scheduler
    cached = PipelineStepCache(transformer, scheduler, settings)
    if settings is None:
        yield cached
        return
    hung = [Forward(transformer, cached.run)]
    controlnet = getattr(pipeline, "controlnet", None)
    if controlnet is not None:
        hung.append(Forward(controlnet, cached.run_controlnet))
    host = scheduler.step

    @functools.wraps(host)
    def step(model_output: torch.Tensor, timestep: Any, sample: torch.Tensor, *args, **kwargs):
        return host(cached.velocity(model_output, sample), timestep, sample, *args, **kwargs)

    try:
        for forward in hung:
            forward.install()
        with patched([(vars(scheduler), "step", step)]):
            yield cached
    finally:
        cached._run = None  # for whoever has wrapped `step`
        for forward in hung:
            forward.remove()


class PipelineStepCache:
    """Holds the state of `cache_steps`; settings are None for no cache."""

    def __init__(
        self, transformer: torch.nn.Module, scheduler: Any, settings: CacheSettings | None
    ) -> None:
        self.figures: CacheFigures | None = None
        self._transformer, self._scheduler, self._settings = transformer, scheduler, settings
        self._run: _Run | None = None

    def report(self) -> str:
        if self._settings is None:
            return f"step cache: {OFF}"
        if self.figures is None:
            return (
                f"step cache: {self._settings.name} has no effect: no run has finished, or "
                "torch.compile runs the whole transformer"
            )
        return "\n".join(self.figures.lines())

    def run(self, host: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes one call of the transformer; `host` is what it would have run."""
        velocity = self.forecast(kwargs)
        if velocity is None:
            return host(*args, **kwargs)
        # Behind the latent may be reference images, whose output nobody reads.
        x = kwargs["hidden_states"]
        out = velocity.new_zeros(*x.shape[:2], velocity.shape[-1])
        out[: velocity.shape[0], : velocity.shape[1]] = velocity
        return Transformer2DModelOutput(out) if kwargs.get("return_dict", True) else (out,)

    def run_controlnet(
        self, host: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Makes one call of a ControlNet, which the pipeline calls before the transformer: not in a
        skipped step, where nobody reads what it gives.
        """
        skipped = self.forecast(kwargs) is not None and not kwargs.get("return_dict", True)
        return () if skipped else host(*args, **kwargs)

    def forecast(self, given: dict[str, Any]) -> torch.Tensor | None:
        """Returns the velocity that stands for a call with `given`; None where it is to run."""
        if "hidden_states" not in given:  # no pipeline calls it so
            return None
        if self._run is None or self._run.sigmas is not self._scheduler.sigmas:
            cached = getattr(self._transformer, "is_cache_enabled", False)
            refusal = ITS_OWN if cached else None
            self.figures, self._run = None, _Run(self._scheduler, self._settings, refusal)
        return self._run.decide(given)

    def velocity(self, model_output: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """Returns what the scheduler is to step by, in place of what the pipeline has made."""
        run = self._run
        if run is None:
            return model_output
        velocity = run.close_step(model_output, sample)
        if run.is_over:
            self.figures = run.cached.finish()
            self._run = None
        return velocity


class _Run:
    def __init__(self, scheduler: Any, settings: CacheSettings, refusal: Verdict | None) -> None:
        self.sigmas = scheduler.sigmas
        self._scheduler = scheduler
        sigmas = self.sigmas[self._index() :].tolist()
        self.cached = CachedRun(settings, sigmas, refusal=refusal)
        self._steps = 0
        self._shape: torch.Size | None = None  # of the latent, once the scheduler has had it
        self._text: torch.Tensor | None = None
        self._control = ""  # how strong a ControlNet is
        self._decided = False  # the step that is under way
        self._forecast: torch.Tensor | None = None  # its velocity

    @property
    def is_over(self) -> bool:
        return self._steps == self.cached.figures.steps

    def decide(self, given: dict[str, Any]) -> torch.Tensor | None:
        """Returns the velocity of the step under way, if it is skipped: its first call decides."""
        if not self._decided:
            self._decided = True
            self._text = given.get("encoder_hidden_states")
            self._control = str(given.get("conditioning_scale"))
            if self._shape is not None:
                # Behind the latent may be reference images, or it once more for guidance.
                rows, tokens = self._shape[:2]
                self._forecast = self._ask(given["hidden_states"][:rows, :tokens])
        return self._forecast

    def close_step(self, velocity: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Tells the cache the guided velocity; returns that of the step, from the latent x."""
        self._steps += 1
        if not self._decided:
            return velocity
        if self._shape is None:
            self._shape = x.shape
            self._ask(x)
        forecast, self._forecast, self._decided = self._forecast, None, False
        if forecast is not None:
            return forecast
        self.cached.computed(x, velocity)
        return velocity

    def _ask(self, x: torch.Tensor) -> torch.Tensor | None:
        # A callback may exchange the prompt, whose id is no other's while it is held here.
        key = id(self._text), self._control
        return self.cached.forecast(x, self.sigmas[self._index()], key)

    def _index(self) -> int:
        scheduler = self._scheduler
        return scheduler.begin_index or 0 if scheduler.step_index is None else scheduler.step_index
