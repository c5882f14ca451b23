"""Triton: what stands between the convolutions of a VAE on one image, each in one pass.

A tensor is (B, C, H, W) with channels last, or rows and columns of one. Its pixel is found from the
strides of items and rows, in pixels; the numbers of a pixel lie side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...caches import remembered
from . import on_card_of
from .launch import Launch, PreparedLaunch

LAST = torch.channels_last
# Numbers that one program takes, and its warps.
BLOCK, WARPS = 4096, 4
# Every size of an image and of a strip: no kernel of its own for each.
SIZES = ["pixels", "area", "width", "x_item", "x_row", "other_item", "other_row"]


@triton.jit(do_not_specialize=SIZES)
def _norm_kernel(
    x_ptr,
    gamma_ptr,
    bias_ptr,
    out_ptr,
    pixels,
    area,
    width,
    x_item,
    x_row,
    channels: tl.constexpr,
    block: tl.constexpr,
    each: tl.constexpr,
    silu: tl.constexpr,
):
    """As `flat.norm`, of a pixel."""
    pixel = tl.program_id(0) * each + tl.arange(0, each)
    channel = tl.arange(0, block)
    inside = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    place = pixel // area * x_item + pixel % area // width * x_row + pixel % width
    read = place.to(tl.int64)[:, None] * channels + channel[None, :]
    x = tl.load(x_ptr + read, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=channel < channels, other=0.0)
        x += bias.to(tl.float32)[None, :]
    size = tl.sqrt(tl.sum(x * x, axis=1))
    size = tl.where(size < 1e-12, 1e-12, size)  # NaN stays, which tl.maximum would drop
    gamma = tl.load(gamma_ptr + channel, mask=channel < channels, other=0.0).to(tl.float32)
    x = x * (channels**0.5 / size)[:, None] * gamma[None, :]
    if silu:
        x = x / (1.0 + tl.exp(-x))
    written = pixel.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(out_ptr + written, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _sum_kernel(
    x_ptr,
    bias_ptr,
    other_ptr,
    out_ptr,
    pixels,
    area,
    width,
    x_item,
    x_row,
    other_item,
    other_row,
    channels: tl.constexpr,
    block: tl.constexpr,
    each: tl.constexpr,
    doubled: tl.constexpr,
    shared: tl.constexpr,
    last: tl.constexpr,
):
    """As `flat.add`, of a pixel of `out`; `shared` is what shares a channel of `other`."""
    pixel = tl.program_id(0) * each + tl.arange(0, each)
    channel = tl.arange(0, block)
    inside = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    item, row, column = pixel // area, pixel % area // width, pixel % width
    written = pixel.to(tl.int64)[:, None] * channels + channel[None, :]
    if doubled:
        down, across = row % 2, column % 2
        part = (2 * down + across)[:, None]
        place = item * x_item + (row // 2 + down) * x_row + column // 2 + across
        read = place.to(tl.int64)[:, None] * (4 * channels) + part * channels + channel[None, :]
        row, column = row // 2, column // 2
        other_channel = (channel[None, :] * (4 * last + 4) + 4 * last + part) // shared
    else:
        place = item * x_item + row * x_row + column
        read = place.to(tl.int64)[:, None] * channels + channel[None, :]
        other_channel = channel[None, :]
    x = tl.load(x_ptr + read, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + channel, mask=channel < channels, other=0.0)
    x += bias.to(tl.float32)[None, :]
    if other_ptr is not None:
        place = item * other_item + row * other_row + column
        others: tl.constexpr = 4 * (last + 1) * channels // shared if doubled else channels
        read = place.to(tl.int64)[:, None] * others + other_channel
        x += tl.load(other_ptr + read, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + written, x.to(out_ptr.dtype.element_ty), mask=inside)


def norm(
    x: Tensor,
    gamma: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """As `flat.norm`."""
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=LAST)
    return _launch(_norm_kernel, (x, gamma, bias, out), (x,), silu=silu)


def add(x: Tensor, bias: Tensor, other: Tensor | None, out: Tensor, frames: int = 1) -> Tensor:
    """As `flat.add`."""
    channels = out.shape[1]
    shared = 4 * frames * channels // (channels if other is None else other.shape[1])
    how = {"doubled": x.shape[1] > channels, "shared": shared, "last": frames - 1}
    return _launch(_sum_kernel, (x, bias, other, out), (x, other), **how)


# {kernel, sizes and kinds of tensors: its launch}, which saves the processor two thirds of each.
_PREPARED: dict[tuple, PreparedLaunch] = remembered({})
MOST_PREPARED = 2048  # some forty for each size of an image


def _launch(
    kernel: triton.JITFunction,
    tensors: tuple[Tensor | None, ...],
    strided: tuple[Tensor | None, ...],
    **constants: int,
) -> Tensor:
    """One program for so many pixels of the last tensor, which lie side by side."""
    out = tensors[-1]
    items, channels, height, width = out.shape
    sizes = [items * height * width, height * width, width]
    for x in strided:
        sizes += (0, 0) if x is None else (x.stride(0) // x.shape[1], x.stride(2) // x.shape[1])
    kinds = (x if x is None else x.dtype for x in tensors)
    key = kernel, channels, out.get_device(), *sizes, *kinds, *constants.values()
    with on_card_of(out):
        if (launch := _PREPARED.get(key)) is None:
            block = 1 << (channels - 1).bit_length()
            each = max(1, BLOCK // block)
            constants = {"channels": channels, "block": block, "each": each, **constants}
            programs = -(-sizes[0] // each)
            if len(_PREPARED) >= MOST_PREPARED:
                _PREPARED.clear()
            made = Launch(kernel, programs, tensors, sizes, constants, num_warps=WARPS)
            launch = _PREPARED[key] = made.prepared()
        launch(*tensors)
    return out
