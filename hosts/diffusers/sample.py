"""Turns prompts into latents with diffusers' sampler, then into images."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, ModelMixin
from PIL import Image

from ...errors import CheckpointError, SettingError, UnavailableError
from ...families.registry import family_of_vae, find_schedule
from ...machine.device import available_bytes
from ...optimizations.step_cache import CacheFigures
from ...optimizations.vae import tiles as planned
from ...optimizations.vae.tiles import Middle, Stages
from ...planning.vae import checked, plan_decode
from ...spec.transformer import PIXELS_PER_TOKEN_SIDE
from ...spec.vae import VaeShape
from .load import LoadedPipeline
from .settings import GenerateSettings
from .step_cache import cache_steps

logger = logging.getLogger(__name__)

StepCallback = Callable[[int, int, torch.Tensor], None]


@dataclass(frozen=True)
class Generation:
    """Holds what a run made: image i comes from seed `settings.seed + i`."""

    images: list[Image.Image]
    settings: GenerateSettings
    sample_seconds: float
    decode_seconds: float
    cached: CacheFigures | None = None  # what the step cache did; None without one


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
    given = dict(pipeline.family.arguments)
    if settings.schedule is not None:
        tokens = settings.width * settings.height // PIXELS_PER_TOKEN_SIDE**2
        schedule = find_schedule(settings.schedule, pipeline.family.member.family)
        given["sigmas"] = schedule.sigmas(settings.steps, tokens)[:-1]
        if schedule.advice:
            logger.warning(schedule.advice)
    pipe = pipeline.to_diffusers(_scheduler(pipeline, settings))
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
            **given,
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
    """Fills in steps and guidance, and refuses other steps than those a Turbo or a schedule is
    trained for.
    """
    member = pipeline.family.member
    if settings.schedule is not None:
        schedule = find_schedule(settings.schedule, member.family)
        cfg = 1.0 if schedule.trained else member.cfg
        return replace(
            settings,
            steps=schedule.steps(settings.steps, member.steps),
            cfg=cfg if settings.cfg is None else settings.cfg,
        )
    trained = len(pipeline.family.arguments.get("sigmas", ()))
    if trained and settings.steps not in (None, trained):
        raise SettingError(
            f"steps is {settings.steps}, but {pipeline.folder} has the {trained} sigmas of its "
            f"model_index.json: leave steps out, or use {trained}."
        )
    return replace(
        settings,
        steps=settings.steps or trained or member.steps,
        cfg=member.cfg if settings.cfg is None else settings.cfg,
    )


def _scheduler(
    pipeline: LoadedPipeline, settings: GenerateSettings
) -> FlowMatchEulerDiscreteScheduler:
    if settings.schedule is not None:  # whose sigmas are shifted already
        changes = {"use_dynamic_shifting": False, "shift": 1.0, "shift_terminal": None}
        return FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler.config, **changes)
    # Stretching the schedule to `shift_terminal` divides 0 by 0 when its only sigma is 1, and the
    # image would be NaN.
    changes = {"shift_terminal": None} if settings.steps == 1 else {}
    return FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler.config, **changes)


def _check(pipeline: LoadedPipeline, settings: GenerateSettings) -> None:
    """Warns of a prompt that is cut off, and refuses a size that the pipeline would change."""
    family = pipeline.family
    for name in ("width", "height"):
        value, step = getattr(settings, name), family.member.size_step
        if value % step:
            raise SettingError(
                f"{name} is {value}, but must be divisible by {step} in "
                f"{family.pipeline.__name__}: use {max(step, step * round(value / step))}."
            )
    limit = family.arguments.get("max_sequence_length")
    if limit is not None and (tokens := len(pipeline.words(settings.prompt).input_ids)) > limit:
        logger.warning(
            "the prompt has %d tokens, but the model reads %d: the end of the prompt is cut off",
            tokens,
            limit,
        )


# Latents to images through diffusers' VAE, in the pieces that a plan runs.
#
# The class keeps a copy of each convolution's input for a next frame, which an image does not have:
# without them the same arithmetic takes less than half the memory.


def vae_shape(vae: ModelMixin) -> VaeShape:
    """Reads the sizes of a VAE from its config."""
    family, module = family_of_vae(vae)
    shape = module.vae_shape(vae.config)
    if shape is None:
        raise SettingError(
            f"the VAE's config.json does not describe {family.title}'s VAE: use {family.title}'s "
            "VAE."
        )
    return shape


def decoder_stages(vae: ModelMixin) -> Stages:
    """Takes the decoder's own modules apart; their image is not yet clamped to -1 ... 1."""
    shape, decoder, middle = vae_shape(vae), vae.decoder, vae.decoder.mid_block
    head = torch.nn.Sequential(decoder.norm_out, decoder.nonlinearity, decoder.conv_out)
    up_layers = family_of_vae(vae)[1].up_layers
    layers = []
    for block in decoder.up_blocks:
        layers += up_layers(block)
    return Stages(
        "decode",
        shape,
        end=lambda latents: decoder.conv_in(vae.post_quant_conv(latents)),
        middle=Middle.of(middle.resnets[0], middle.attentions[0], middle.resnets[1]),
        outer=(*layers, head),
    )


