"""A host's VAE in the pieces that a plan runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from ..errors import SettingError
from ..planning.vae import VaePlan
from ..planning.vae_bytes import Step, after_middle, before_middle, down_steps, parts, up_steps
from ..spec import PIXELS_PER_LATENT, VaeShape
from .vae_tiles import Layer, Middle, Run, Tile, part, sampled_keys, sliced


@dataclass(frozen=True)
class DecoderStages:
    """A host's decoder in pieces; tensors are (B, channels, 1, height, width).

    Args:
        before: latents to the middle's input; reads one latent pixel to each side.
        up: one layer for each of `planning.vae_steps.up_steps(shape)`.
    """

    shape: VaeShape
    before: Layer
    middle: Middle
    up: tuple[Layer, ...]

    def __post_init__(self) -> None:
        _check_layers("decoder", self.up, len(up_steps(self.shape)))

    @property
    def around(self) -> tuple[Run, Run]:
        """What directly precedes and what directly follows the attention."""
        return (
            Run(before_middle(self.shape, "decode"), (self.before, self.middle.first)),
            Run(after_middle(self.shape, "decode"), (self.middle.last,)),
        )

    @property
    def rest(self) -> Run:
        """What follows the middle."""
        return Run(up_steps(self.shape), self.up)


@dataclass(frozen=True)
class EncoderStages:
    """A host's encoder in pieces; tensors are (B, channels, 1, height, width).

    Args:
        down: one layer for each of `planning.vae_steps.down_steps(shape)`.
        after: the middle's output to the mean; reads one latent pixel to each side.
    """

    shape: VaeShape
    down: tuple[Layer, ...]
    middle: Middle
    after: Layer

    def __post_init__(self) -> None:
        _check_layers("encoder", self.down, len(down_steps(self.shape)))

    @property
    def around(self) -> tuple[Run, Run]:
        """What directly precedes and what directly follows the attention."""
        return (
            Run(before_middle(self.shape, "encode"), (self.middle.first,)),
            Run(after_middle(self.shape, "encode"), (self.middle.last, self.after)),
        )

    @property
    def rest(self) -> Run:
        """What precedes the middle."""
        return Run(down_steps(self.shape), self.down)


def _check_layers(what: str, layers: tuple[Layer, ...], wanted: int) -> None:
    if len(layers) != wanted:
        raise SettingError(
            f"this VAE's {what} has {len(layers)} layers beside its middle and Qwen-Image's has "
            f"{wanted}: use Qwen-Image's VAE."
        )


# Decodes and encodes images as a plan says: whole, in exact tiles, or with sampled keys.

Progress = Callable[[int, int], None]


@torch.no_grad()
def decode(
    stages: DecoderStages,
    latents: torch.Tensor,
    plan: VaePlan,
    *,
    out: torch.Tensor | None = None,
    progress: Progress | None = None,
) -> torch.Tensor:
    """Decodes a batch.

    Args:
        latents: (B, latent channels, 1, h, w) on the compute device and in the VAE's dtype, as the
            host's own decode takes them.
        plan: for latents of this size, from `plan_decode`.
        out: where the images go, (B, image channels, 1, 8h, 8w) in any dtype, on any device.
        progress: called after each tile, or each part of a batch, with (done, in all).

    Returns:
        `out`, or a new tensor on the latents' device in their dtype; in the VAE's own range.

    Raises:
        SettingError: the plan is for another size or direction, or `out` has another shape.
    """
    shape = stages.shape
    _check_plan(plan, "decode", latents, shape.latent_channels, 1)
    height, width = (PIXELS_PER_LATENT * side for side in plan.latent)
    wanted = (latents.shape[0], shape.image_channels, 1, height, width)
    if out is not None and tuple(out.shape) != wanted:
        raise SettingError(f"the images are {wanted} and `out` is {tuple(out.shape)}.")
    if plan.how == "whole":
        layers = (*_middle_layers(stages, plan), *stages.up)
        return _in_batches(partial(_chain, layers), latents, plan, out, progress)
    if out is None:
        out = latents.new_empty(wanted)
    report = _Counter(progress, len(latents) * plan.count)
    for item, image in zip(latents.split(1), out.split(1), strict=True):
        run, hidden = stages.rest, item
        if plan.middle == "tiled":
            before, after = stages.around
            run = _with_attention(stages, before, after.then(run), item, plan)
        else:
            for layer in _middle_layers(stages, plan):
                hidden = layer(hidden)
        for tile in _tiles(plan, PIXELS_PER_LATENT):
            part(image, tile).copy_(run.tile(hidden, tile))
            report()
        del run, hidden
    return out


@torch.no_grad()
def encode(
    stages: EncoderStages,
    pixels: torch.Tensor,
    plan: VaePlan,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> torch.Tensor:
    """Encodes a batch to the mean of its latents.

    Args:
        pixels: (B, image channels, 1, 8h, 8w) in the range that the host's encoder takes; may be
            in host memory, from where it moves tile by tile.
        plan: for latents of this size, from `plan_encode`.
        device: where to compute; the pixels' own by default.
        dtype: the VAE's; the pixels' own by default.
        progress: called after each tile, or each part of a batch, with (done, in all).

    Returns:
        (B, latent channels, 1, h, w) on `device` in the VAE's dtype, not normalized.

    Raises:
        SettingError: the plan is for another size or direction.
    """
    shape = stages.shape
    _check_plan(plan, "encode", pixels, shape.image_channels, PIXELS_PER_LATENT)
    device, dtype = torch.device(device or pixels.device), dtype or pixels.dtype
    if plan.how == "whole":
        layers = (*stages.down, *_middle_layers(stages, plan))
        return _in_batches(
            lambda batch: _chain(layers, batch.to(device, dtype)), pixels, plan, None, progress
        )
    size = (len(pixels), shape.latent_channels, 1, *plan.latent)
    out = torch.empty(size, device=device, dtype=dtype)
    report = _Counter(progress, len(pixels) * plan.count)
    for item, mean in zip(pixels.split(1), out.split(1), strict=True):
        run, target = stages.rest, mean
        if plan.middle == "tiled":
            before, after = stages.around
            run = _with_attention(stages, run.then(before), after, item, plan, device, dtype)
        else:
            target = mean.new_empty((1, shape.middle_channels, 1, *plan.latent))
        for tile in _tiles(plan, 1):
            part(target, tile).copy_(run.tile(item, tile, device, dtype))
            report()
        if plan.middle != "tiled":
            for layer in _middle_layers(stages, plan):
                target = layer(target)
            mean.copy_(target)
        del run, target
    return out


def _middle_layers(stages: DecoderStages | EncoderStages, plan: VaePlan) -> tuple[Layer, ...]:
    """The middle with what directly precedes and follows it."""
    before, after = stages.around
    if plan.middle == "sliced":
        return sliced(stages.middle, before, after, plan.middle_rows)
    return *before.layers, stages.middle.attention, *after.layers


def _with_attention(
    stages: DecoderStages | EncoderStages,
    before: Run,
    after: Run,
    item: torch.Tensor,
    plan: VaePlan,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Run:
    """The complete network for tiles, with keys and values of the item's own."""
    keys, values = sampled_keys(
        stages.middle,
        lambda tile: before.tile(item, tile, device, dtype),
        _tiles(plan, 1),
        plan.latent,
        plan.stride,
    )
    width = stages.shape.middle_channels
    attend = partial(stages.middle.attend, keys=keys, values=values)
    return before.then(Run((Step("attention", width, width),), (attend,))).then(after)


def _tiles(plan: VaePlan, scale: int) -> Iterator[Tile]:
    return product(
        *(
            [(scale * low, scale * high) for low, high in parts(side, count)]
            for side, count in zip(plan.latent, plan.tiles, strict=True)
        )
    )


def _chain(layers: tuple[Layer, ...], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def _in_batches(
    whole: Layer,
    source: torch.Tensor,
    plan: VaePlan,
    out: torch.Tensor | None,
    progress: Progress | None,
) -> torch.Tensor:
    batches = source.split(plan.batch)
    report = _Counter(progress, len(batches))
    for index, batch in enumerate(batches):
        result = whole(batch)
        if out is None and len(batches) == 1:
            out = result
        else:
            if out is None:
                out = result.new_empty((len(source), *result.shape[1:]))
            out[index * plan.batch :][: len(batch)] = result
        del result
        report()
    return out


class _Counter:
    """Tells `progress` of one more part."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._done, self._total = progress, 0, total

    def __call__(self) -> None:
        self._done += 1
        if self._progress:
            self._progress(self._done, self._total)


def _check_plan(
    plan: VaePlan, direction: str, source: torch.Tensor, channels: int, scale: int
) -> None:
    wanted = (channels, 1, *(scale * side for side in plan.latent))
    if plan.direction != direction or source.ndim != 5 or tuple(source.shape[1:]) != wanted:
        raise SettingError(
            f"the plan is to {plan.direction} {plan.latent[0]}x{plan.latent[1]} latent pixels, for "
            f"which {direction} takes (batch, {', '.join(map(str, wanted))}), got "
            f"{tuple(source.shape)}: make a plan for this size."
        )
