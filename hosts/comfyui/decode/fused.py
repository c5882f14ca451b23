"""Splits ComfyUI's VAEs of 1.x and 2.1 into pieces that a plan runs, ComfyUI's or ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import comfy.ops
import comfy.sd
import torch
import torch.nn.functional as F
from comfy.ldm.wan import vae, vae2_2
from torch import Tensor

from ....caches import remembered
from ....errors import SettingError
from ....families.comfyui import VaeKind, kind_of_vae, vae_kinds
from ....families.parts import QWEN_IMAGE_21_VAE, QWEN_IMAGE_VAE
from ....optimizations.inventory import (
    Blueprint,
    blueprint,
    difference,
    functions_behind,
    replaced,
)
from ....optimizations.vae import flat, tiles
from ....optimizations.vae.tiles import Layer, Middle, Stages
from ....optimizations.warm_up import warm_up
from ....planning.vae import plan_decode
from ....spec.vae import VaeShape


def vae_shape(model: torch.nn.Module) -> VaeShape:
    """Reads the sizes of a VAE's `first_stage_model`."""
    kind = kind_of_vae(model)
    if kind is None or kind.other_layers(model):
        raise SettingError(
            f"the VAE is a {type(model).__name__}, but exact tiles need Qwen-Image's VAE (the "
            "architecture of Wan 2.1's): load Qwen-Image's VAE."
        )
    return kind.shape(model)


class OwnLayers:
    """Runs the host's modules as they are, on (B, C, 1, height, width); subclasses otherwise."""

    shape = staticmethod(vae_shape)

    def layer(self, module: torch.nn.Module) -> Layer:
        return module

    def middle(
        self, first: torch.nn.Module, attention: torch.nn.Module, last: torch.nn.Module
    ) -> Middle:
        return Middle.of(first, attention, last)


def decoder_stages(model: vae.WanVAE, layers: OwnLayers) -> Stages:
    shape, decoder = layers.shape(model), model.decoder
    up = kind_of_vae(model).up(decoder)
    first, second = layers.layer(model.conv2), layers.layer(decoder.conv1)
    return Stages(
        "decode",
        shape,
        end=lambda latents: second(first(latents)),
        middle=layers.middle(*decoder.middle),
        outer=tuple(map(layers.layer, (*up, decoder.head))),
    )


def encoder_stages(model: vae.WanVAE, layers: OwnLayers) -> Stages:
    shape, encoder = layers.shape(model), model.encoder
    head, last = layers.layer(encoder.head), layers.layer(model.conv1)
    return Stages(
        "encode",
        shape,
        end=lambda hidden: last(head(hidden)).chunk(2, dim=1)[0],
        middle=layers.middle(*encoder.middle),
        outer=tuple(map(layers.layer, (encoder.conv1, *encoder.downsamples))),
    )


_blueprints: WeakKeyDictionary[torch.nn.Module, Blueprint] = remembered(WeakKeyDictionary())


def changed(whole: comfy.sd.VAE) -> str | None:
    """Says what another extension has changed in a VAE, in one clause; None for nothing.

    The VAE is compared with one that ComfyUI makes of the same sizes: its layers, their classes,
    methods and hooks, and every attribute that their code reads.
    """
    model, patcher = whole.first_stage_model, whole.patcher
    if patcher.object_patches or patcher.injections or patcher.weight_wrapper_patches:
        return "another extension has patched it"
    if model not in _blueprints:
        found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        with torch.device("meta"):
            _blueprints[model] = blueprint(kind_of_vae(model).build({"dim": model.dim}, found))
    if name := difference(model, _blueprints[model]):
        return f"another extension has changed {name}"
    if reason := replaced(functions_behind(model.modules(), [type(model).__module__])):
        return reason.fact
    return None


