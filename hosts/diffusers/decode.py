"""Latents to images through diffusers' Qwen-Image VAE, in the pieces that a plan runs.

The class keeps a copy of each convolution's input for a next frame, which an image does not have:
without them the same arithmetic takes less than half the memory.
"""

from __future__ import annotations

import torch
from diffusers import ModelMixin
from PIL import Image

from ...errors import SettingError
from ...families.registry import family_of_vae
from ...machine.device import available_bytes
from ...optimizations.vae import tiles as planned
from ...optimizations.vae.tiles import Middle, Stages
from ...planning.vae import plan_decode
from ...spec.vae import VaeShape
from .load import LoadedPipeline


def vae_shape(vae: ModelMixin) -> VaeShape:
    """Reads the sizes of a VAE from its config.

    Raises:
        SettingError: it is another network than Qwen-Image's.
    """
    family, module = family_of_vae(vae)
    shape = module.vae_shape(vae.config)
    if shape is None:
        raise SettingError(
            f"the VAE's config.json describes other layers than {family.title}'s: use "
            f"{family.title}'s VAE."
        )
    return shape


def decoder_stages(vae: ModelMixin) -> Stages:
    """Takes the decoder's own modules apart; their image is not yet clamped to -1 ... 1.

    Raises:
        SettingError: as `vae_shape`.
    """
    shape, decoder = vae_shape(vae), vae.decoder
    up_layers = family_of_vae(vae)[1].up_layers
    layers = []
    for block in decoder.up_blocks:
        layers += up_layers(block)
    return Stages(
        "decode",
        shape,
        end=lambda latents: decoder.conv_in(vae.post_quant_conv(latents)),
        middle=_middle(decoder.mid_block),
        outer=(*layers, _head(decoder)),
    )


def _middle(block: torch.nn.Module) -> Middle:
    return Middle.of(block.resnets[0], *block.attentions, block.resnets[1])


def _head(coder: torch.nn.Module) -> torch.nn.Sequential:
    return torch.nn.Sequential(coder.norm_out, coder.nonlinearity, coder.conv_out)


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
    vae = pipeline.vae.to(pipeline.device)  # diffusers may have it wait in host memory
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

    Raises:
        UnavailableError: not even the smallest tile fits in what is free on the card.
        torch.cuda.OutOfMemoryError: the card ran out of memory.
    """
    stages = decoder_stages(vae)
    plan = plan_decode(
        stages.shape,
        *latent.shape[-2:],
        itemsize=latent.element_size(),
        budget=free_bytes(latent.device),
    )
    return planned.decode(stages, latent, plan).clamp(-1, 1)


def free_bytes(device: torch.device) -> int:
    """Counts free host memory; on a card what is free, or reserved by torch and unused."""
    free = available_bytes(str(device))
    if device.type != "cuda":
        return free
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused
