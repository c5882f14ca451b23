"""Decodes and encodes images through ComfyUI's VAE in the memory that is free.

What comes out is what the host's own VAEDecode and VAEEncode give: up to rounding in our fused
layers and in exact tiles, and bit for bit where neither runs. Other VAEs and videos go the host's
own way.
"""

from __future__ import annotations

import comfy.sd
import torch

from ....errors import SettingError
from ....families.comfyui import kind_of_vae
from ....families.registry import are_of_two
from ....loaders.source import MICRO_ADVICE, MICRO_SIDE, MICRO_VAE
from ....optimizations.vae import tiles as pieces
from ....optimizations.vae.tiles import Progress
from ....planning.vae import MOST_TOGETHER, VaePlan, plan_decode, plan_encode
from ..record.phase import phase
from .batch import WHOLE, VaeBatch
from .fused import (
    FusedLayers,
    OwnLayers,
    decoder_stages,
    encoder_stages,
    not_fused,
)


def decode(
    vae: comfy.sd.VAE, samples: torch.Tensor, tiles: int = 0, ours: bool = False
) -> tuple[torch.Tensor, str]:
    """Decodes latents.

    Args:
        samples: (B, 16, h, w) or (B, 16, 1, h, w), of 2.1 64 channels, as a LATENT holds them; left
            as they are.
        tiles: 0 takes the fewest that fit what is free, 1 none at all, more at least so many.
        ours: whether our layers run where nobody has changed the host's.

    Returns:
        Images (B, 8h, 8w, 3), or 4 channels of a Layered VAE, of 2.1 (B, 16h, 16w, 4), in
        ComfyUI's dtype for images, from 0 to 1; and the report.

    Raises:
        SettingError: the latents are another model's, or `tiles` is out of range.
        UnavailableError: the card's or the host's memory cannot hold it, or ran out twice.
    """
    latents = samples.unbind()[0] if samples.is_nested else samples
    other, why_own = _other_vae(vae, ours)
    if not other and latents.ndim == 5 and latents.shape[2] > 1:
        other = f"the latent has {latents.shape[2]} frames, as a video or layers have"
    if other:
        _check_channels(latents, getattr(vae, "latent_channels", None), other=True)
        images, report = _by_host(vae, "decode", latents, other)
    else:
        images, report = _decode_images(vae, latents, tiles, why_own)
    # As the host's node does with videos.
    return images.flatten(0, 1) if images.ndim == 5 else images, report


def encode(
    vae: comfy.sd.VAE, pixels: torch.Tensor, tiles: int = 0, ours: bool = False
) -> tuple[torch.Tensor, str]:
    """Encodes images, each on its own: the host takes a batch as the frames of one video.

    Args:
        pixels: (B, H, W, C) from 0 to 1, as an IMAGE holds them; sides are cut to multiples of 8,
            of 2.1 16, and channels added or dropped as the host does.
        tiles, ours: as in `decode`.

    Returns:
        Latents (B, 16, 1, H / 8, W / 8), of 2.1 (B, 64, H / 16, W / 16), in ComfyUI's dtype for
        latents; and the report.

    Raises:
        SettingError: the images are no images, or `tiles` is out of range.
        UnavailableError: the card's or the host's memory cannot hold it, or ran out twice.
    """
    other, why_own = _other_vae(vae, ours)
    if not other and pixels.ndim == 5:
        other = "the pixels are a video"
    if other:
        return _by_host(vae, "encode", pixels, other)
    return _encode_images(vae, pixels, tiles, why_own)


def _by_host(
    vae: comfy.sd.VAE, what: str, source: torch.Tensor, why: str
) -> tuple[torch.Tensor, str]:
    report = f"{what}: ComfyUI's own, because {why}"
    # Another pack's VAE may be of any class.
    patcher, device = (getattr(vae, name, None) for name in ("patcher", "device"))
    with phase(what, patcher, device, (report,)):
        return getattr(vae, what)(source), report


def _other_vae(vae: comfy.sd.VAE, ours: bool) -> tuple[str, str | None]:
    """Says why a VAE goes the host's way, empty for Qwen-Image's; and why at least its layers run,
    empty where nobody asked for ours, None where ours do.
    """
    for name in ("decode", "encode"):
        if getattr(getattr(vae, name), "__func__", None) is not getattr(comfy.sd.VAE, name):
            return f"the VAE, a {type(vae).__name__}, has its own way to {name}", ""
    model = vae.first_stage_model
    kind = kind_of_vae(model)
    if kind is None or not kind.is_own(model):
        return f"the VAE is a {type(model).__name__} and not Qwen-Image's", ""
    why_own = not_fused(model) if ours else ""
    if kind.strips and why_own is not None:
        return f"{why_own}, and {kind.strips}" if why_own else kind.strips, ""
    try:
        channels = FusedLayers.shape(model).image_channels
    except SettingError:
        return "the VAE is a WanVAE whose layers differ from Qwen-Image's", ""
    if channels != vae.output_channels:
        return f"the VAE takes {vae.output_channels} channels and gives {channels}", ""
    return "", why_own


