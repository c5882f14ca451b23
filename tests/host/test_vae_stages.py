"""Its Qwen-Image VAE in pieces against its own decode and encode."""

import itertools
from dataclasses import replace
from functools import partial
from unittest import mock

import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.model_management
import pytest
import torch
from comfy.ldm.modules.diffusionmodules.model import pytorch_attention
from comfyui_boot import MODE, ROOT
from tracked_allocations import CONVOLUTION_WORKSPACE, Allocations, fused_attention
from vae_cases import decibels, held, random, random_weights, wan, wan_21

from qwen_l40s.errors import SettingError
from qwen_l40s.hosts.comfyui.decode.fused import (
    FusedLayers,
    OwnLayers,
    decoder_stages,
    encoder_stages,
    vae_shape,
)
from qwen_l40s.hosts.comfyui.load.vae import load_vae
from qwen_l40s.optimizations.vae import flat
from qwen_l40s.optimizations.vae.tiles import decode, encode
from qwen_l40s.planning import vae_work as vae_bytes
from qwen_l40s.planning.vae import plan_decode, plan_encode

newer = pytest.mark.host_has("comfy.model_base.QwenImage21")
pytestmark = pytest.mark.each_device
DEVICE = comfy.model_management.get_torch_device()
MICRO = ROOT / "models" / "micro"
EXACT_DB = 80 if MODE == "cpu" else 60
OWN = OwnLayers()
MIDDLES = [{}, {"middle_rows": 3}]


def filled(model):
    model.load_state_dict(random_weights(model))
    return model.to(DEVICE)


def models():
    bundled = load_vae(MICRO, "fp32")[0].first_stage_model.to(DEVICE, torch.float32)
    return [bundled, filled(wan()), filled(wan(dim=8, channels=4))]


def test_tiles_give_what_the_host_gives():
    with torch.inference_mode():
        for model in models():
            shape = vae_shape(model)
            for batch, height, width, tiles in ((1, 16, 12, 4), (2, 11, 9, 3), (1, 2, 3, 6)):
                latents = random(batch, 16, 1, height, width).to(DEVICE)
                pixels = random(batch, shape.image_channels, 1, 8 * height, 8 * width)
                pixels = pixels.to(DEVICE).tanh()
                image, mean = model.decode(latents), model.encode(pixels)
                for way in MIDDLES:
                    plan = plan_decode(shape, height, width, batch=batch, budget=None, tiles=tiles)
                    out = torch.empty(image.shape, device="cpu")
                    decode(decoder_stages(model, OWN), latents, replace(plan, **way), out=out)
                    assert decibels(out, image.cpu()) >= EXACT_DB, way
                    plan = plan_encode(shape, height, width, batch=batch, budget=None, tiles=tiles)
                    found = encode(
                        encoder_stages(model, OWN),
                        pixels.cpu(),
                        replace(plan, **way),
                        device=DEVICE,
                    )
                    assert found.device.type == DEVICE.type
                    assert decibels(found, mean) >= EXACT_DB, way


def test_other_vaes_are_refused():
    others = [
        wan(dim_mult=[1, 2, 4, 8]),
        wan(num_res_blocks=1),
        comfy.ldm.wan.vae2_2.WanVAE(
            dim=8, z_dim=48, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[]
        ),
        torch.nn.Identity(),
    ]
    for model in others:
        with pytest.raises(SettingError, match=r"load Qwen-Image's VAE\.$"):
            decoder_stages(model, OWN)


def convolved(x, weight, bias=None, stride=1, padding=0):
    """Channels last, as processors and cards give it, and tensors without memory do not."""
    sides = ((side + 2 * padding - weight.shape[-1]) // stride + 1 for side in x.shape[2:])
    return x.new_empty((len(x), *sides, len(weight))).permute(0, 3, 1, 2)


def published(dtype, build=wan, **sizes):
    """The VAE of published size without memory behind it, with a card's attention."""
    with torch.device("meta"):
        model = build(**(sizes or {"dim": 96})).to(dtype)
    for part in (model.encoder, model.decoder):
        part.middle[1].optimized_attention = pytorch_attention
    return model


def predicted(shape, plan, itemsize):
    """Bytes of a plan whose middle may be sliced otherwise than planned."""
    sizes = (plan.direction, shape, plan.latent, itemsize)
    kept = vae_bytes.latent_bytes(*sizes[1:]) + vae_bytes.image_bytes(*sizes[1:])
    middle = vae_bytes.middle_bytes(*sizes, plan.middle_rows)
    return kept + max(middle, vae_bytes.outside_middle_bytes(*sizes, plan.tile))


PUBLISHED_21 = partial(published, build=wan_21, dim=96, decoder=144)
# Latent pixels, tiles and rows of a slice of the middle.
PLANS = [((128, 128), 1, 128), ((33, 70), 1, 33), ((96, 72), 12, 96), ((96, 72), 12, 8)]


@pytest.mark.parametrize(
    ("build", "ours"),
    [(published, False), (published, True), pytest.param(PUBLISHED_21, True, marks=newer)],
    ids=["1.x", "1.x fused", "2.1 fused"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_predicted_peak(build, ours, dtype):
    model, size = build(dtype), dtype.itemsize
    layers = FusedLayers(torch.device("meta")) if ours else OWN
    around = partial(mock.patch.object, flat.F, "conv2d", convolved) if ours else fused_attention
    shape, workspace = layers.shape(model), 0 if ours else CONVOLUTION_WORKSPACE
    for (latent, count, rows), plan in itertools.product(PLANS, (plan_decode, plan_encode)):
        made = plan(shape, *latent, itemsize=size, budget=None, tiles=count, image_on_card=True)
        made, peak = replace(made, middle_rows=rows), made.peak_bytes
        with around():
            tracked = held(model, layers, made, Allocations(workspace))
        assert predicted(shape, made, size) == peak or rows < latent[0]
        peak = predicted(shape, made, size)
        assert tracked <= peak <= 1.25 * tracked, (made, peak / tracked)
