"""Runs a batch through the VAE as planned, and once more in less room where the card ran out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import comfy.ldm.wan.vae
import comfy.model_management
import comfy.sd
import comfy.utils
import torch

from ....errors import SettingError, UnavailableError
from ....optimizations import vae as pieces
from ....optimizations.vae import Progress
from ....planning.vae import (
    MOST_TOGETHER,
    VaePlan,
    plan_decode,
    plan_encode,
    plan_in_room,
    plan_within,
)
from ....spec import PIXELS_PER_LATENT, format_gib
from ..record.record import Recording
from .room import (
    check_host_memory,
    free_bytes,
    make_room,
    on_processor,
    others_bytes,
)
from .stages import decoder_stages, encoder_stages, vae_shape

logger = logging.getLogger(__name__)

# The number of tiles that asks for none, whatever is free.
WHOLE = 1


@dataclass
class Batch:
    """Items on their way through the VAE.

    Args:
        what: such as "decode 2 images of 1328x1328".
        size: shape of the result, items first.
        tiles: as the user asks: 0 for the fewest that fit, or `WHOLE`, or at least so many.
        plan: makes a plan for a budget in bytes, or None for any.
        compute: runs some of the items as planned, into their part of the result.
        host_bytes: host memory that `compute` takes beside the result.
    """

    vae: comfy.sd.VAE
    what: str
    size: tuple[int, ...]
    tiles: int
    plan: Callable[[int | None], VaePlan]
    compute: Callable[[VaePlan, slice, torch.Tensor, Progress], None]
    host_bytes: int = 0
    _result: torch.Tensor | None = field(default=None, init=False)
    _done: int = field(default=0, init=False)
    _cleared: bool = field(default=False, init=False)

    def run(self) -> tuple[torch.Tensor, str]:
        """Computes all items.

        Returns:
            The result on ComfyUI's device and in its dtype for results; and the report: how, what
            was predicted and measured, and what had to make room.

        Raises:
            SettingError: a size or `tiles` is out of range.
            UnavailableError: it does not fit, or the card ran out of memory twice.
        """
        on_host = comfy.model_management.is_device_cpu(self.vae.output_device)
        check_host_memory(self.what, self.host_bytes + (self._result_bytes if on_host else 0))
        free = free_bytes(self.vae) - self._kept
        others = others_bytes(self.vae)
        plan = plan_in_room(self._planner, free, others)
        if on_processor(self.vae):
            check_host_memory(f"{self.what} {_form(plan)}", plan.peak_bytes + self._kept)
        lines = [f"{self.what}: {_how(plan, free, others)}"]
        phase = self.what.partition(" ")[0]
        with Recording(self.vae.first_stage_model, phase, self.vae.device) as recording:
            with comfy.model_management.cuda_device_context(self.vae.device):
                if not self._attempt(plan, recording):
                    # Only here, where the exception with all its tensors is gone.
                    plan = self._smaller(plan)
                    lines.append(
                        "the card ran out of memory; done again in half of what was free then: "
                        f"{_form(plan)}"
                    )
                    logger.warning("%s: %s", self.what, lines[-1])
                    if not self._attempt(plan, recording):
                        raise self._out_of_memory(plan)
            lines.append(
                f"memory beside the weights: {format_gib(plan.peak_bytes + self._kept)} predicted"
            )
            measured = recording.stop()
            if measured is not None and measured.working_bytes:
                lines[-1] += f", {format_gib(measured.working_bytes)} measured"
            if (moved := others - others_bytes(self.vae)) > 0:
                lines.append(f"ComfyUI moved {format_gib(moved)} of other models off the card")
            if self._cleared:
                lines.append("torch's cache was cleared: it held memory that was needed")
            recording.path = tuple(lines)
            recording.asked |= {
                "size": list(self.size),
                "tiles": plan.count,
                "plan_bytes": plan.peak_bytes,
            }
        return self._result, "\n".join(lines)

    @property
    def _result_bytes(self) -> int:
        return torch.Size(self.size).numel() * self.vae.vae_output_dtype().itemsize

    @property
    def _kept(self) -> int:
        """Bytes of the result where it stays on the VAE's device, which plans do not count."""
        same = self.vae.output_device.type == self.vae.device.type
        return self._result_bytes if same else 0

    def _planner(self, budget: int) -> VaePlan:
        return self.plan(None if self.tiles == WHOLE else budget)

    def _attempt(self, plan: VaePlan, recording: Recording) -> bool:
        """Whether the items that are left could be computed in the memory that there is."""
        left = -(-(self.size[0] - self._done) // plan.batch)
        bar = comfy.utils.ProgressBar(left * plan.count)

        def progress(done: int, total: int) -> None:
            bar.update(1)

        try:
            self._cleared |= make_room(self.vae, plan.peak_bytes + self._kept)
            recording.begin()
            if self._result is None:
                self._result = torch.empty(
                    self.size, device=self.vae.output_device, dtype=self.vae.vae_output_dtype()
                )
            while self._done < self.size[0]:
                items = slice(self._done, self._done + plan.batch)
                self.compute(plan, items, self._result[items], progress)
                self._done += plan.batch
        except Exception as error:
            comfy.model_management.raise_non_oom(error)
            return False
        return True

    def _smaller(self, plan: VaePlan) -> VaePlan:
        """A plan for half of what is free, or of what could be, and for less than was too much."""
        comfy.model_management.soft_empty_cache()
        if self.tiles == WHOLE:
            raise self._out_of_memory(plan, "set tiles to 0")
        free = free_bytes(self.vae) - self._kept
        for room in (free, free + others_bytes(self.vae)):
            for less in (plan.peak_bytes // 2, plan.peak_bytes - 1):
                if found := plan_within(self._planner, min(room // 2, less)):
                    return found
        raise self._out_of_memory(plan)

    def _out_of_memory(
        self, plan: VaePlan, remedy: str = "choose a smaller size or batch"
    ) -> UnavailableError:
        comfy.model_management.soft_empty_cache()
        return UnavailableError(
            f"the card ran out of memory to {self.what} {_form(plan)}: "
            f"{format_gib(plan.peak_bytes)} beside the weights were predicted and "
            f"{format_gib(free_bytes(self.vae))} is free now, so {remedy}, or free memory on the "
            "card."
        )


def _form(plan: VaePlan) -> str:
    if plan.whole:
        return "whole"
    return f"in {plan.count} exact tile{'s' * (plan.count > 1)}"


def _how(plan: VaePlan, free: int, others: int) -> str:
    if plan.peak_bytes <= free:
        return plan.reason
    text = f"{_form(plan)}, {format_gib(plan.peak_bytes)} where {format_gib(max(0, free))} is free"
    return f"{text}: ComfyUI moves other models off the card first" if others else text


# Decodes and encodes images through ComfyUI's VAE in the memory that is free.
#
# What comes out is what the host's own VAEDecode and VAEEncode give: bit for bit where the plan is
# whole, and up to rounding in exact tiles. Other VAEs and videos go the host's own way.


def decode(vae: comfy.sd.VAE, samples: torch.Tensor, tiles: int = 0) -> tuple[torch.Tensor, str]:
    """Decodes latents.

    Args:
        samples: (B, 16, h, w) or (B, 16, 1, h, w), as a LATENT holds them; left as they are.
        tiles: 0 takes the fewest that fit what is free, 1 none at all, more at least so many.

    Returns:
        Images (B, 8h, 8w, 3), or 4 channels of a Layered VAE, in ComfyUI's dtype for images, from 0
        to 1; and the report.

    Raises:
        SettingError: the latents are no Qwen-Image latents, or `tiles` is out of range.
        UnavailableError: the card's or the host's memory cannot hold it, or ran out twice.
    """
    latents = samples.unbind()[0] if samples.is_nested else samples
    other = _other_vae(vae)
    if not other and latents.ndim == 5 and latents.shape[2] > 1:
        other = f"the latent has {latents.shape[2]} frames, as a video or layers have"
    if other:
        images, report = _by_host(vae, "decode", latents, other)
    else:
        images, report = _decode_images(vae, latents, tiles)
    # As the host's node does with videos.
    return images.flatten(0, 1) if images.ndim == 5 else images, report


def encode(vae: comfy.sd.VAE, pixels: torch.Tensor, tiles: int = 0) -> tuple[torch.Tensor, str]:
    """Encodes images, each on its own: the host takes a batch as the frames of one video.

    Args:
        pixels: (B, H, W, C) from 0 to 1, as an IMAGE holds them; sides are cut to multiples of 8
            and channels added or dropped as the host does.
        tiles: as in `decode`.

    Returns:
        Latents (B, 16, 1, H / 8, W / 8) in ComfyUI's dtype for latents; and the report.

    Raises:
        SettingError: the images are no images, or `tiles` is out of range.
        UnavailableError: the card's or the host's memory cannot hold it, or ran out twice.
    """
    other = _other_vae(vae)
    if not other and pixels.ndim == 5:
        other = "the pixels are a video"
    if other:
        return _by_host(vae, "encode", pixels, other)
    return _encode_images(vae, pixels, tiles)


def _by_host(
    vae: comfy.sd.VAE, what: str, source: torch.Tensor, why: str
) -> tuple[torch.Tensor, str]:
    report = f"{what}: ComfyUI's own, because {why}"
    # Another pack's VAE may be of any class.
    model, device = (getattr(vae, name, None) for name in ("first_stage_model", "device"))
    with Recording(model, what, device, (report,)):
        return getattr(vae, what)(source), report


def _other_vae(vae: comfy.sd.VAE) -> str | None:
    """Why a VAE goes the host's own way; None for Qwen-Image's."""
    for name in ("decode", "encode"):
        if getattr(getattr(vae, name), "__func__", None) is not getattr(comfy.sd.VAE, name):
            return f"the VAE, a {type(vae).__name__}, has its own way to {name}"
    model = vae.first_stage_model
    if type(model) is not comfy.ldm.wan.vae.WanVAE:
        return f"the VAE is a {type(model).__name__} and not Qwen-Image's"
    try:
        channels = vae_shape(model).image_channels
    except SettingError:
        return "the VAE is a WanVAE of other layers than Qwen-Image's"
    if channels != vae.output_channels:
        return f"the VAE takes {vae.output_channels} channels and gives {channels}"
    return None


def _decode_images(
    vae: comfy.sd.VAE, latents: torch.Tensor, tiles: int
) -> tuple[torch.Tensor, str]:
    shape = vae_shape(vae.first_stage_model)
    if latents.ndim not in (4, 5) or latents.shape[1] != shape.latent_channels:
        raise SettingError(
            f"the latents are {tuple(latents.shape)} and the VAE takes (batch, "
            f"{shape.latent_channels}, height, width): connect latents of a Qwen-Image model."
        )
    latents = latents.unsqueeze(2) if latents.ndim == 4 else latents
    stages = decoder_stages(vae.first_stage_model)
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

    height, width = (PIXELS_PER_LATENT * side for side in latents.shape[-2:])
    images, report = Batch(
        vae=vae,
        what=f"decode {_count(len(latents))} of {width}x{height}",
        size=(len(latents), shape.image_channels, 1, height, width),
        tiles=tiles,
        plan=plan,
        compute=compute,
    ).run()
    return images.movedim(1, -1), report


def _encode_images(vae: comfy.sd.VAE, pixels: torch.Tensor, tiles: int) -> tuple[torch.Tensor, str]:
    shape = vae_shape(vae.first_stage_model)
    if pixels.ndim != 4:
        raise SettingError(
            f"the pixels are {tuple(pixels.shape)} and images are (batch, height, width, channels):"
            " connect an IMAGE."
        )
    pixels = vae.vae_encode_crop_pixels(pixels).movedim(-1, 1)
    height, width = pixels.shape[-2:]
    latent = height // PIXELS_PER_LATENT, width // PIXELS_PER_LATENT
    stages = encoder_stages(vae.first_stage_model)

    def plan(budget: int | None) -> VaePlan:
        itemsize = vae.vae_dtype.itemsize
        return plan_encode(shape, *latent, itemsize=itemsize, budget=budget, tiles=tiles)

    def compute(plan: VaePlan, items: slice, out: torch.Tensor, progress: Progress) -> None:
        # With the strides of the host's video of one frame, which decide what kernels run.
        image = vae.process_input(pixels[items].movedim(1, 0).unsqueeze(0))
        out[:] = pieces.encode(
            stages, image, plan, device=vae.device, dtype=vae.vae_dtype, progress=progress
        )

    return Batch(
        vae=vae,
        what=f"encode {_count(len(pixels))} of {width}x{height}",
        size=(len(pixels), shape.latent_channels, 1, *latent),
        tiles=tiles,
        plan=plan,
        compute=compute,
        host_bytes=2 * pixels[:1].nbytes,  # `process_input` copies twice
    ).run()


def _count(images: int) -> str:
    return f"{images} image{'s' * (images != 1)}"
