"""What a detector says about a set of tensors, and the small questions that detectors ask of names
and shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .safetensors_header import TensorInfo

Tensors = Mapping[str, TensorInfo]


@dataclass(frozen=True)
class Identity:
    """What a set of tensors is.

    Args:
        family: the name people know it by, such as "Qwen-Image-Edit-2511" or "not Qwen-Image: looks
            like FLUX".
        role: transformer, text_encoder, vision_tower, vae, tiny_vae, lora, controlnet, model_patch
            or other.
        variant: what the tensors leave open, or which of several forms it is.
        dims: sizes read from the tensors, by name.
        blocks: number of blocks or layers, where the model is a stack of them.
        folder: the folder under ComfyUI's `models/` that it belongs in.
        cannot_run: sentences about what this package cannot run.
    """

    family: str
    role: str
    variant: str | None = None
    dims: Mapping[str, int | str] = field(default_factory=dict)
    blocks: int | None = None
    folder: str | None = None
    cannot_run: tuple[str, ...] = ()


def size(tensors: Tensors, name: str, axis: int = 0) -> int | None:
    """Returns the length of one axis, or None when the tensor is absent or has fewer axes."""
    info = tensors.get(name)
    return info.shape[axis] if info is not None and len(info.shape) > axis else None


def known(**dims: int | str | None) -> dict[str, int | str]:
    """Drops the dims that the tensors do not tell."""
    return {name: value for name, value in dims.items() if value is not None}


def count_blocks(names: Iterable[str], prefix: str) -> int:
    """Counts the different numbers N in names that begin `<prefix>N.`"""
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
    return len({match[1] for match in map(pattern.match, names) if match})
