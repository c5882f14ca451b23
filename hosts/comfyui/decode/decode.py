"""Decodes and encodes images through ComfyUI's VAE in the memory that is free.

What comes out is what the host's VAEDecode and VAEEncode give: up to rounding in our fused
layers and in exact tiles, and bit for bit where neither runs. Other VAEs and videos go the host's
own way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import comfy.model_management
import comfy.sd
import comfy.utils
import torch

from ....errors import SettingError, UnavailableError
from ....families.comfyui import kind_of_vae
from ....families.registry import vae_shapes
from ....loaders.source import MICRO_ADVICE, MICRO_SIDE, MICRO_VAE
from ....machine.memory import available_memory
from ....optimizations.vae import tiles as pieces
from ....optimizations.vae.tiles import Progress
from ....planning.vae import (
    MOST_TOGETHER,
    VaePlan,
    plan_decode,
    plan_encode,
    plan_in_room,
)
from ....spec.formats import format_gib
from ....verdict import read_or
from ..contract import unsupported_host
from ..record import MeasuredPhase, phase
from ..sample.prefix import bytes_on
from .fused import FusedLayers, OwnLayers, changed, decoder_stages, encoder_stages
from .kept import KeptVAE

UNREAD = "the VAE has an unknown form"


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
    other = read_or(UNREAD, _other_vae, vae, ours)
    if not other and latents.ndim == 5 and latents.shape[2] > 1:
        other = f"the latent has {latents.shape[2]} frames, as of a video or of layers"
    if other:
        _check_channels(latents, getattr(vae, "latent_channels", None), other=True)
        images, report = _by_host(vae, "decode", latents, other)
    else:
        images, report = _decode_images(vae, latents, tiles, ours)
    # As the host's node does with videos.
    return images.flatten(0, 1) if images.ndim == 5 else images, report


def encode(
    vae: comfy.sd.VAE, pixels: torch.Tensor, tiles: int = 0, ours: bool = False
) -> tuple[torch.Tensor, str]:
    """Encodes images, each on its own: the host takes a batch as the frames of one video.

    Args:
        pixels: (B, H, W, C) from 0 to 1, as an IMAGE holds them; sides are cut to multiples of 8,
            of 2.1 16, and channels added or dropped as the host does.

    Returns:
        Latents (B, 16, 1, H / 8, W / 8), of 2.1 (B, 64, H / 16, W / 16), in ComfyUI's dtype for
        latents; and the report.

    Raises:
        SettingError: the images are no images, or `tiles` is out of range.
        UnavailableError: the card's or the host's memory cannot hold it, or ran out twice.
    """
    other = read_or(UNREAD, _other_vae, vae, ours)
    if not other and pixels.ndim == 5:
        other = "the pixels are a video"
    if other:
        return _by_host(vae, "encode", pixels, other)
    return _encode_images(vae, pixels, tiles, ours)


def _by_host(
    vae: comfy.sd.VAE, what: str, source: torch.Tensor, why: str
) -> tuple[torch.Tensor, str]:
    report = f"{what}: ComfyUI's code ran, because {why}"
    # Another pack's VAE may be of any class.
    patcher, device = (getattr(vae, name, None) for name in ("patcher", "device"))
    with phase(what, patcher, device, (report,)):
        return getattr(vae, what)(source), report


def _other_vae(vae: comfy.sd.VAE, ours: bool) -> str:
    """Says why a VAE goes the host's way; empty for Qwen-Image's as ComfyUI makes it."""
    for name in ("decode", "encode"):
        known = (getattr(kind, name) for kind in (comfy.sd.VAE, KeptVAE))
        if getattr(getattr(vae, name), "__func__", None) not in known:
            return f"the VAE, a {type(vae).__name__}, {name}s its own way"
    model = vae.first_stage_model
    kind = kind_of_vae(model)
    if kind is None:
        return f"the VAE is a {type(model).__name__} and not Qwen-Image's"
    if other := kind.other_layers(model):
        return f"the VAE is a {type(model).__name__} and {other}"
    if reason := changed(vae):
        return reason
    if ours and (fault := unsupported_host(("fused VAE",))):
        return fault.fact
    if kind.strips and not ours:
        return kind.strips
    channels = kind.shape(model).image_channels
    if channels != vae.output_channels:
        return f"the VAE takes {vae.output_channels} channels and gives {channels}"
    return ""


def _layers(vae: comfy.sd.VAE, ours: bool) -> OwnLayers:
    return FusedLayers(vae.device) if ours else OwnLayers()


def _check_channels(latents: torch.Tensor, channels: int | None, *, other: bool = False) -> None:
    # Of another VAE only what is sure: Qwen-Image's latents are no Qwen-Image-2.1's.
    found = latents.shape[1] if latents.ndim > 1 else 0
    if latents.ndim in (4, 5) and found == channels:
        return
    if other and (found == channels or not {found, channels} <= vae_shapes().keys()):
        return
    raise SettingError(
        f"the latents are {tuple(latents.shape)}, but the VAE takes (batch, {channels}, height, "
        "width): connect the VAE of the model that made the latents."
    )


def _decode_images(
    vae: comfy.sd.VAE, latents: torch.Tensor, tiles: int, ours: bool
) -> tuple[torch.Tensor, str]:
    stages = decoder_stages(vae.first_stage_model, _layers(vae, ours))
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
    return images.movedim(1, -1), report


def _encode_images(
    vae: comfy.sd.VAE, pixels: torch.Tensor, tiles: int, ours: bool
) -> tuple[torch.Tensor, str]:
    stages = encoder_stages(vae.first_stage_model, _layers(vae, ours))
    shape = stages.shape
    if pixels.ndim != 4:
        raise SettingError(
            f"the pixels are {tuple(pixels.shape)}, but an IMAGE is (batch, height, width, "
            "channels): connect an IMAGE."
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
    return latents, report


def _count(images: int) -> str:
    return f"{images} image{'s' * (images != 1)}"


# ComfyUI's own `VAE.decode` books 3.5 times what decoding takes, for which the transformer leaves
# the card. A plan for what is free leaves it there.

logger = logging.getLogger(__name__)

# ComfyUI books a tenth more than the weights that it loads.
BOOKED = 1.1
# The number of tiles that asks for none, whatever is free.
WHOLE = 1


@dataclass
class VaeBatch:
    vae: comfy.sd.VAE
    what: str  # such as "decode 2 images of 1328x1328"
    size: tuple[int, ...]  # shape of the result, items first
    tiles: int  # as the user asks: 0 for the fewest that fit, or `WHOLE`, or at least so many
    plan: Callable[[int | None], VaePlan]  # makes a plan for a budget in bytes, or None for any
    # runs some of the items as planned, into their part of the result
    compute: Callable[[VaePlan, slice, torch.Tensor, Progress], None]
    host_bytes: int = 0  # system RAM that `compute` takes besides the result
    _result: torch.Tensor | None = field(default=None, init=False)
    _done: int = field(default=0, init=False)
    _cleared: bool = field(default=False, init=False)

    def run(self) -> tuple[torch.Tensor, str]:
        """Gives the result on ComfyUI's device and in its dtype for results; and the report: how,
        what was predicted and measured, and what had to make room.
        """
        on_host = comfy.model_management.is_device_cpu(self.vae.output_device)
        check_host_memory(self.what, self.host_bytes + (self._result_bytes if on_host else 0))
        free = free_bytes(self.vae) - self._kept
        others = others_bytes(self.vae)
        plan = plan_in_room(self._planner, free, others)
        if on_processor(self.vae):
            check_host_memory(f"{self.what} {_form(plan)}", plan.peak_bytes + self._kept)
        lines = [f"{self.what}: {_how(plan, free, others)}"]
        with phase(self.what.partition(" ")[0], self.vae.patcher, self.vae.device) as run:
            with comfy.model_management.cuda_device_context(self.vae.device):
                if not self._attempt(plan, run):
                    # Only here, where the exception with all its tensors is gone.
                    plan = self._smaller(plan)
                    lines.append(
                        "the GPU ran out of memory; repeated in half of the free VRAM: "
                        f"{_form(plan)}"
                    )
                    logger.warning("%s: %s", self.what, lines[-1])
                    if not self._attempt(plan, run):
                        raise self._out_of_memory(plan)
            lines.append(f"working memory: {format_gib(plan.peak_bytes + self._kept)} predicted")
            run.stop()
            if run.working_bytes:
                lines[-1] += f", {format_gib(run.working_bytes)} measured"
            if (moved := others - others_bytes(self.vae)) > 0:
                lines.append(f"ComfyUI offloaded {format_gib(moved)} of other models")
            if self._cleared:
                lines.append("torch's cache was cleared to free VRAM")
            run.path = tuple(lines)
            run.asked |= {
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
        # Plans do not count the result where it stays on the VAE's device.
        same = self.vae.output_device.type == self.vae.device.type
        return self._result_bytes if same else 0

    def _planner(self, budget: int) -> VaePlan:
        return self.plan(None if self.tiles == WHOLE else budget)

    def _attempt(self, plan: VaePlan, run: MeasuredPhase) -> bool:
        """Computes the items that are left; returns False where memory ran out."""
        left = -(-(self.size[0] - self._done) // plan.batch)
        bar = comfy.utils.ProgressBar(left * plan.count)

        try:
            self._cleared |= make_room(self.vae, plan.peak_bytes + self._kept)
            run.begin()
            if self._result is None:
                self._result = torch.empty(
                    self.size, device=self.vae.output_device, dtype=self.vae.vae_output_dtype()
                )
            while self._done < self.size[0]:
                items = slice(self._done, self._done + plan.batch)
                self.compute(plan, items, self._result[items], lambda *_: bar.update(1))
                self._done += plan.batch
        except Exception as error:
            comfy.model_management.raise_non_oom(error)
            return False
        return True

    def _smaller(self, plan: VaePlan) -> VaePlan:
        comfy.model_management.soft_empty_cache()
        if self.tiles == WHOLE:
            raise self._out_of_memory(plan, "set tiles to 0")
        free = free_bytes(self.vae) - self._kept
        for room in (free, free + others_bytes(self.vae)):
            for less in (plan.peak_bytes // 2, plan.peak_bytes - 1):
                found = self._planner(min(room // 2, less))
                if found.fits:
                    return found
        raise self._out_of_memory(plan)

    def _out_of_memory(
        self, plan: VaePlan, remedy: str = "choose a smaller size or batch"
    ) -> UnavailableError:
        comfy.model_management.soft_empty_cache()
        return UnavailableError(
            f"the GPU ran out of memory to {self.what} {_form(plan)}: "
            f"{format_gib(plan.peak_bytes)} of working memory was predicted, and "
            f"{format_gib(free_bytes(self.vae))} is free now. Free VRAM, or {remedy}."
        )


def _form(plan: VaePlan) -> str:
    if plan.whole:
        return "whole"
    return f"in {plan.count} exact tile{'s' * (plan.count > 1)}"


def _how(plan: VaePlan, free: int, others: int) -> str:
    if plan.peak_bytes <= free:
        return plan.reason
    needs = f"needs {format_gib(plan.peak_bytes)}, {format_gib(max(0, free))} is free"
    text = f"{_form(plan)}, {needs}"
    return f"{text}: ComfyUI offloads other models first" if others else text


def on_processor(vae: comfy.sd.VAE) -> bool:
    return comfy.model_management.is_device_cpu(vae.device)


def free_bytes(vae: comfy.sd.VAE) -> int:
    """Counts what activations can take while everything else stays where it is.

    On the CPU this is system RAM. The patcher's own `get_free_memory` would count the
    weights of other models that dynamic VRAM could evict.
    """
    if on_processor(vae):
        return available_memory()
    free = comfy.model_management.get_free_memory(vae.device) + bytes_on(vae.device)
    reserved = comfy.model_management.extra_reserved_memory()
    return max(0, int(free - reserved - BOOKED * waiting_bytes(vae)))


def waiting_bytes(vae: comfy.sd.VAE) -> int:
    """Counts the VAE's own weights that are not on its device yet."""
    patcher = vae.patcher
    if patcher.current_loaded_device() != vae.device:
        return patcher.model_size()
    return max(0, patcher.model_size() - patcher.loaded_size())


def others_bytes(vae: comfy.sd.VAE) -> int:
    """Counts other models' weights on the VAE's card, which ComfyUI can move off it."""
    if on_processor(vae):
        return 0
    return sum(
        model.loaded_size()
        for model in comfy.model_management.loaded_models()
        if model is not None and model.load_device == vae.device and not vae.patcher.is_clone(model)
    )


def make_room(vae: comfy.sd.VAE, needed: int) -> bool:
    """Has ComfyUI load the VAE with room for `needed` bytes of activations."""
    comfy.model_management.load_models_gpu(
        [vae.patcher], memory_required=needed, force_full_load=vae.disable_offload
    )
    if vae.device.type != "cuda":
        return False
    # Cached blocks count as free, and may be of sizes that do not fit.
    free, cached = comfy.model_management.get_free_memory(vae.device, torch_free_too=True)
    if not cached or needed + waiting_bytes(vae) <= free - cached:
        return False
    comfy.model_management.soft_empty_cache()
    return True


def check_host_memory(what: str, needed: int) -> None:
    available = available_memory()
    if needed > available:
        raise UnavailableError(
            f"too little system RAM to {what}: {format_gib(needed)} is needed and "
            f"{format_gib(available)} is available. Choose a smaller size or batch, or close "
            "other programs."
        )
