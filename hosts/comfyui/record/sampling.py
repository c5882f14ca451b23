"""Measures the sampling runs of a MODEL through three wrappers, which change nothing of it."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from comfy.samplers import CFGGuider

from ....loaders.source import MICRO_ADVICE, MICRO_SIDE, MICRO_TRANSFORMER
from ....spec.vae import PIXELS_PER_LATENT
from ..sample.call import context_of, control_of, is_skipped, options_of
from ..sample.modulation import MODULATION_KEY as MODULATION
from ..sample.run import CARDS_KEY as CARDS
from ..sample.run import OPTIMIZATION_KEY as OPTIMIZATION
from ..sample.run import STEP_CACHE_KEY as STEP_CACHE
from ..sample.run import unsafe_copies
from .meter import Marks, only_measures, typical
from .record import Recording, Records

logger = logging.getLogger(__name__)

SAMPLING_KEY = "qwen_l40s_record"
WRAPPERS = (WrappersMP.OUTER_SAMPLE, WrappersMP.PREDICT_NOISE, WrappersMP.APPLY_MODEL)
# ComfyUI's guiders that go another way than CFGGuider's own and still guide by its `cfg`.
GUIDED_BY_CFG = ("Guider_PerpNeg", "Guider_DualModel")


def record_runs(patcher: ModelPatcher, key: str = SAMPLING_KEY) -> None:
    """Records the runs of a patcher and of its clones; a second call changes nothing."""
    if is_recorded(patcher):
        return
    recorder = Recorder(Records.of(patcher.model))
    wrappers = (recorder.outer_sample, recorder.predict_noise, recorder.apply_model)
    for kind, wrapper in zip(WRAPPERS, wrappers, strict=True):
        patcher.add_wrapper_with_key(kind, key, wrapper)


def is_recorded(patcher: ModelPatcher) -> bool:
    """Whether something records the runs of a patcher."""
    wrappers = patcher.get_all_wrappers(WrappersMP.OUTER_SAMPLE)
    return any(isinstance(getattr(wrapper, "__self__", None), Recorder) for wrapper in wrappers)


class Recorder:
    """Writes the records of one MODEL."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._run: SamplingRun | None = None

    def outer_sample(self, executor: Any, noise: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """OUTER_SAMPLE wrapper: one run."""
        guider = executor.class_obj
        patcher = getattr(guider, "model_patcher", None)
        # With hooks and dynamic VRAM ComfyUI samples with another model than the MODEL's.
        model, device = (getattr(patcher, name, None) for name in ("model", "load_device"))
        recording = Recording(model, "sampling", device, records=self._records)
        before, self._run = self._run, SamplingRun(recording, device)
        run = self._run
        try:
            with recording:
                output = executor(noise, *args, **kwargs)
                run.finish(guider, noise)
        finally:
            self._run = before
        return output

    def predict_noise(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """PREDICT_NOISE wrapper: one evaluation of a sampler, with all its prompts."""
        run = self._run
        if run is not None:
            run.begin_evaluation()
        output = executor(*args, **kwargs)
        if run is not None:
            run.recording.look()
        return output

    def apply_model(
        self, executor: Any, x: torch.Tensor, t: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """APPLY_MODEL wrapper: one forward pass, on any of the cards that share a step."""
        run = self._run
        output = executor(x, t, *args, **kwargs)
        if run is not None:
            run.count_pass(x, args, kwargs)
        return output


class SamplingRun:
    """Counts and settings of one run while it lasts.

    An evaluation without a forward pass is a skipped step, whoever skipped it. It counts nowhere:
    a cache that wraps the recorder hides its skipped steps, one inside shows them.
    """

    def __init__(self, recording: Recording, device: torch.device | None) -> None:
        self.recording = recording
        self._device = device
        self._marks: Marks | None = None
        self._lock = threading.Lock()
        self._called: list[bool] = []  # in each evaluation, whether the model was
        self._passes = self._computed = self._items = self._text = self._prompts = 0
        self._guided = self._controlled = False
        self._references: list[list[int]] = []
        self._schedule: int | None = None

    @property
    def off(self) -> bool:
        """Whether the recording is off."""
        return self.recording.off

    @off.setter
    def off(self, value: bool) -> None:
        self.recording.off = value

    @only_measures
    def begin_evaluation(self) -> None:
        """At the first, ComfyUI has loaded the model and prepared its conditions."""
        if self._marks is None:
            self.recording.begin()
            self._marks = Marks(self._device)
        self._marks.mark()
        self._called.append(False)

    @only_measures
    def count_pass(self, x: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Notes a forward pass that is over, with what APPLY_MODEL was called with."""
        context, options = context_of(args, kwargs), options_of(args, kwargs)
        if is_skipped(options):
            return
        prompts = options.get("cond_or_uncond", ())
        references = [list(latent.shape[-2:]) for latent in kwargs.get("ref_latents") or ()]
        sigmas = options.get("sample_sigmas")
        with self._lock:
            self._passes += 1
            if self._called:
                self._called[-1] = True
            self._computed += len(x)
            self._items = max(self._items, len(x))
            self._text = max(self._text, 0 if context is None else context.shape[1])
            self._prompts = max(self._prompts, len(prompts))
            self._guided |= 1 in prompts
            self._controlled |= control_of(args, kwargs) is not None
            self._references = max(self._references, references, key=len)
            self._schedule = None if sigmas is None else len(sigmas) - 1

    @only_measures
    def finish(self, guider: Any, noise: torch.Tensor) -> None:
        """Writes what was run into the recording, whose time ends here."""
        if self._marks is not None:
            self._marks.mark()
        self.recording.stop()
        asked = {"latent": list(noise.shape), "cfg": cfg_of(guider), **self.asked()}
        self.recording.asked |= asked
        self.recording.path = path_of(guider.model_patcher)
        if advice := size_advice(guider.model_patcher.model, noise.shape):
            logger.warning("%s.", advice)
            self.recording.path = (f"size: {advice}", *self.recording.path)

    def asked(self) -> dict[str, Any]:
        """The settings and counts of the run, once the device is done."""
        every = [] if self._marks is None else self._marks.seconds()
        seconds = [took for took, called in zip(every, self._called, strict=False) if called]
        return {
            "steps": self._schedule,
            "evaluations": sum(self._called),
            "step_seconds": typical(seconds),
            "first_step_seconds": seconds[0] if seconds else None,
            "passes": self._passes,
            "items": self._items,
            "computed": self._computed,
            "prompts": self._prompts,
            "guided": self._guided,
            "text_tokens": self._text,
            "references": self._references,
            "controlnet": self._controlled,
        }


def cfg_of(guider: Any) -> float | None:
    """A guider's CFG scale; None where it has none, or more than one."""
    kind = type(guider)
    own = getattr(kind, "predict_noise", None) is CFGGuider.predict_noise
    if not own and kind.__name__ not in GUIDED_BY_CFG:
        return None
    # DualCFGGuider, for one, never sets it.
    cfg = getattr(guider, "cfg", None)
    number = isinstance(cfg, (int, float)) and not isinstance(cfg, bool)
    return float(cfg) if number and math.isfinite(cfg) else None


def size_advice(model: Any, latent: Sequence[int]) -> str:
    """What to say of a size that the model was not trained at; empty for all but micro."""
    transformer = model.diffusion_model
    if not hasattr(transformer, "txt_norm"):  # Qwen-Image-2.1
        return ""
    form = len(transformer.transformer_blocks), len(transformer.txt_norm.weight)
    sides = {PIXELS_PER_LATENT * side for side in latent[-2:]}
    return MICRO_ADVICE if form == MICRO_TRANSFORMER and sides != {MICRO_SIDE} else ""


def path_of(patcher: ModelPatcher) -> tuple[str, ...]:
    """Which path every part took in the run, a line each."""
    cache = patcher.get_attachment(STEP_CACHE)
    others = () if cache is None else cache.lines()
    others = (*others, *(patcher.get_attachment(CARDS) or ()), *unsafe_copies(patcher))
    optimization = patcher.get_attachment(OPTIMIZATION)
    if optimization is not None:
        return (*optimization.report().splitlines(), *others)
    modulation = vars(patcher.model).get(MODULATION)
    lines = () if modulation is None else modulation.lines()
    return ("blocks: ComfyUI's own; Optimize Qwen-Image fuses them", *lines, *others)
