"""A small one with random weights, and a LoRA for it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from .family import ToyShape

SHAPE = ToyShape(
    blocks=2, dim=128, heads=4, head_dim=32, joint_dim=64, in_channels=64, packed_out_channels=64
)
Tensors = dict[str, torch.Tensor]


def weights() -> Tensors:
    """At which activations stay around 1."""
    generator = torch.Generator().manual_seed(0)
    found: Tensors = {}
    for name, size in SHAPE.tensors().items():
        weight = torch.randn(size, generator=generator)
        weight *= 0.7 / size[1] ** 0.5 if len(size) == 2 else 0.02
        found[name] = (weight + (len(size) == 1)).bfloat16()
    return found


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights(), path)
    return path


def write_lora(path: Path, rank: int = 4) -> Path:
    """Writes a LoRA for all layers of its blocks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    found: Tensors = {}
    for layer, (rows, columns) in SHAPE.quantizable_layers().items():
        name = f"diffusion_model.{layer}"
        found[f"{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * 0.3
        found[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.3
    save_file(found, path)
    return path
