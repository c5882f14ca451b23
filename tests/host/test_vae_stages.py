"""Its Qwen-Image VAE in pieces against its own decode and encode."""

import math
from dataclasses import replace

import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.model_management
import pytest
import torch
from comfy.ldm.modules.diffusionmodules.model import pytorch_attention
from comfyui_boot import MODE, ROOT
from tracked_allocations import Allocations, fused_attention

from qwen_l40s.errors import SettingError
from qwen_l40s.hosts.comfyui.decode.stages import (
    OwnLayers,
    decoder_stages,
    encoder_stages,
    vae_shape,
)
from qwen_l40s.hosts.comfyui.load.vae import load_vae
from qwen_l40s.optimizations.vae.tiles import decode, encode, sliced
from qwen_l40s.planning import vae as vae_bytes
from qwen_l40s.planning.vae import VaeShape, plan_decode, plan_encode

pytestmark = pytest.mark.each_device
DEVICE = comfy.model_management.get_torch_device()
MICRO = ROOT / "models" / "micro"
EXACT_DB = 80 if MODE == "cpu" else 60
OWN = OwnLayers()
MIDDLES = [{}, {"middle_rows": 3}]


def wan(dim=8, channels=3, z_dim=16, **options):
    options = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [], **options}
    return comfy.ldm.wan.vae.WanVAE(
        dim=dim,
        z_dim=z_dim,
        temperal_downsample=[False, True, True],
        image_channels=channels,
        conv_out_channels=channels,
        **options,
    ).eval()


def filled(model, dtype=torch.float32):
    """ComfyUI leaves new weights as they lie in memory."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        scale = weight[0].numel() ** -0.5 if weight.ndim > 1 else 0.1
        values = torch.randn(weight.shape, generator=generator) * scale
        weight.data = values.abs() + 0.5 if "gamma" in name else values
    return model.to(DEVICE, dtype)


def models():
    """The bundled VAE, a random one, and one with an alpha channel."""
    bundled = load_vae(MICRO, "fp32")[0].first_stage_model.to(DEVICE, torch.float32)
    return [bundled, filled(wan(dim=16)), filled(wan(channels=4))]


def random(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def decibels(found, known):
    error = float((found.double() - known.double()).square().mean())
    return 10 * math.log10(float(known.max() - known.min()) ** 2 / error) if error else math.inf


def test_the_whole_is_the_hosts_own_bit_for_bit():
    with torch.inference_mode():
        for model in [*models(), filled(wan(dim=16), torch.bfloat16)]:
            dtype, shape = model.conv2.weight.dtype, vae_shape(model)
            latents = random(2, 16, 1, 9, 14, dtype=dtype)
            known = model.decode(latents)
            plan = plan_decode(shape, 9, 14, batch=2, budget=None)
            assert torch.equal(decode(decoder_stages(model, OWN), latents, plan), known)
            pixels = known.clamp(-1, 1)
            plan = plan_encode(shape, 9, 14, batch=2, budget=None)
            mean = encode(encoder_stages(model, OWN), pixels, plan)
            assert torch.equal(mean, model.encode(pixels))


def test_tiles_give_what_the_host_gives():
    with torch.inference_mode():
        for model in models():
            shape = vae_shape(model)
            for batch, height, width, tiles in ((1, 16, 12, 4), (2, 11, 9, 3), (1, 2, 3, 6)):
                latents = random(batch, 16, 1, height, width)
                pixels = random(batch, shape.image_channels, 1, 8 * height, 8 * width).tanh()
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


def test_the_shape():
    assert vae_shape(wan()) == VaeShape(dim=8)
    layered = VaeShape(dim=16, image_channels=4)
    assert vae_shape(wan(dim=16, channels=4)) == layered
    assert decoder_stages(wan(dim=16, channels=4), OWN).shape == layered


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
        try:
            decoder_stages(model, OWN)
        except SettingError as error:
            assert str(error).endswith("load Qwen-Image's VAE."), error
        else:
            raise AssertionError(f"{type(model)} was taken")


def published(dtype):
    """The VAE of published size without memory behind it, with a card's attention."""
    with torch.device("meta"):
        model = wan(dim=96).to(dtype)
    for part in (model.encoder, model.decoder):
        part.middle[1].optimized_attention = pytorch_attention
    return model


def held(model, plan):
    """Bytes that a plan holds at most, with latents and image."""
    like = {"device": "meta", "dtype": model.conv2.weight.dtype}
    latents = torch.empty(1, 16, 1, *plan.latent, **like)
    pixels = torch.empty(1, 3, 1, *(8 * side for side in plan.latent), **like)
    made = Allocations(vae_bytes.CONVOLUTION_WORKSPACE)
    with fused_attention(), made:
        if plan.direction == "decode":
            decode(decoder_stages(model, OWN), latents, plan, out=pixels)
        else:
            encode(encoder_stages(model, OWN), pixels, plan)
    # What encoding returns is made inside.
    inside = latents.nbytes if plan.direction == "encode" else 0
    return made.peak + latents.nbytes + pixels.nbytes - inside


def test_the_predicted_peak_of_the_whole():
    for dtype in (torch.bfloat16, torch.float32):
        model = published(dtype)
        for latent in ((128, 128), (256, 256), (33, 70)):
            for plan in (plan_decode, plan_encode):
                found = plan(
                    VaeShape(), *latent, itemsize=dtype.itemsize, budget=None, image_on_card=True
                )
                tracked = held(model, found)
                assert tracked <= found.peak_bytes <= 1.25 * tracked, (found, tracked)


def test_the_predicted_peak_of_tiles():
    latent, shape, size = (96, 72), VaeShape(), 2
    model = published(torch.bfloat16)
    for plan in (plan_decode, plan_encode):
        found = plan(shape, *latent, itemsize=size, budget=None, tiles=12)
        sizes = (found.direction, shape, latent, size)
        kept = vae_bytes.latent_bytes(shape, latent, size)
        kept += vae_bytes.image_bytes(shape, latent, size)
        outside = vae_bytes.outside_middle_bytes(*sizes, found.tile)
        for rows in (96, 8):
            tracked = held(model, replace(found, middle_rows=rows))
            predicted = kept + max(outside, vae_bytes.middle_bytes(*sizes, rows))
            assert tracked <= predicted <= 1.25 * tracked, (found, rows, predicted / tracked)


def test_the_predicted_peak_of_the_middle():
    latent, size = (128, 120), 2
    model = published(torch.bfloat16)
    for direction, stages in (
        ("decode", decoder_stages(model, OWN)),
        ("encode", encoder_stages(model, OWN)),
    ):
        before, after = stages.around
        for rows in (128, 16):
            layers = (*before.layers, stages.middle.attention, *after.layers)
            if rows < 128:
                layers = sliced(stages.middle, before, after, rows)
            made = Allocations(vae_bytes.CONVOLUTION_WORKSPACE)
            with torch.no_grad(), fused_attention(), made:
                channels = before.steps[0].channels_in
                x = torch.empty(1, channels, 1, *latent, device="meta", dtype=torch.bfloat16)
                for layer in layers:
                    x = layer(x)
            predicted = vae_bytes.middle_bytes(direction, VaeShape(), latent, size, rows)
            # Latents are counted apart.
            predicted += vae_bytes.latent_bytes(VaeShape(), latent, size)
            assert made.peak <= predicted <= 1.25 * made.peak, (rows, predicted / made.peak)
