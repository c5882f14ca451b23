"""Whole images through ComfyUI's sampler and VAE, of random weights and without a prompt."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import comfy.ldm.wan.vae
import comfy.sample
import comfy.sd
import torch
from comfy.model_patcher import ModelPatcher

from ...loaders.random_weights import random_tensor
from ...optimizations import measure
from ...optimizations.measure_forward import InputTensors

CFG = 4.0
# A negative prompt is short, and so ComfyUI computes it in a pass of its own.
NEGATIVE_TOKENS = 20
PUBLISHED_DIM, SMALL_DIM = 96, 8
LATENT_CHANNELS = 16


class ImageTimes(NamedTuple):
    """Milliseconds by the processor's clock, and the latents."""

    sample: float
    decode: float
    latents: torch.Tensor


def random_vae(device: torch.device, *, small: bool) -> comfy.sd.VAE:
    """ComfyUI's VAE of Qwen-Image, or one with a twelfth of its channels."""
    with torch.device("meta"):
        empty = comfy.ldm.wan.vae.WanVAE(
            dim=SMALL_DIM if small else PUBLISHED_DIM,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1, 2, 4, 4],
            num_res_blocks=2,
            attn_scales=[],
            temperal_downsample=[False, True, True],
        )
    tensors = {
        name: random_tensor(name, tuple(tensor.shape), device).cpu()
        for name, tensor in empty.state_dict().items()
    }
    vae = comfy.sd.VAE(sd=tensors)
    vae.throw_exception_if_invalid()
    return vae


@torch.inference_mode()  # as execution.py runs every prompt
def paint(
    patcher: ModelPatcher,
    vae: comfy.sd.VAE,
    tensors: InputTensors,
    steps: int,
    device: torch.device,
) -> ImageTimes:
    """KSampler with euler and simple at a guidance of 4, then VAE Decode."""
    negative = tensors.text[:, : min(NEGATIVE_TOKENS, tensors.inputs.text)]
    extra: dict[str, Any] = {}
    if tensors.references:
        extra["reference_latents"] = list(tensors.references)
    measure.synchronize(device)
    start = time.perf_counter()
    latents = comfy.sample.sample(
        patcher,
        tensors.latents.cpu(),
        steps,
        CFG,
        "euler",
        "simple",
        [[tensors.text, extra]],
        [[negative, dict(extra)]],
        torch.zeros_like(tensors.latents, device="cpu"),
        disable_pbar=True,
        seed=0,
    )
    measure.synchronize(device)
    sampled = time.perf_counter()
    vae.decode(latents)
    measure.synchronize(device)
    decoded = time.perf_counter()
    return ImageTimes((sampled - start) * 1e3, (decoded - sampled) * 1e3, latents.cpu())
