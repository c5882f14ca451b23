"""What every program of a benchmark is given and gives: tensors, random weights, and the pass."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .measure import Fields
from .rows import Inputs


class InputTensors(NamedTuple):
    """Holds what is handed to a program, on its device.

    Attributes:
        latents: (batch, channels, 1, height / 8, width / 8), fp32.
        text: (batch, text tokens, joint_dim), bf16.
        references: Of each reference image (batch, channels, 1, 128, 128), bf16.
        sigmas: The timesteps of a schedule, each (batch,), fp32.
    """

    inputs: Inputs
    latents: torch.Tensor
    text: torch.Tensor
    references: tuple[torch.Tensor, ...]
    sigmas: tuple[torch.Tensor, ...]


class ForwardProgram(NamedTuple):
    """Holds the pass at a timestep (batch,); the module that reads the image stream after the
    last block; and what says afterwards which code ran.
    """

    call: Callable[[torch.Tensor], Any]
    norm_out: torch.nn.Module
    paths: Callable[[], str] = str


# What a row of results has, and the image stream after the last block (batch, tokens, D).
Measured = tuple[Fields, torch.Tensor | None]
Body = Callable[[ForwardProgram], Measured]


def random_tensor(name: str, size: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Draws bf16: deviation 0.5 / sqrt(K) for weights [N, K, ...], 0.02 for biases; norms are 1.

    By name and device alone, so that a quantized model can be made tensor by tensor. Activations
    stay finite through 60 blocks.
    """
    tensor = torch.empty(size, dtype=torch.bfloat16, device=device)
    fan_in = math.prod(size[1:])
    if name.endswith("bias"):
        deviation = 0.02
    elif fan_in == 1:
        return tensor.fill_(1.0)
    else:
        deviation = 0.5 / math.sqrt(fan_in)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return tensor.normal_(0.0, deviation, generator=generator)
