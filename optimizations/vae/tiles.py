"""Decodes and encodes images as a plan says: whole, or in tiles that give the same up to rounding.

A tile runs through the layers with a margin that shrinks on the way. The middle, where every latent
pixel sees every other, runs on the whole, in slices if need be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from typing import Any

import torch
import torch.nn.functional as F

from ...errors import SettingError
from ...planning.vae import VaePlan
from ...spec.vae import (
    Interval,
    VaeLayer,
    VaeShape,
    after_middle,
    before_middle,
    down_steps,
    intervals,
    parts,
    up_steps,
)

Layer = Callable[[torch.Tensor], torch.Tensor]
Progress = Callable[[int, int], None]
# Rows and columns.
Tile = tuple[Interval, Interval]


@dataclass(frozen=True)
class LayerRun:
    """Layers, each (B, channels, 1, height, width) to the like, and how far each one reads."""

    steps: tuple[VaeLayer, ...]
    layers: tuple[Layer, ...]

    def tile(
        self,
        source: torch.Tensor,
        tile: Tile,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Computes a tile of what the layers make of the whole `source`.

        It starts with all that its pixels depend on, and loses after each layer what later ones do
        not read. Where it ends with the whole, the layers pad it as they pad the whole.
        """
        down, across = (
            intervals(self.steps, *span, size)
            for span, size in zip(tile, source.shape[-2:], strict=True)
        )
        x = part(source, (down[0], across[0])).to(device, dtype)
        for index, (step, layer) in enumerate(zip(self.steps, self.layers, strict=True)):
            top, left = step.gives(*down[index])[0], step.gives(*across[index])[0]
            (first, last), (begin, end) = down[index + 1], across[index + 1]
            x = part(layer(x), ((first - top, last - top), (begin - left, end - left)))
        return x


