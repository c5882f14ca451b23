"""Fits the curve of an adaptive step cache on a checkpoint: how far the transformer's answer moves
in a step, by how far its first block's input does (`optimizations/change_gate`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..errors import CheckpointError, SettingError
from ..hosts.diffusers.load import LoadedPipeline
from ..hosts.diffusers.sample import sample
from ..hosts.diffusers.settings import GenerateSettings
from ..hosts.diffusers.step_cache import checkpoint_of, first_block
from ..optimizations.change_gate import FirstBlock, relative_change
from ..step_cache import FEWEST_STEPS, MOST_STEPS, Curve

FEWEST_PROMPTS = 10
# Of ten prompts these are held out of the fit, so that a list may be in any order.
HELD_OUT = (3, 6, 9)
DEGREE = 4
PROMPTS = (
    "a portrait of an old fisherman with a grey beard, soft window light",
    "a red fox standing in deep snow at the edge of a forest",
    'a shop window with the words "FRESH BREAD" painted on the glass',
    "a narrow street in an old town at night, wet stones, neon signs",
    "a bowl of ramen with egg and spring onions, seen from above",
    "a mountain lake at sunrise, mist over the water",
    "a watercolour of a blue bird on a blossoming branch",
    "an isometric drawing of a small library with many books",
    "a glass teapot on a wooden table, studio photograph, white background",
    "three children building a sandcastle on a crowded beach",
)


@dataclass(frozen=True)
class Trace:
    """Relative L1 changes from one step to the next, one fewer than a run has steps.

    Attributes:
        inputs: Of the first block.
        answers: Of the guided velocity.
    """

    inputs: np.ndarray
    answers: np.ndarray


@dataclass(frozen=True)
class Fit:
    """A curve and how well it tells the answers.

    Attributes:
        r2: Of the prompts that it was fitted on.
        held_out_r2: Of the others.
        fitted, held_out: How many prompts.
    """

    curve: Curve
    r2: float
    held_out_r2: float
    fitted: int
    held_out: int


def calibrate_curve(
    pipeline: LoadedPipeline,
    settings: GenerateSettings,
    prompts: Sequence[str],
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[str, Fit]:
    """Paints each prompt without a cache, and fits a curve for its count of steps.

    Args:
        settings: Of every run but for the prompt.
        prompts: `FEWEST_PROMPTS` or more.
        progress: Called with the number of prompts that are done.

    Returns:
        (the checkpoint's `checkpoint_id`, the fit).

    Raises:
        SettingError: Too few prompts, or a count of steps that no cache takes.
        CheckpointError: The changes are not finite, or all 0.
    """
    check_calibration(settings.steps, prompts)
    checkpoint = checkpoint_of(pipeline.transformer)
    traces = []
    for prompt in prompts:
        traces.append(record(pipeline, replace(settings, prompt=prompt)))
        progress(len(traces))
    return checkpoint, fit(traces, settings.steps, pipeline.precision.name)


def check_calibration(steps: int, prompts: Sequence[str]) -> None:
    """Raises SettingError for what `calibrate_curve` refuses, before anything is loaded."""
    if len(prompts) < FEWEST_PROMPTS:
        raise SettingError(
            f"{len(prompts)} prompts are too few to fit a curve: give {FEWEST_PROMPTS} or more, "
            "one a line."
        )
    if not FEWEST_STEPS <= steps <= MOST_STEPS:
        raise SettingError(
            f"--steps {steps}: a step cache takes runs of {FEWEST_STEPS} to {MOST_STEPS} steps."
        )


def record(pipeline: LoadedPipeline, settings: GenerateSettings) -> Trace:
    """The changes in one run without a cache."""
    recorder = _Recorder(pipeline.transformer)
    sample(pipeline, settings, progress=False, watch=recorder)
    inputs, answers = (
        torch.stack(changes).double().cpu().numpy()
        for changes in (recorder.inputs, recorder.answers)
    )
    return Trace(inputs, answers)


class _Recorder:
    """A `StepWatch` that keeps the changes on the device."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        self.inputs: list[torch.Tensor] = []
        self.answers: list[torch.Tensor] = []
        self._transformer = transformer
        self._first_block: FirstBlock | None = None
        self._before: tuple[torch.Tensor, torch.Tensor] | None = None

    @torch.no_grad()
    def __call__(
        self, x: torch.Tensor, velocity: torch.Tensor, sigmas: list[float], step: int
    ) -> None:
        if self._first_block is None:
            self._first_block = first_block(self._transformer, sigmas)
        now = self._first_block(x, sigmas[step]), velocity
        if self._before is not None:
            for changes, new, old in zip(
                (self.inputs, self.answers), now, self._before, strict=True
            ):
                changes.append(relative_change(new, old))
        self._before = now


def fit(traces: Sequence[Trace], steps: int, precision: str) -> Fit:
    """A polynomial through the origin, by least squares over all steps of 7 in 10 prompts.

    Raises:
        CheckpointError: The changes are not finite, or all 0.
    """
    held_out = [trace for i, trace in enumerate(traces) if i % 10 in HELD_OUT]
    fitted = [trace for i, trace in enumerate(traces) if i % 10 not in HELD_OUT]
    inputs, answers = _joined(fitted)
    finite = np.isfinite(inputs).all() and np.isfinite(answers).all()
    if not finite or not inputs.min() > 0:
        raise CheckpointError(
            "The first block's input is not finite, or does not change from step to step: try "
            "--precision fp32, or download the folder again."
        )
    powers = np.vander(inputs, DEGREE + 1)[:, :-1]
    coefficients, *_ = np.linalg.lstsq(powers, answers, rcond=None)
    curve = Curve(
        (*map(float, coefficients), 0.0),
        least=float(inputs.min()),
        most=float(inputs.max()),
        steps=steps,
        precision=precision,
        source="the curve that was fitted",
    )
    return Fit(
        curve,
        r_squared(curve, *_joined(fitted)),
        r_squared(curve, *_joined(held_out)),
        len(fitted),
        len(held_out),
    )


def r_squared(curve: Curve, inputs: np.ndarray, answers: np.ndarray) -> float:
    """The share of the answers' variance that a curve tells; an input above its range counts as
    the largest that it knows.
    """
    told = np.array([curve(min(change, curve.most)) for change in inputs])
    lost = ((answers - told) ** 2).sum()
    whole = ((answers - answers.mean()) ** 2).sum()
    return float(1 - lost / whole) if whole > 0 else math.nan


def _joined(traces: Sequence[Trace]) -> tuple[np.ndarray, np.ndarray]:
    inputs, answers = zip(*((trace.inputs, trace.answers) for trace in traces), strict=True)
    return np.concatenate(inputs), np.concatenate(answers)
