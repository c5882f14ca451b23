"""Diffusers' Qwen-Image VAE in the pieces that a plan runs.

The class keeps a copy of each convolution's input for a next frame, which an image does not have:
without them the same arithmetic takes less than half the memory.
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLQwenImage

from ...errors import SettingError
from ...optimizations.vae_middle import Middle
from ...optimizations.vae_stages import DecoderStages, EncoderStages
from ...planning.vae_steps import VaeShape

FRAMES = 3  # a kernel's reach over time; the class pads an image to it


def vae_shape(vae: AutoencoderKLQwenImage) -> VaeShape:
    """The sizes of a VAE.

    Raises:
        SettingError: it is another network than Qwen-Image's.
    """
    config = vae.config
    if list(config.dim_mult) != [1, 2, 4, 4] or config.attn_scales or config.num_res_blocks != 2:
        raise SettingError(
            "the VAE's config.json has another dim_mult, attn_scales or num_res_blocks than "
            "Qwen-Image's: use Qwen-Image's VAE."
        )
    return VaeShape(
        dim=config.base_dim,
        latent_channels=config.z_dim,
        image_channels=config.input_channels,
        padded_frames=FRAMES,
    )


def decoder_stages(vae: AutoencoderKLQwenImage) -> DecoderStages:
    """The decoder's own modules; their image is not yet clamped to -1 ... 1.

    Raises:
        SettingError: as `vae_shape`.
    """
    shape, decoder = vae_shape(vae), vae.decoder
    layers = []
    for block in decoder.up_blocks:
        layers += [*block.resnets, *(block.upsamplers or ())]
    return DecoderStages(
        shape=shape,
        before=lambda latents: decoder.conv_in(vae.post_quant_conv(latents)),
        middle=_middle(decoder.mid_block),
        up=(*layers, _head(decoder)),
    )


def encoder_stages(vae: AutoencoderKLQwenImage) -> EncoderStages:
    """The encoder's own modules.

    Raises:
        SettingError: as `vae_shape`.
    """
    shape, encoder = vae_shape(vae), vae.encoder
    head = _head(encoder)
    return EncoderStages(
        shape=shape,
        down=(encoder.conv_in, *encoder.down_blocks),
        middle=_middle(encoder.mid_block),
        after=lambda hidden: vae.quant_conv(head(hidden)).chunk(2, dim=1)[0],
    )


def _head(coder: torch.nn.Module) -> torch.nn.Sequential:
    return torch.nn.Sequential(coder.norm_out, coder.nonlinearity, coder.conv_out)


def _middle(block: torch.nn.Module) -> Middle:
    (attention,) = block.attentions

    def qkv(x: torch.Tensor) -> torch.Tensor:
        return attention.to_qkv(attention.norm(x.squeeze(2))).unsqueeze(2)

    def project(x: torch.Tensor) -> torch.Tensor:
        return attention.proj(x.squeeze(2)).unsqueeze(2)

    return Middle(block.resnets[0], attention, block.resnets[1], qkv, project)