def part(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    rows, columns = tile
    return x[..., slice(*rows), slice(*columns)]


def stage(layers: tuple[Layer, ...], shortcut: Layer) -> Layer:
    """Adds a shortcut's result, in place, to the result of the layers that the shortcut skips."""
    return lambda x: _chain(layers, x).add_(shortcut(x))


@dataclass(frozen=True)
class Middle:
    """A residual block, attention, and a residual block of a host."""

    # first, last: (B, C, 1, height, width) to the same
    first: Layer
    last: Layer
    # norm, qkv, project: the attention's layers, (B, C, height, width) to as many channels, or to 3
    # C
    norm: Layer
    qkv: Layer
    project: Layer
    # the host's, as `first`; None where that of the other arguments runs
    attention: Layer | None = None
    # query, keys and values, each (1, 1, pixels, C), to what is seen; None for torch's
    attend: Callable[..., torch.Tensor] | None = None

    @classmethod
    def of(cls, first: torch.nn.Module, attention: Any, last: torch.nn.Module) -> Middle:
        return cls(first, last, attention.norm, attention.to_qkv, attention.proj, attention)

    def see(self, hidden: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attends from some pixels, (1, C, 1, rows, columns), to (1, 1, pixels, C)."""
        query = self._split(hidden)[0].contiguous()
        seen = (self.attend or F.scaled_dot_product_attention)(query, keys, values)
        seen = seen.transpose(-1, -2).reshape(hidden.shape)
        return self.project(seen.squeeze(2)).unsqueeze(2) + hidden

    def put(self, hidden: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes the keys and values of some pixels, (1, C, 1, rows, columns)."""
        _, key, value = self._split(hidden)
        keys.copy_(key)
        values.copy_(value)

    def _split(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        together = self.qkv(self.norm(hidden.squeeze(2))).flatten(2).transpose(1, 2)
        return together[:, None].chunk(3, dim=-1)


def _in_strips(run: LayerRun, rows: int, source: torch.Tensor) -> torch.Tensor:
    height, width = source.shape[-2:]
    out = None
    for strip in _strips(height, rows):
        result = run.tile(source, (strip, (0, width)))
        if out is None:
            out = result.new_empty((1, result.shape[1], 1, height, width))
        out[..., slice(*strip), :] = result
        del result
    return out


def _attend_in_strips(middle: Middle, rows: int, hidden: torch.Tensor) -> torch.Tensor:
    height, width = hidden.shape[-2:]
    for item in hidden.split(1):
        keys = hidden.new_empty((1, 1, height * width, hidden.shape[1]))
        values = torch.empty_like(keys)
        for low, high in _strips(height, rows):
            pixels = slice(low * width, high * width)
            middle.put(item[..., low:high, :], keys[:, :, pixels], values[:, :, pixels])
        # A strip's queries come from its own pixels alone, so that the result takes their place.
        for low, high in _strips(height, rows):
            item[..., low:high, :] = middle.see(item[..., low:high, :], keys, values)
        del keys, values
    return hidden


def _strips(height: int, rows: int) -> Iterator[Interval]:
    for low in range(0, height, rows):
        yield low, min(low + rows, height)


@dataclass(frozen=True)
class Stages:
    """A host's decoder or encoder in pieces; tensors are (B, channels, 1, height, width)."""

    direction: str  # "decode" or "encode"
    shape: VaeShape
    # latents to the middle's input, or the middle's output to the mean; reads one latent pixel to
    # each side
    end: Layer
    middle: Middle
    outer: tuple[Layer, ...]  # one layer for each of `spec.vae.up_steps(shape)`, or of `down_steps`

    def __post_init__(self) -> None:
        if len(self.outer) != (wanted := len(self.rest.steps)):
            raise SettingError(
                f"this VAE's {self.direction}r has {len(self.outer)} layers besides its middle, "
                f"but Qwen-Image's has {wanted}: use Qwen-Image's VAE."
            )

    @property
    def around(self) -> tuple[LayerRun, LayerRun]:
        """Gives what directly precedes and what directly follows the attention."""
        before: tuple[Layer, ...] = (self.middle.first,)
        after: tuple[Layer, ...] = (self.middle.last,)
        if self.direction == "decode":
            before = self.end, *before
        else:
            after = *after, self.end
        return (
            LayerRun(before_middle(self.shape, self.direction), before),
            LayerRun(after_middle(self.shape, self.direction), after),
        )

    @property
    def rest(self) -> LayerRun:
        """Gives what follows the middle, or precedes it."""
        steps = up_steps if self.direction == "decode" else down_steps
        return LayerRun(steps(self.shape), self.outer)


@torch.no_grad()
def decode(
    stages: Stages,
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
        out: where the images go, (B, image channels, 1, 8h, 8w), of 2.1 16h and 16w, in any dtype,
            on any device.
        progress: called after each tile, or each part of a batch, with (done, in all).

    Returns:
        `out`, or a new tensor on the latents' device in their dtype; in the VAE's own range.

    Raises:
        SettingError: the plan is for another size or direction, or `out` has another shape.
    """
    shape = stages.shape
    _check_plan(plan, "decode", latents, shape.latent_channels, 1)
    height, width = (shape.pixels * side for side in plan.latent)
    wanted = (latents.shape[0], shape.image_channels, 1, height, width)
    if out is not None and tuple(out.shape) != wanted:
        raise SettingError(f"the images are {wanted}, but `out` is {tuple(out.shape)}.")
    if plan.whole:
        layers = (*middle_layers(stages, plan), *stages.outer)
        return _in_batches(partial(_chain, layers), latents, plan, out, progress)
    if out is None:
        out = latents.new_empty(wanted)
    report = _counter(progress, len(latents) * plan.count)
    for item, image in zip(latents.split(1), out.split(1), strict=True):
        hidden = _chain(middle_layers(stages, plan), item)
        for tile in _tiles(plan, shape.pixels):
            part(image, tile).copy_(stages.rest.tile(hidden, tile))
            report()
        del hidden
    return out


@torch.no_grad()
def encode(
    stages: Stages,
    pixels: torch.Tensor,
    plan: VaePlan,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> torch.Tensor:
    """Encodes a batch to the mean of its latents.

    Args:
        pixels: (B, image channels, 1, 8h, 8w), of 2.1 16h and 16w, in the range that the host's
            encoder takes; may be in system RAM, from where it moves tile by tile.
        progress: called after each tile, or each part of a batch, with (done, in all).

    Returns:
        (B, latent channels, 1, h, w) on `device` in the VAE's dtype, not normalized.

    Raises:
        SettingError: the plan is for another size or direction.
    """
    shape = stages.shape
    _check_plan(plan, "encode", pixels, shape.image_channels, shape.pixels)
    device, dtype = torch.device(device or pixels.device), dtype or pixels.dtype
    if plan.whole:
        layers = (*stages.outer, *middle_layers(stages, plan))
        return _in_batches(
            lambda batch: _chain(layers, batch.to(device, dtype)), pixels, plan, None, progress
        )
    size = (len(pixels), shape.latent_channels, 1, *plan.latent)
    out = torch.empty(size, device=device, dtype=dtype)
    report = _counter(progress, len(pixels) * plan.count)
    for item, mean in zip(pixels.split(1), out.split(1), strict=True):
        hidden = mean.new_empty((1, shape.middle_channels("encode"), 1, *plan.latent))
        for tile in _tiles(plan, 1):
            part(hidden, tile).copy_(stages.rest.tile(item, tile, device, dtype))
            report()
        for layer in middle_layers(stages, plan):
            hidden = layer(hidden)
        mean.copy_(hidden)
        del hidden
    return out


def middle_layers(stages: Stages, plan: VaePlan) -> tuple[Layer, ...]:
    """Gives the middle with what directly precedes and follows it, in slices if the plan says so.

    Each layer takes and gives a whole (1, channels, 1, height, width), up to rounding the host's;
    our attention works in place.
    """
    before, after = stages.around
    rows = plan.middle_rows if plan.sliced else plan.latent[0]
    ours = partial(_attend_in_strips, stages.middle, rows)
    if plan.sliced:
        return partial(_in_strips, before, rows), ours, partial(_in_strips, after, rows)
    return *before.layers, stages.middle.attention or ours, *after.layers


def _tiles(plan: VaePlan, scale: int) -> Iterator[Tile]:
    down, across = (
        [(scale * low, scale * high) for low, high in parts(side, count)]
        for side, count in zip(plan.latent, plan.tiles, strict=True)
    )
    return product(down, across)


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
    report = _counter(progress, len(batches))
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


def _counter(progress: Progress | None, total: int) -> Callable[[], object]:
    done = count(1)
    return lambda: progress and progress(next(done), total)


def _check_plan(
    plan: VaePlan, direction: str, source: torch.Tensor, channels: int, scale: int
) -> None:
    wanted = (channels, 1, *(scale * side for side in plan.latent))
    if plan.direction != direction or source.ndim != 5 or tuple(source.shape[1:]) != wanted:
        raise SettingError(
            f"the plan is to {plan.direction} {plan.latent[0]}x{plan.latent[1]} latent pixels, so "
            f"{direction} takes (batch, {', '.join(map(str, wanted))}), not "
            f"{tuple(source.shape)}: make a plan for this size."
        )
