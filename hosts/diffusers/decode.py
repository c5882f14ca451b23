"""Latents to images."""

from __future__ import annotations

import logging

import torch
from diffusers import QwenImagePipeline
from PIL import Image

from ...optimizations import vae as planned
from ...planning.vae import VaePlan, plan_decode
from .device import available_bytes
from .load import LoadedPipeline
from .vae_stages import decoder_stages

logger = logging.getLogger(__name__)


@torch.inference_mode()
def decode(
    pipeline: LoadedPipeline, latents: torch.Tensor, height: int, width: int
) -> list[Image.Image]:
    """Decodes packed latents, one image at a time so that peak memory does not grow with the batch.

    The arithmetic and its dtype are those of `QwenImagePipeline.__call__`, so that the images are
    bit-identical to it where they fit whole. Where they do not, exact tiles give them up to
    rounding.

    Args:
        latents: (B, height/16 * width/16, 64), as the sampler leaves them.
        height, width: pixels of the image.

    Returns:
        B images in RGB, or in RGBA from the VAE of Qwen-Image-Layered.

    Raises:
        UnavailableError: not even the smallest tile fits in what is free on the card.
        torch.cuda.OutOfMemoryError: the card ran out of memory twice.
    """
    pipe = pipeline.to_diffusers()
    vae = pipeline.vae
    latents = QwenImagePipeline._unpack_latents(latents, height, width, pipe.vae_scale_factor)
    latents = latents.to(vae.dtype)  # (B, 16, 1, height/8, width/8)
    mean, std = (
        torch.tensor(values, device=latents.device, dtype=latents.dtype).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    latents = latents / (1.0 / std) + mean
    images = []
    for latent in latents.split(1):
        pixels = decode_latent(vae, latent)[:, :, 0]
        images += pipe.image_processor.postprocess(pixels, output_type="pil")
    return images


def decode_latent(vae: torch.nn.Module, latent: torch.Tensor) -> torch.Tensor:
    """Decodes one item as `vae.decode` does, in the memory that is free.

    Args:
        vae: diffusers' AutoencoderKLQwenImage.
        latent: (1, 16, 1, h, w), denormalized, on the VAE's device and in its dtype.

    Returns:
        (1, channels, 1, 8h, 8w) from -1 to 1.

    Raises:
        UnavailableError: not even the smallest tile fits in what is free on the card.
        torch.cuda.OutOfMemoryError: the card ran out of memory twice.
    """
    stages = decoder_stages(vae)
    free = free_bytes(latent.device)

    def plan(budget: int) -> VaePlan:
        height, width = latent.shape[-2:]
        return plan_decode(
            stages.shape, height, width, itemsize=latent.element_size(), budget=budget
        )

    chosen = plan(free)
    try:
        return planned.decode(stages, latent, chosen).clamp(-1, 1)
    except torch.cuda.OutOfMemoryError:
        pass
    # Only here, where the exception with all its tensors is gone.
    torch.cuda.empty_cache()
    smaller = plan(min(free, chosen.peak_bytes) // 2)
    logger.warning(
        "The card ran out of memory while decoding (%s): decoding again in half of it, %s.",
        chosen.reason,
        smaller.reason,
    )
    return planned.decode(stages, latent, smaller).clamp(-1, 1)


def free_bytes(device: torch.device) -> int:
    """What tensors can take: host memory; on a card what is free, or held by torch and unused."""
    free = available_bytes(str(device))
    if device.type != "cuda":
        return free
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused
