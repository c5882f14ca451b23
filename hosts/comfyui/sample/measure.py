"""Measures the sampling runs of a MODEL through one wrapper, which changes nothing of it."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP, add_wrapper_with_key
from comfy.samplers import CFGGuider

from ....families.comfyui import kind_of
from ....families.registry import blocks_of
from ....loaders.source import MICRO_ADVICE, MICRO_SIDE, MICRO_TRANSFORMER
from ....spec.vae import PIXELS_PER_LATENT
from ....verdict import Verdict, read_or
from ..lora.few_steps import faults_of
from ..record import MeasuredPhase, forget, harmless, phase
from .forward import is_skipped
from .modulation import MODULATION_KEY, by_name
from .run import CARDS_KEY, NAG_KEY, OPTIMIZATION_KEY, STEP_CACHE_KEY, unsafe_copies

logger = logging.getLogger(__name__)

SAMPLING_KEY = "qwen_l40s_record"
NOT_OPTIMIZED = Verdict(
    "blocks: ComfyUI's code",
    remedy="put Qwen-Image Optimize before the sampler: fused kernels did not run",
)
# ComfyUI's guiders that go another way than CFGGuider's own and still guide by its `cfg`.
GUIDED_BY_CFG = ("Guider_PerpNeg", "Guider_DualModel")


def record_runs(patcher: ModelPatcher, key: str = SAMPLING_KEY) -> None:
    """Measures the runs of a patcher and of its clones; a second call changes nothing."""
    if not is_recorded(patcher):
        patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, key, measure_sampling)


def is_recorded(patcher: ModelPatcher) -> bool:
    return measure_sampling in patcher.get_all_wrappers(WrappersMP.OUTER_SAMPLE)


def measure_sampling(executor: Any, noise: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Measures one run, as OUTER_SAMPLE wrapper."""
    guider = executor.class_obj
    patcher = getattr(guider, "model_patcher", None)
    run = phase("sampling", patcher, getattr(patcher, "load_device", None))
    with run:
        if run.off:
            output = executor(noise, *args, **kwargs)
            with harmless():
                forget(patcher)
                _size_lines(patcher, noise)
            return output
        counts = _Counts(run)
        with harmless(run):
            # The guider's copy of the MODEL's, for this run.
            options = guider.model_options
            add_wrapper_with_key(
                WrappersMP.PREDICT_NOISE, SAMPLING_KEY, counts.evaluate, options, True
            )
            add_wrapper_with_key(
                WrappersMP.APPLY_MODEL, SAMPLING_KEY, counts.apply_model, options, True
            )
        output = executor(noise, *args, **kwargs)
        run.stop()
        with harmless(run):
            if not run.off:
                run.asked |= {"latent": list(noise.shape), "cfg": cfg_of(guider), **counts.asked()}
                run.asked["few_steps"] = faults_of(guider)
                run.path = (*_size_lines(patcher, noise), *path_of(patcher))
                optimization = patcher.get_attachment(OPTIMIZATION_KEY)
                run.not_fused = NOT_OPTIMIZED
                if optimization is not None:
                    run.not_fused = optimization.not_fused
                    run.attention = optimization.attention_names()
    return output


class _Pass(NamedTuple):
    items: int
    text_tokens: int
    references: list[list[int]]
    controlled: bool
    steps: int | None