@torch.inference_mode()
def decode(
    pipeline: LoadedPipeline, latents: torch.Tensor, height: int, width: int
) -> list[Image.Image]:
    """Decodes packed latents, one image at a time so that peak memory does not grow with the batch.

    The arithmetic and its dtype are those of the pipeline's `__call__`, so that the images are
    bit-identical to it where they fit whole. Where they do not, exact tiles give them up to
    rounding.

    Args:
        latents: (B, height/16 * width/16, 64), as the sampler leaves them.
        height, width: pixels of the image.

    Returns:
        B images in RGB, or in RGBA from the VAE of 2.1 or of Qwen-Image-Layered.

    Raises:
        UnavailableError: not even the smallest tile fits in what is free on the card.
        torch.cuda.OutOfMemoryError: the card ran out of memory.
    """
    pipe = pipeline.to_diffusers()
    vae = pipeline.vae.to(pipeline.device)  # diffusers may have it wait in system RAM
    latents = pipe._unpack_latents(latents, height, width, pipe.vae_scale_factor)
    latents = latents.to(vae.dtype)  # (B, 16, 1, height/8, width/8), 2.1: (B, 64, 1, .../16, ...)
    mean, std = (
        torch.tensor(values, device=latents.device, dtype=latents.dtype).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    latents = family_of_vae(vae)[1].denormalized(latents, mean, std)
    images = []
    for latent in latents.split(1):
        pixels = decode_latent(vae, latent)[:, :, 0]
        images += pipe.image_processor.postprocess(pixels, output_type="pil")
    if pipeline.offload.name == "model":
        vae.to("cpu")
    return images


def decode_latent(vae: ModelMixin, latent: torch.Tensor) -> torch.Tensor:
    """Decodes one item as `vae.decode` does, in the memory that is free.

    Args:
        latent: (1, latent channels, 1, h, w), denormalized, on the VAE's device and in its dtype.

    Returns:
        (1, image channels, 1, 8h, 8w), of 2.1 16h and 16w, from -1 to 1.
    """
    stages = decoder_stages(vae)
    plan = plan_decode(
        stages.shape,
        *latent.shape[-2:],
        itemsize=latent.element_size(),
        budget=free_bytes(latent.device),
    )
    return planned.decode(stages, latent, checked(plan)).clamp(-1, 1)


def free_bytes(device: torch.device) -> int:
    """Counts free system RAM; on a card what is free, or reserved by torch and unused."""
    free = available_bytes(str(device))
    if device.type != "cuda":
        return free
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused
