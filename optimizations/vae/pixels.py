"""What stands between a VAE's convolutions of one image: Triton on a card, plain torch without.

Tensors are (B, C, H, W) with channels last. The functions here define what the kernels of the same
names in `kernels/vae_pixels.py` compute; they take as little memory.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import kernels
from ..fallback import Fallback
from ..fused import choose_ops


def choose_pixel_ops(device: torch.device) -> ModuleType:
    """The kernels where they run, which the trial of the blocks' kernels tells; or this file."""
    on_processor = device.type == "cpu" and not kernels.interpreted()
    if on_processor or isinstance(choose_ops(device), Fallback):
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
    """Each pixel over its length, times sqrt(C) gamma, and SiLU.

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
    """x + bias + other into `out`, which is dense and may be x.

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