def _layers(vae: comfy.sd.VAE, why_own: str | None) -> OwnLayers:
    return FusedLayers(vae.device) if why_own is None else OwnLayers()


def _check_channels(latents: torch.Tensor, channels: int | None, *, other: bool = False) -> None:
    """Raises SettingError for latents that the VAE does not take.

    Args:
        other: of another VAE only what is sure: Qwen-Image's latents are no Qwen-Image-2.1's.
    """
    fits = latents.ndim in (4, 5) and latents.shape[1] == channels
    if fits or (other and not are_of_two(latents.shape[1] if latents.ndim > 1 else 0, channels)):
        return
    raise SettingError(
        f"the latents are {tuple(latents.shape)} and the VAE takes (batch, {channels}, height, "
        "width): connect the VAE of the model that painted them."
    )


def _decode_images(
    vae: comfy.sd.VAE, latents: torch.Tensor, tiles: int, why_own: str | None
) -> tuple[torch.Tensor, str]:
    stages = decoder_stages(vae.first_stage_model, _layers(vae, why_own))
    shape = stages.shape
    _check_channels(latents, shape.latent_channels)
    latents = latents.unsqueeze(2) if latents.ndim == 4 else latents
    together = 1 if tiles == WHOLE else min(len(latents), MOST_TOGETHER)

    def plan(budget: int | None) -> VaePlan:
        return plan_decode(
            shape,
            *latents.shape[-2:],
            batch=together,
            itemsize=vae.vae_dtype.itemsize,
            budget=budget,
            tiles=tiles,
            image_on_card=False,
        )

    def compute(plan: VaePlan, items: slice, out: torch.Tensor, progress: Progress) -> None:
        part = latents[items].to(device=vae.device, dtype=vae.vae_dtype)
        pieces.decode(stages, part, plan, out=out, progress=progress)
        vae.process_output(out)

    height, width = (shape.pixels * side for side in latents.shape[-2:])
    images, report = VaeBatch(
        vae=vae,
        what=f"decode {_count(len(latents))} of {width}x{height}",
        size=(len(latents), shape.image_channels, 1, height, width),
        tiles=tiles,
        plan=plan,
        compute=compute,
    ).run()
    if shape.dim == MICRO_VAE and {height, width} != {MICRO_SIDE}:
        report = f"{report}\n{MICRO_ADVICE}"
    return images.movedim(1, -1), _with_reason(report, why_own)


def _encode_images(
    vae: comfy.sd.VAE, pixels: torch.Tensor, tiles: int, why_own: str | None
) -> tuple[torch.Tensor, str]:
    stages = encoder_stages(vae.first_stage_model, _layers(vae, why_own))
    shape = stages.shape
    if pixels.ndim != 4:
        raise SettingError(
            f"the pixels are {tuple(pixels.shape)} and images are (batch, height, width, channels):"
            " connect an IMAGE."
        )
    pixels = vae.vae_encode_crop_pixels(pixels).movedim(-1, 1)
    height, width = pixels.shape[-2:]
    latent = height // shape.pixels, width // shape.pixels

    def plan(budget: int | None) -> VaePlan:
        itemsize = vae.vae_dtype.itemsize
        return plan_encode(shape, *latent, itemsize=itemsize, budget=budget, tiles=tiles)

    def compute(plan: VaePlan, items: slice, out: torch.Tensor, progress: Progress) -> None:
        # With the strides of the host's video of one frame, which decide what kernels run.
        image = vae.process_input(pixels[items].movedim(1, 0).unsqueeze(0))
        out[:] = pieces.encode(
            stages, image, plan, device=vae.device, dtype=vae.vae_dtype, progress=progress
        )

    latents, report = VaeBatch(
        vae=vae,
        what=f"encode {_count(len(pixels))} of {width}x{height}",
        size=(len(pixels), shape.latent_channels, 1, *latent),
        tiles=tiles,
        plan=plan,
        compute=compute,
        host_bytes=2 * pixels[:1].nbytes,  # `process_input` copies twice
    ).run()
    # Latents of 2.1 have no frames.
    latents = latents.squeeze(2) if vae.latent_dim == 2 else latents
    return latents, _with_reason(report, why_own)


def _with_reason(report: str, why_own: str | None) -> str:
    return f"{report}\nComfyUI's own layers, because {why_own}" if why_own else report


def _count(images: int) -> str:
    return f"{images} image{'s' * (images != 1)}"
