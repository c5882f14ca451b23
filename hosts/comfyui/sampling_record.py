"""Measures the sampling runs of a MODEL, by three wrappers of its patcher.

They read what a run is asked for and count its forward passes; what the model computes is the same
with them and without.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from .meter import Marks, Measured, Meter, typical
from .modulation import KEY as MODULATION
from .optimization import KEY as OPTIMIZATION
from .run_record import Record, Records
from .wrapped_call import CONTROL, OPTIONS

KEY = "qwen_l40s_record"
CONTEXT = 1  # the place of c_crossattn behind x and t, in BaseModel.apply_model
WRAPPERS = (WrappersMP.OUTER_SAMPLE, WrappersMP.PREDICT_NOISE, WrappersMP.APPLY_MODEL)


def record_runs(patcher: ModelPatcher, key: str = KEY) -> None:
    """Has the runs of a patcher and of its clones recorded; once, however often it is asked for.

    Args:
        key: What the wrappers are added under.
    """
    if patcher.get_wrappers(WrappersMP.OUTER_SAMPLE, KEY):
        return
    recorder = Recorder(Records.of(patcher.model))
    wrappers = (recorder.outer_sample, recorder.predict_noise, recorder.apply_model)
    for kind, wrapper in zip(WRAPPERS, wrappers, strict=True):
        patcher.add_wrapper_with_key(kind, key, wrapper)


class Recorder:
    """Writes the records of one MODEL; what it knows of a run goes with the run."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._run: Run | None = None

    def outer_sample(self, executor: Any, noise: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """OUTER_SAMPLE wrapper: one run."""
        guider = executor.class_obj
        patcher = guider.model_patcher
        # ComfyUI samples with another model than the one of the MODEL where hooks are beside
        # dynamic VRAM.
        Records.share(patcher.model, self._records)
        before, self._run = self._run, Run(patcher.load_device)
        run = self._run
        try:
            with self._records.during(run.meter):
                output = executor(noise, *args, **kwargs)
        finally:
            self._run = before
        measured = run.finish()
        asked = {"latent": list(noise.shape), "cfg": getattr(guider, "cfg", None), **run.asked()}
        self._records.add(Record("sampling", measured, path_of(patcher), asked))
        return output

    def predict_noise(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """PREDICT_NOISE wrapper: one evaluation of a sampler, with all its prompts."""
        run = self._run
        if run is not None:
            run.begin_evaluation()
        output = executor(*args, **kwargs)
        if run is not None:
            run.meter.look()
        return output

    def apply_model(
        self, executor: Any, x: torch.Tensor, t: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """APPLY_MODEL wrapper: one forward pass, on any of the cards that share a step."""
        if self._run is not None:
            self._run.count_pass(x, args, kwargs)
        return executor(x, t, *args, **kwargs)


class Run:
    """What is known of a run while it lasts."""

    def __init__(self, device: torch.device) -> None:
        self.meter = Meter(device)
        self._device = device
        self._start = time.perf_counter()
        self._waited = 0.0
        self._marks: Marks | None = None
        self._lock = threading.Lock()
        self._passes = self._items = self._text = self._prompts = 0
        self._guided = self._controlled = False
        self._references: list[list[int]] = []
        self._schedule: int | None = None

    def begin_evaluation(self) -> None:
        """At the first, ComfyUI has loaded the model and prepared its conditions."""
        if self._marks is None:
            self._waited = time.perf_counter() - self._start
            self.meter.begin()
            self._marks = Marks(self._device)
        self._marks.mark()

    def count_pass(self, x: torch.Tensor, args: tuple[Any, ...], extra: dict[str, Any]) -> None:
        """Notes a forward pass with what APPLY_MODEL is called with."""
        context, options = args[CONTEXT], args[OPTIONS]
        prompts = options.get("cond_or_uncond", ())
        references = [list(latent.shape[-2:]) for latent in extra.get("ref_latents") or ()]
        sigmas = options.get("sample_sigmas")
        with self._lock:
            self._passes += 1
            self._items = max(self._items, len(x))
            self._text = max(self._text, 0 if context is None else context.shape[1])
            self._prompts = max(self._prompts, len(prompts))
            self._guided |= 1 in prompts
            self._controlled |= args[CONTROL] is not None
            self._references = max(self._references, references, key=len)
            self._schedule = None if sigmas is None else len(sigmas) - 1

    def finish(self) -> Measured:
        """Sampling alone: less what ComfyUI did before the first evaluation, and the tables."""
        if self._marks is not None:
            self._marks.mark()
        measured = self.meter.finish()
        return replace(measured, seconds=measured.seconds - self._waited)

    def asked(self) -> dict[str, Any]:
        """What was run, after `finish`."""
        seconds = [] if self._marks is None else self._marks.seconds()
        return {
            "steps": self._schedule,
            "evaluations": len(seconds),
            "step_seconds": typical(seconds),
            "first_step_seconds": seconds[0] if seconds else None,
            "waited_seconds": self._waited,
            "passes": self._passes,
            "items": self._items,
            "prompts": self._prompts,
            "guided": self._guided,
            "text_tokens": self._text,
            "references": self._references,
            "controlnet": self._controlled,
        }


def path_of(patcher: ModelPatcher) -> tuple[str, ...]:
    """Which path every part took in a run that is over, a line each."""
    optimization = patcher.get_attachment(OPTIMIZATION)
    if optimization is not None:
        return tuple(optimization.report().splitlines())
    modulation = vars(patcher.model).get(MODULATION)
    lines = () if modulation is None else modulation.lines()
    return ("blocks: ComfyUI's own; Optimize Qwen-Image (L40S) fuses them", *lines)
