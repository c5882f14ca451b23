"""The VAEs in ComfyUI: Qwen-Image's is Wan 2.1's, and Qwen-Image-2.1's Wan 2.2's for one frame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from comfy.ldm.wan import vae, vae2_2

from ....families.comfyui import VaeKind
from ....families.parts import QWEN_IMAGE_21_VAE, QWEN_IMAGE_VAE
from ....spec.vae import VaeShape

USUAL = {"num_res_blocks": 2, "attn_scales": []}


def build_wan21(
    dims: Mapping[str, Any], found: Mapping[str, tuple[int, ...]] | None = None
) -> vae.WanVAE:
    """Makes ComfyUI's class.

    Args:
        dims: `dim`, the width.
        found: {native name: shape} that tell the channels of images; 3 where it has none.
    """
    given, made = (
        shape[axis] if len(shape := (found or {}).get(f"{name}.weight", ())) == 5 else 3
        for name, axis in (("encoder.conv1", 1), ("decoder.head.2", 0))
    )
    shape = QWEN_IMAGE_VAE.shape
    return vae.WanVAE(
        dim=int(dims["dim"]),
        z_dim=shape.latent_channels,
        dim_mult=list(shape.widths),
        temperal_downsample=[False, True, True],
        image_channels=given,
        conv_out_channels=made,
        **USUAL,
    )


def _build_wan22(dims: Mapping[str, Any], found: Mapping[str, tuple[int, ...]]) -> vae2_2.WanVAE:
    shape, dim = QWEN_IMAGE_21_VAE.shape, int(dims["dim"])
    return vae2_2.WanVAE(
        dim=dim,
        dec_dim=int(found.get("decoder.head.0.gamma", (dim,))[0]),
        z_dim=shape.latent_channels,
        dim_mult=list(shape.widths),
        temperal_downsample=[False, True, True, True],
        image_channels=found.get("decoder.head.2.weight", (shape.image_channels,))[0],
        patch_size=1,
        temporal_kernel=1,
        **USUAL,
    )


def _has_layers_of(model: Any, shape: VaeShape) -> bool:
    usual = model.num_res_blocks == 2 and not model.attn_scales
    return usual and list(model.dim_mult) == list(shape.widths)


def _shape_of_wan21(model: vae.WanVAE) -> VaeShape:
    channels = model.decoder.head[-1].out_channels
    return VaeShape(dim=model.dim, latent_channels=model.z_dim, image_channels=channels)


def _shape_of_wan22(model: vae2_2.WanVAE) -> VaeShape:
    head = model.decoder.head
    sizes = {"dim": head[0].gamma.shape[0], "encoder_dim": model.dim}
    return replace(QWEN_IMAGE_21_VAE.shape, **sizes, image_channels=head[-1].out_channels)


def _wan21_differs(model: Any) -> str:
    known = _has_layers_of(model, QWEN_IMAGE_VAE.shape)
    return "" if known else "its layers differ from Qwen-Image's"


def _wan22_differs(model: Any) -> str:
    known = _has_layers_of(model, QWEN_IMAGE_21_VAE.shape) and model.patch_size == 1
    return "" if known else "its layers differ from Qwen-Image-2.1's"


def _up_of_wan22(decoder: Any) -> list[torch.nn.Module]:
    # The last stage has no shortcut.
    found: list[torch.nn.Module] = []
    for module in decoder.upsamples:
        found += [module] if module.avg_shortcut else module.upsamples
    return found


def _layers(module: Any, **more: str) -> dict[type, str]:
    usual = {"ResidualBlock": "residual", "Resample": "resample", **more}
    return {getattr(module, name): layer for name, layer in usual.items() if hasattr(module, name)}


WAN21 = VaeKind(
    takes=lambda model: isinstance(model, vae.WanVAE),
    is_own=lambda model: type(model) is vae.WanVAE,
    build=build_wan21,
    shape=_shape_of_wan21,
    other_layers=_wan21_differs,
    up=lambda decoder: list(decoder.upsamples),
    layers=_layers(vae),
)
WAN22 = VaeKind(
    # Of other models that have as many latent channels the class differs.
    takes=lambda model: (
        isinstance(model, vae2_2.WanVAE) and model.z_dim == QWEN_IMAGE_21_VAE.shape.latent_channels
    ),
    is_own=lambda model: True,
    build=_build_wan22,
    shape=_shape_of_wan22,
    other_layers=_wan22_differs,
    up=_up_of_wan22,
    layers=_layers(vae2_2, Up_ResidualBlock="up_stage", Down_ResidualBlock="down_stage"),
    strips="it cuts the images of Qwen-Image-2.1 into exact strips",
)
