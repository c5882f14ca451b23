"""ComfyUI's VAEs of Qwen-Image with random weights, its own nodes, and how near images are."""

import math

import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.sd
import torch

import nodes as core
from qwen_l40s.hosts.comfyui.decode.fused import decoder_stages, encoder_stages
from qwen_l40s.optimizations.vae import tiles


def random(*shape, dtype=torch.float32, seed=None):
    generator = torch.Generator().manual_seed(sum(shape) if seed is None else seed)
    return torch.randn(shape, generator=generator).to(dtype)


def wan(dim=16, channels=3, gives=None, **options):
    """Qwen-Image's, or Layered's with 4 channels, or one that gives others."""
    options = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [], **options}
    return comfy.ldm.wan.vae.WanVAE(
        dim=dim,
        z_dim=16,
        temperal_downsample=[False, True, True],
        image_channels=channels,
        conv_out_channels=gives or channels,
        **options,
    ).eval()


def wan_21(dim=8, decoder=12):
    return comfy.ldm.wan.vae2_2.WanVAE(
        dim=dim,
        dec_dim=decoder,
        z_dim=64,
        dim_mult=[1, 2, 4, 8, 8],
        num_res_blocks=2,
        attn_scales=[],
        temperal_downsample=[False, True, True, True],
        image_channels=4,
        patch_size=1,
        temporal_kernel=1,
    )


def random_weights(model):
    weights = {}
    for seed, (name, weight) in enumerate(model.state_dict().items()):
        values = random(*weight.shape, seed=seed)
        if name.endswith("gamma"):
            weights[name] = 1 + 0.1 * values
        else:
            weights[name] = values * (weight[0].numel() ** -0.5 if weight.ndim > 1 else 0.05)
    return weights


def random_vae(build=wan, dtype=torch.float32, **sizes):
    with torch.device("meta"):
        model = build(**sizes)
    return comfy.sd.VAE(sd=random_weights(model), dtype=dtype)


def core_decode(vae, latents):
    return core.VAEDecode().decode(vae, {"samples": latents})[0]


def core_encode(vae, pixels):
    return core.VAEEncode().encode(vae, pixels)[0]["samples"]


def core_encode_each(vae, pixels):
    """As our node does; the host takes a batch as the frames of one video."""
    return torch.cat([core_encode(vae, image) for image in pixels.split(1)])


def decibels(found, known):
    error = float((found.double() - known.double()).square().mean())
    return 10 * math.log10(float(known.max() - known.min()) ** 2 / error) if error else math.inf


def assert_close(found, known):
    """80 dB of what the values span; NaN is near nothing."""
    assert (found.shape, found.dtype, found.device) == (known.shape, known.dtype, known.device)
    assert decibels(found, known) >= 80


def held(model, layers, plan, made):
    """Bytes that a plan holds at most, with latents and image, as the `Allocations` count them."""
    like = {"device": "meta", "dtype": model.conv2.weight.dtype}
    shape = layers.shape(model)
    latents = torch.empty(1, shape.latent_channels, 1, *plan.latent, **like)
    sides = (shape.pixels * side for side in plan.latent)
    pixels = torch.empty(1, shape.image_channels, 1, *sides, **like)
    with made:
        if plan.direction == "decode":
            tiles.decode(decoder_stages(model, layers), latents, plan, out=pixels)
        else:
            tiles.encode(encoder_stages(model, layers), pixels, plan)
    # What encoding returns is made inside.
    inside = latents.nbytes if plan.direction == "encode" else 0
    return made.peak + latents.nbytes + pixels.nbytes - inside
