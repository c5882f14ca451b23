"""Random weights of any size, for measurements of speed: no checkpoint has to be there.

Activations stay finite through 60 blocks. A tensor depends on its name and its device alone, not on
its neighbours, so that a quantized model can be made tensor by tensor from the same weights.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import torch

from ..loaders.convert import expected_tensors
from ..loaders.quantize import layers_to_quantize
from ..spec import TransformerShape


def random_tensors(
    shape: TransformerShape, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor in bf16) of every parameter of a transformer."""
    for name, size in expected_tensors(shape).items():
        yield name, random_tensor(name, size, device)


def random_tensor(name: str, size: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Normal values with a deviation of 0.5 / sqrt(K) for a weight [N, K, ...] and of 0.02 for a
    bias; ones for the weight of a norm.
    """
    tensor = torch.empty(size, dtype=torch.bfloat16, device=device)
    if len(size) < 2 and name.endswith(".weight"):
        return tensor.fill_(1.0)
    deviation = 0.5 / math.sqrt(math.prod(size[1:])) if len(size) > 1 else 0.02
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return tensor.normal_(0.0, deviation, generator=generator)


def quantizable_weights(shape: TransformerShape) -> frozenset[str]:
    """Names of the weights that fp8 and int8 models hold quantized."""
    weights = (name for name in expected_tensors(shape) if name.endswith(".weight"))
    layers = layers_to_quantize(name.removesuffix(".weight") for name in weights)
    return frozenset(f"{layer}.weight" for layer in layers)
