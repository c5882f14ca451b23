"""ComfyUI's Qwen-Image VAE in the pieces that a plan runs."""

from __future__ import annotations

import torch
from comfy.ldm.wan import vae2_2
from comfy.ldm.wan.vae import WanVAE

from ....errors import SettingError
from ....optimizations.vae.tiles import Layer, Middle, Stages
from ....spec.vae import VAE_21, VaeShape


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
    return isinstance(model, vae2_2.WanVAE) and model.z_dim == VAE_21.latent_channels


class OwnLayers:
    """The host's modules as they are; its subclasses compute them otherwise."""

    shape = staticmethod(vae_shape)

    def layer(self, module: torch.nn.Module) -> Layer:
        """Of (B, C, 1, height, width)."""
        return module

    def middle(
        self, first: torch.nn.Module, attention: torch.nn.Module, last: torch.nn.Module
    ) -> Middle:
        """The middle of a decoder or encoder."""
        return Middle.of(first, attention, last)


def decoder_stages(model: WanVAE, layers: OwnLayers) -> Stages:
    """The decoder in layers.

    Raises:
        SettingError: as `vae_shape`.
    """
    shape, decoder, up = layers.shape(model), model.decoder, []
    for module in decoder.upsamples:
        # The last stage of 2.1 has no shortcut.
        up += [module] if getattr(module, "avg_shortcut", module) else module.upsamples
    first, second = layers.layer(model.conv2), layers.layer(decoder.conv1)
    return Stages(
        "decode",
        shape,
        end=lambda latents: second(first(latents)),
        middle=layers.middle(*decoder.middle),
        outer=tuple(map(layers.layer, (*up, decoder.head))),
    )


def encoder_stages(model: WanVAE, layers: OwnLayers) -> Stages:
    """The encoder in layers.

    Raises:
        SettingError: as `vae_shape`.
    """
    shape, encoder = layers.shape(model), model.encoder
    head, last = layers.layer(encoder.head), layers.layer(model.conv1)
    return Stages(
        "encode",
        shape,
        end=lambda hidden: last(head(hidden)).chunk(2, dim=1)[0],
        middle=layers.middle(*encoder.middle),
        outer=tuple(map(layers.layer, (encoder.conv1, *encoder.downsamples))),
    )