def compile_ahead(decoder: comfy.sd.VAE) -> None:
    """Begins to compile what decoding an image launches: a pass on the meta device prepares it."""
    model, device, dtype = decoder.first_stage_model, decoder.device, decoder.vae_dtype
    latents = torch.empty((1, model.z_dim, 1, 8, 8), dtype=dtype, device="meta")

    @torch.inference_mode()
    def work(model: torch.nn.Module) -> None:
        if not kind_of_vae(model).other_layers(model):
            stages = decoder_stages(model, FusedLayers(device))
            tiles.decode(stages, latents, plan_decode(stages.shape, 8, 8, budget=None))

    warm_up(device, work, model)


class FusedLayers(OwnLayers):
    """Computes the modules of an unchanged VAE, with weights as the host casts them."""

    @staticmethod
    def shape(model: torch.nn.Module) -> VaeShape:
        """Reads the sizes of a VAE whose layers run here."""
        return replace(vae_shape(model), fused=True)

    def __init__(self, device: torch.device) -> None:
        self._ops = flat.choose_pixel_ops(device)
        named = chain(*(kind.layers.items() for kind in vae_kinds()))
        self._kinds = {layer: getattr(self, f"_{name}") for layer, name in named}
        self._kinds[torch.nn.Sequential] = self._head

    def layer(self, module: torch.nn.Module) -> Layer:
        run = self._kinds.get(type(module), self._convolve)
        return lambda x: run(module, x.squeeze(2)).unsqueeze(2)

    def middle(self, first: torch.nn.Module, attention: Any, last: torch.nn.Module) -> Middle:
        norm = partial(self._norm, attention.norm, silu=False)
        qkv, project = (partial(self._convolve, it) for it in (attention.to_qkv, attention.proj))
        return Middle(self.layer(first), self.layer(last), norm, qkv, project, attend=flat.attend)

    def _take(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """Copies weights: what the host moved to the card goes with the context."""
        if x.is_meta:  # of `compile_ahead`
            weight, bias = module.weight.to(x), module.bias.to(x)
            weight = weight[:, :, -1] if weight.ndim == 5 else weight
            return weight.to(memory_format=torch.channels_last), bias
        comfy.ops.run_every_op()
        with comfy.ops.CastBiasWeightContext(module, x, offloadable=True) as (weight, bias):
            weight = weight[:, :, -1] if weight.ndim == 5 else weight
            return weight.clone(memory_format=torch.channels_last), bias.clone()

    def _norm(self, module: Any, x: Tensor, **how: bool) -> Tensor:
        return self._ops.norm(flat.channels_last(x), module.gamma.to(x).flatten(), **how)

    def _convolve(self, module: Any, x: Tensor, **how: int) -> Tensor:
        weight, bias = self._take(module, x)
        x = flat.convolve(x, weight, **how)
        return self._ops.add(x, bias, None, x)

    def _head(self, module: torch.nn.Sequential, x: Tensor) -> Tensor:
        weight, bias = self._take(module[-1], x)
        # Of four channels cuDNN makes each by itself, of eight together: 4.3 of 45 ms in 2.1.
        more = -len(bias) % 8
        weight = F.pad(weight, (0, 0, 0, 0, 0, 0, 0, more))
        x = F.conv2d(self._norm(module[0], x), weight, F.pad(bias, (0, more)), padding=1)
        return x[:, : len(bias)]

    def _residual(self, module: Any, x: Tensor) -> Tensor:
        first, _, convolution, second, _, _, last = module.residual
        (weight, bias), (last_weight, last_bias) = (self._take(it, x) for it in (convolution, last))
        gamma, x, out = second.gamma.to(x).flatten(), flat.channels_last(x), None
        own = isinstance(module.shortcut, torch.nn.Identity)
        for items, rows, read, within in flat.strips(x, len(bias), margin=2):
            part = x[items, :, read]
            h = flat.convolve(self._norm(first, part), weight)
            h = flat.convolve(self._ops.norm(h, gamma, bias, out=h), last_weight)[:, :, within]
            part = part[:, :, within]
            part = part if own else self._convolve(module.shortcut, part)
            if out is None:
                whole = h.shape[::2] == x.shape[::2]
                out = h if whole else flat.empty(x, len(bias), *x.shape[2:])
            self._ops.add(h, last_bias, part, out[items, :, rows])
            del h, part
        return out

    def _resample(
        self, module: Any, x: Tensor, shortcut: Tensor | None = None, frames: int = 1
    ) -> Tensor:
        convolution, x = module.resample[1], flat.channels_last(x)
        if module.mode.startswith("down"):
            return self._convolve(convolution, F.pad(x, (0, 1, 0, 1)), stride=2, padding=0)
        weight, bias = self._take(convolution, x)
        weight, (height, width) = flat.doubled(weight), x.shape[2:]
        out = flat.empty(x, len(bias), 2 * height, 2 * width)
        for items, rows, read, within in flat.strips(x, len(weight), margin=1):
            parts = flat.convolve(x[items, :, read], weight, padding=1)
            parts = parts[:, :, within.start : within.stop + 1]
            other = None if shortcut is None else shortcut[items, :, rows]
            to = out[items, :, 2 * rows.start : 2 * rows.stop]
            self._ops.add(parts, bias, other, to, frames)
            del parts
        return out

    def _up_stage(self, module: Any, x: Tensor) -> Tensor:
        *blocks, resample = module.upsamples
        h = x = flat.channels_last(x)
        for block in blocks:
            h = self._residual(block, h)
        return self._resample(resample, h, x, module.avg_shortcut.factor_t)

    def _down_stage(self, module: Any, x: Tensor) -> Tensor:
        h, around = x, module.avg_shortcut
        for step in module.downsamples:
            h = self._kinds[type(step)](step, h)
        # Of its frames the last is the image, the others are zeros.
        own = h[:, around.factor_t - 1 :: around.factor_t]
        own += F.avg_pool2d(x, around.factor_s)
        return h


USUAL = {"num_res_blocks": 2, "attn_scales": []}


def build_wan21(
    dims: Mapping[str, Any], found: Mapping[str, tuple[int, ...]] | None = None
) -> vae.WanVAE:
    """Makes ComfyUI's class."""
    given, made = (
        kernel[axis] if len(kernel := (found or {}).get(f"{name}.weight", ())) == 5 else 3
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


def _differs(model: Any, shape: VaeShape, name: str) -> str:
    usual = model.num_res_blocks == 2 and not model.attn_scales
    usual = usual and getattr(model, "patch_size", 1) == 1  # which 2.1's class has
    known = usual and list(model.dim_mult) == list(shape.widths)
    return "" if known else f"its layers differ from {name}'s"


def _shape_of_wan21(model: vae.WanVAE) -> VaeShape:
    channels = model.decoder.head[-1].out_channels
    return VaeShape(dim=model.dim, latent_channels=model.z_dim, image_channels=channels)


def _shape_of_wan22(model: vae2_2.WanVAE) -> VaeShape:
    head = model.decoder.head
    sizes = {"dim": head[0].gamma.shape[0], "encoder_dim": model.dim}
    return replace(QWEN_IMAGE_21_VAE.shape, **sizes, image_channels=head[-1].out_channels)


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
    build=build_wan21,
    shape=_shape_of_wan21,
    other_layers=lambda model: _differs(model, QWEN_IMAGE_VAE.shape, "Qwen-Image"),
    up=lambda decoder: list(decoder.upsamples),
    layers=_layers(vae),
)
WAN22 = VaeKind(
    # Of other models that have as many latent channels the class differs.
    takes=lambda model: (
        isinstance(model, vae2_2.WanVAE) and model.z_dim == QWEN_IMAGE_21_VAE.shape.latent_channels
    ),
    build=_build_wan22,
    shape=_shape_of_wan22,
    other_layers=lambda model: _differs(model, QWEN_IMAGE_21_VAE.shape, "Qwen-Image-2.1"),
    up=_up_of_wan22,
    layers=_layers(vae2_2, Up_ResidualBlock="up_stage", Down_ResidualBlock="down_stage"),
    strips="it decodes Qwen-Image-2.1 in exact strips",
)
