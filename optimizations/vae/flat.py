"""Computes parts of a VAE's layers on one image, in 2 dimensions and with channels last, as cuDNN
computes a convolution where it lies; a causal 3-D one is a 2-D one with the last frame of its
kernel.

`norm` and `add` are Triton kernels on a card, and the functions here define what these compute.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from ...spec.vae import SCORES_TOGETHER, STRIP
from ...verdict import Verdict
from ..fused import TORCH, choose_ops

# Items, rows, the rows that they are computed from, and where among those they are.
Strip = tuple[slice, slice, slice, slice]


def channels_last(x: Tensor) -> Tensor:
    """Gives x itself, which may be rows and columns of a whole, where its channels come last."""
    if x.stride(1) == 1 and (x.shape[3] == 1 or x.stride(3) == x.shape[1]):
        return x
    return x.contiguous(memory_format=torch.channels_last)


def empty(x: Tensor, channels: int, height: int, width: int) -> Tensor:
    shape, to = (len(x), channels, height, width), torch.channels_last
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=to)


def strips(x: Tensor, channels: int, margin: int) -> Iterator[Strip]:
    """Cuts x into rows of one item after another, which read `margin` more, unless it is small."""
    items, given, height, width = x.shape
    most = max(given, channels)
    if items * most * height * width <= STRIP:
        whole = slice(0, height)
        yield slice(None), whole, whole, whole
        return
    count = -(-height // max(1, STRIP // (most * width)))
    rows = -(-height // count)  # of strips as high as one another
    for item in range(items):
        for low in range(0, height, rows):
            high, start = min(height, low + rows), max(0, low - margin)
            read = slice(start, min(height, high + margin))
            yield slice(item, item + 1), slice(low, high), read, slice(low - start, high - start)


def convolve(x: Tensor, weight: Tensor, stride: int = 1, padding: int | None = None) -> Tensor:
    """Convolves without the bias, which keeps the size by default."""
    padding = weight.shape[-1] // 2 if padding is None else padding
    return channels_last(F.conv2d(channels_last(x), weight, None, stride, padding))


def doubled(weight: Tensor) -> Tensor:
    """Makes a weight, (4 out, in, 2, 2), for an image before it is enlarged to twice the size. It
    gives what this weight, (out, in, 3, 3), gives of the enlarged image.
    """
    sums = weight.float()
    for axis in (2, 3):
        # Row 0 of an image of twice the size reads rows -1, 0 and 0; row 1 reads 0, 0 and 1.
        first, middle, last = sums.split(1, axis)
        sums = torch.cat((first, middle + last, first + middle, last), axis)
    out = weight.new_empty((2, 2, len(weight), 2, 2, weight.shape[1]))
    out.copy_(sums.unflatten(3, (2, 2)).unflatten(2, (2, 2)).permute(2, 4, 0, 3, 5, 1))
    return out.view(-1, *out.shape[3:]).permute(0, 3, 1, 2)


def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attends with one head, (1, 1, pixels, channels) each, in slices.

    Its head is as wide as the middle; cards' fused attention takes none of more than 256.
    """
    query, keys, values = (x[0, 0] for x in (query, keys, values))
    out, count = torch.empty_like(query), len(keys)
    # Rows of scores then begin at 16 bytes each, or tensor cores read them a number at a time.
    if more := -count % SCORES_TOGETHER:
        keys, values = (F.pad(x, (0, 0, 0, more)) for x in (keys, values))
    rows = min(len(query), max(1, STRIP // len(keys)))
    scores = query.new_empty(rows, len(keys))
    for low in range(0, len(query), rows):
        some = query[low : low + rows]
        part = scores[: len(some)]
        torch.addmm(part, some, keys.t(), beta=0, alpha=query.shape[1] ** -0.5, out=part)
        part[:, count:] = -torch.inf
        torch.mm(part.softmax(-1), values, out=out[low : low + rows])
    return out[None, None]


def choose_pixel_ops(device: torch.device) -> ModuleType:
    """Chooses the kernels where the trial of the blocks' kernels says they run; or this module."""
    ops = choose_ops(device)
    if ops is TORCH or isinstance(ops, Verdict):
        return sys.modules[__name__]
    from ..kernels import vae_pixels

    return vae_pixels


def norm(
    x: Tensor,
    gamma: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Divides each pixel by its length, times sqrt(C) gamma, and applies SiLU.

    Args:
        bias: added before; x is then `out`.
        out: like x and dense; x itself, or None for a new one.
    """
    if bias is not None:
        x = x.add_(bias.view(-1, 1, 1))
    out = torch.empty_like(x) if out is None else out
    # In fp32, and rounded as they are written.
    length = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32)
    torch.div(x, length.clamp_min_(1e-12), out=out)
    out.mul_((gamma.float() * len(gamma) ** 0.5).view(-1, 1, 1))
    return F.silu(out, inplace=True) if silu else out


def add(x: Tensor, bias: Tensor, other: Tensor | None, out: Tensor, frames: int = 1) -> Tensor:
    """Writes x + bias + other into `out`, which is dense and may be x.

    Where x has four parts of C channels, an image of twice the size: part 2 a + b, for row 2 i + a
    and column 2 j + b of the output, is at row i + a and column j + b. Of `other` each pixel and
    channel is then repeated as Wan 2.2's VAE does it, which makes `frames` and keeps the last.
    """
    channels, bias = out.shape[1], bias.view(-1, 1, 1)
    if x.shape[1] == channels:
        torch.add(x, bias, out=out)
        return out if other is None else out.add_(other)
    height, width = (side // 2 for side in out.shape[-2:])
    for part in range(4):
        down, across = divmod(part, 2)
        own = x[:, part * channels :][:, :channels, down:, across:][..., :height, :width]
        to = torch.add(own, bias, out=out[..., down::2, across::2])
        if other is not None:
            index = torch.arange(channels, device=x.device) * 4 * frames + 4 * (frames - 1) + part
            to += other[:, index * other.shape[1] // (4 * frames * channels)]
    return out
