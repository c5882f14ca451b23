"""ComfyUI's Qwen-Image VAE in the pieces that a plan runs."""

from __future__ import annotations

import torch
from comfy.ldm.wan import vae2_2
from comfy.ldm.wan.vae import WanVAE

from ....errors import SettingError
from ....optimizations.vae.tiles import DecoderStages, EncoderStages, Middle
from ....spec.vae import StripVae, VaeShape


def vae_shape(model: WanVAE) -> VaeShape:
    """The sizes of a VAE's `first_stage_model`.

    Raises:
        SettingError: it is another network than Qwen-Image's.
    """
    # Wan 2.2's VAE is another class of the same name.
    known = isinstance(model, WanVAE) and list(model.dim_mult) == [1, 2, 4, 4]
    if not known or model.attn_scales or model.num_res_blocks != 2:
        raise SettingError(
            f"the VAE is a {type(model).__name__} and exact tiles exist only for Qwen-Image's (Wan "
            "2.1's): load Qwen-Image's VAE."
        )
    return VaeShape(
        dim=model.dim,
        latent_channels=model.z_dim,
        image_channels=model.decoder.head[-1].out_channels,
    )


def cuts_strips(model: torch.nn.Module | None) -> bool:
    """Whether a VAE's `first_stage_model` is Qwen-Image-2.1's, which runs in exact strips."""
    # Of other models that have as many latent channels the class differs.
    return isinstance(model, vae2_2.WanVAE) and model.z_dim == StripVae().latent_channels


def decoder_stages(model: WanVAE) -> DecoderStages:
    """The decoder's own modules.

    Raises:
        SettingError: as `vae_shape`.
    """
    shape, decoder = vae_shape(model), model.decoder
    return DecoderStages(
        shape=shape,
        before=lambda latents: decoder.conv1(model.conv2(latents)),
        middle=_middle(*decoder.middle),
        up=(*decoder.upsamples, decoder.head),
    )


def encoder_stages(model: WanVAE) -> EncoderStages:
    """The encoder's own modules.

    Raises:
        SettingError: as `vae_shape`.
    """
    shape, encoder = vae_shape(model), model.encoder
    return EncoderStages(
        shape=shape,
        down=(encoder.conv1, *encoder.downsamples),
        middle=_middle(*encoder.middle),
        after=lambda hidden: model.conv1(encoder.head(hidden)).chunk(2, dim=1)[0],
    )


def _middle(first: torch.nn.Module, attention: torch.nn.Module, last: torch.nn.Module) -> Middle:
    def qkv(x: torch.Tensor) -> torch.Tensor:
        return attention.to_qkv(attention.norm(x.squeeze(2))).unsqueeze(2)

    def project(x: torch.Tensor) -> torch.Tensor:
        return attention.proj(x.squeeze(2)).unsqueeze(2)

    return Middle(first, attention, last, qkv, project)
