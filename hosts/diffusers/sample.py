"""Prompts to latents with diffusers' own sampler, then to images."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from PIL import Image

from ...errors import CheckpointError, SettingError, UnavailableError
from ...optimizations.step_cache import CacheFigures
from .decode import decode
from .load import LoadedPipeline
from .settings import GenerateSettings
from .step_cache import cache_steps

logger = logging.getLogger(__name__)

StepCallback = Callable[[int, int, torch.Tensor], None]


@dataclass(frozen=True)
class Generation:
    """Holds what a run made: image i comes from seed `settings.seed + i`.

    Attributes:
        cached: what the step cache did; None without one.
    """

    images: list[Image.Image]
    settings: GenerateSettings
    sample_seconds: float
    decode_seconds: float
    cached: CacheFigures | None = None


def generate(
    pipeline: LoadedPipeline,
    prompt: str,
    *,
    progress: bool = True,
    callback: StepCallback | None = None,
    **settings: Any,
) -> Generation:
    """Makes `batch` images of one prompt.

    Args:
        settings: the others of `GenerateSettings`; width and height have to be given.
        progress: show diffusers' bar on stderr.
        callback: called after every step with (steps done, steps in all, packed latents); what it
            raises stops the run.

    Raises:
        SettingError: a setting breaks its rule.
        CheckpointError: the model returned NaN or infinity.
        UnavailableError: the card ran out of memory.
    """
    chosen = settled(GenerateSettings(prompt=prompt, **settings), pipeline)
    start = time.perf_counter()
    try:
        latents, cached = _sample(pipeline, chosen, progress, callback)
        sampled = time.perf_counter()
        images = decode(pipeline, latents, chosen.height, chosen.width)
    except torch.cuda.OutOfMemoryError as error:
        other = "" if pipeline.offload.name == "model" else ", or --offload model"
        raise UnavailableError(
            f"{chosen.width}x{chosen.height} in a batch of {chosen.batch} does not fit in the "
            f"memory of {pipeline.device}: use a smaller size or batch{other}."
        ) from error
    return Generation(images, chosen, sampled - start, time.perf_counter() - sampled, cached)


def sample(
    pipeline: LoadedPipeline,
    settings: GenerateSettings,
    *,
    progress: bool = True,
    callback: StepCallback | None = None,
) -> torch.Tensor:
    """Denoises; arguments and errors as in `generate`.

    Noise comes from one CPU generator for each image, so that it depends neither on the device nor
    on the batch.

    Returns:
        Packed latents (batch, height/16 * width/16, 64).
    """
    return _sample(pipeline, settled(settings, pipeline), progress, callback)[0]


def _sample(
    pipeline: LoadedPipeline,
    settings: GenerateSettings,
    progress: bool,
    callback: StepCallback | None,
) -> tuple[torch.Tensor, CacheFigures | None]:
    pipe = pipeline.to_diffusers(_scheduler(pipeline, settings.steps))
    pipe.set_progress_bar_config(disable=not progress)
    _check(pipeline, settings)

    def on_step_end(
        _pipe: DiffusionPipeline, step: int, _time: torch.Tensor, tensors: dict
    ) -> dict:
        callback(step + 1, settings.steps, tensors["latents"])
        return {}

    optimized = pipeline.optimized
    run = optimized.run(lambda: pipe.scheduler.timesteps) if optimized else nullcontext()
    with run, cache_steps(pipe, settings.cache) as cached:
        latents = pipe(
            settings.prompt,
            negative_prompt=settings.negative_prompt if settings.cfg > 1 else None,
            true_cfg_scale=settings.cfg,
            width=settings.width,
            height=settings.height,
            num_inference_steps=settings.steps,
            num_images_per_prompt=settings.batch,
            generator=[
                torch.Generator().manual_seed(settings.seed + i) for i in range(settings.batch)
            ],
            callback_on_step_end=on_step_end if callback else None,
            output_type="latent",
            **pipeline.family.arguments,
        ).images
    if not torch.isfinite(latents).all():
        raise CheckpointError(
            f"The model gave NaN or infinity in {pipeline.precision.name}, though its weights are "
            "finite: try --precision fp32, or download the folder again.",
            pipeline.folder,
        )
    if cached.figures is not None and not cached.figures.skipped:
        logger.warning(cached.report())
    return latents, cached.figures


def settled(settings: GenerateSettings, pipeline: LoadedPipeline) -> GenerateSettings:
    """Fills in steps and guidance, and refuses other steps than those a Turbo is trained for."""
    trained = len(pipeline.family.arguments.get("sigmas", ()))
    if trained and settings.steps not in (None, trained):
        raise SettingError(
            f"steps is {settings.steps}, and {pipeline.folder} is trained for the {trained} sigmas "
            f"in its model_index.json: leave steps out, or use {trained}."
        )
    return replace(
        settings,
        steps=settings.steps or trained or pipeline.family.member.steps,
        cfg=pipeline.family.member.cfg if settings.cfg is None else settings.cfg,
    )


def _scheduler(pipeline: LoadedPipeline, steps: int) -> FlowMatchEulerDiscreteScheduler:
    # Stretching the schedule to `shift_terminal` divides 0 by 0 when its only sigma is 1, and the
    # image would be NaN.
    changes = {"shift_terminal": None} if steps == 1 else {}
    return FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler.config, **changes)


def _check(pipeline: LoadedPipeline, settings: GenerateSettings) -> None:
    """Warns of a prompt that is cut off, and refuses a size that the pipeline would change."""
    family = pipeline.family
    for name in ("width", "height"):
        value, step = getattr(settings, name), family.member.size_step
        if value % step:
            raise SettingError(
                f"{name} must be divisible by {step} with {family.pipeline.__name__}, got {value}: "
                f"use {max(step, step * round(value / step))}."
            )
    limit = family.arguments.get("max_sequence_length")
    if limit is not None and (tokens := len(pipeline.words(settings.prompt).input_ids)) > limit:
        logger.warning(
            "the prompt has %d tokens and the model reads %d: its end is cut off", tokens, limit
        )