class _Counts:
    """Counts a run's evaluations and forward passes, inside of all other wrappers.

    An evaluation without a forward pass is a skipped step, whoever skipped it. It counts nowhere.
    """

    def __init__(self, run: MeasuredPhase) -> None:
        self._run = run
        self._evaluations: list[tuple[Any, Any]] = []  # when they began and ended
        self._passes: list[_Pass] = []  # appended to by the threads of all cards

    def evaluate(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Counts an evaluation of a sampler with all its prompts, as PREDICT_NOISE wrapper."""
        if self._run.off:
            return executor(*args, **kwargs)
        if not self._evaluations:  # ComfyUI has loaded the model and prepared its conditions
            self._run.begin()
        begin, passes = self._now(), len(self._passes)
        output = executor(*args, **kwargs)
        end = self._now()
        if len(self._passes) > passes:
            self._evaluations.append((begin, end))
        self._run.look()
        return output

    def apply_model(
        self, executor: Any, x: torch.Tensor, t: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Counts a forward pass on any of the cards that share a step, as APPLY_MODEL wrapper."""
        output = executor(x, t, *args, **kwargs)
        with harmless(self._run):
            given, options = by_name(args, kwargs)
            if not (self._run.off or is_skipped(options)):
                context, sigmas = given.get("c_crossattn"), options.get("sample_sigmas")
                self._passes.append(
                    _Pass(
                        len(x),
                        0 if context is None else context.shape[1],
                        [list(latent.shape[-2:]) for latent in given.get("ref_latents") or ()],
                        given.get("control") is not None,
                        None if sigmas is None else len(sigmas) - 1,
                    )
                )
        return output

    def _now(self) -> Any:
        if self._run.device.type != "cuda":
            return time.perf_counter()
        with harmless(self._run):
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._run.device))
            return event

    def _seconds(self) -> list[float]:
        """Times each evaluation, once the device is done; empty on devices without a clock."""
        kind = self._run.device.type
        if kind == "cuda":
            return [begin.elapsed_time(end) / 1e3 for begin, end in self._evaluations]
        return [end - begin for begin, end in self._evaluations] if kind == "cpu" else []

    def asked(self) -> dict[str, Any]:
        seconds, passes = self._seconds(), self._passes
        return {
            "steps": passes[-1].steps if passes else None,
            "evaluations": len(self._evaluations),
            # The first also compiles and fills tables.
            "step_seconds": statistics.median(seconds[1:]) if len(seconds) > 1 else None,
            "first_step_seconds": seconds[0] if seconds else None,
            "passes": len(passes),
            "computed": sum(each.items for each in passes),
            "text_tokens": max((each.text_tokens for each in passes), default=0),
            "references": max((each.references for each in passes), key=len, default=[]),
            "controlnet": any(each.controlled for each in passes),
        }


def _size_lines(patcher: Any, noise: torch.Tensor) -> tuple[str, ...]:
    advice = size_advice(patcher.model, noise.shape)
    if advice:
        logger.warning("%s.", advice)
    return (f"size: {advice}",) if advice else ()


def cfg_of(guider: Any) -> float | None:
    """Finds a guider's CFG scale; None where it has none, or more than one."""
    kind = type(guider)
    own = getattr(kind, "predict_noise", None) is CFGGuider.predict_noise
    if not own and kind.__name__ not in GUIDED_BY_CFG:
        return None
    # DualCFGGuider, for one, never sets it.
    cfg = getattr(guider, "cfg", None)
    number = isinstance(cfg, (int, float)) and not isinstance(cfg, bool)
    return float(cfg) if number and math.isfinite(cfg) else None


def size_advice(model: Any, latent: Sequence[int]) -> str:
    """Advises on a size that the model was not trained at; empty for all but micro."""
    transformer, kind = model.diffusion_model, kind_of(model)
    form = kind and (len(blocks_of(transformer)), read_or((None,), kind.takes, transformer)[0])
    sides = {PIXELS_PER_LATENT * side for side in latent[-2:]}
    return MICRO_ADVICE if form == MICRO_TRANSFORMER and sides != {MICRO_SIDE} else ""


def path_of(patcher: ModelPatcher) -> tuple[str, ...]:
    """Says which path every part took in the run, a line each."""
    cache = patcher.get_attachment(STEP_CACHE_KEY)
    guidance = patcher.get_attachment(NAG_KEY)
    others: Sequence[Any] = [
        line for it in (cache, guidance) if it is not None for line in it.lines()
    ]
    others = (*others, *(patcher.get_attachment(CARDS_KEY) or ()), *unsafe_copies(patcher))
    optimization = patcher.get_attachment(OPTIMIZATION_KEY)
    if optimization is not None:
        return (*optimization.report().splitlines(), *others)
    modulation = vars(patcher.model).get(MODULATION_KEY)
    lines = () if modulation is None else modulation.lines()
    return (f"{NOT_OPTIMIZED.fact}; Qwen-Image Optimize fuses them", *lines, *others)
