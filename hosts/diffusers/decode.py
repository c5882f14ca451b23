"""Latents to images."""

from __future__ import annotations

import torch
from diffusers import QwenImagePipeline
from PIL import Image

from .load import LoadedPipeline


@torch.inference_mode()
def decode(
    pipeline: LoadedPipeline, latents: torch.Tensor, height: int, width: int
) -> list[Image.Image]:
    """Decodes packed latents, one image at a time so that peak memory does not grow with the batch.

    The arithmetic and its dtype are those of `QwenImagePipeline.__call__`, so that the images are
    bit-identical to it.

    Args:
        latents: (B, height/16 * width/16, 64), as the sampler leaves them.
        height, width: pixels of the image.

    Returns:
        B images in RGB.
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
        pixels = vae.decode(latent, return_dict=False)[0][:, :, 0]
        images += pipe.image_processor.postprocess(pixels, output_type="pil")
    return images
