"""Says what the parts of a file are, and what its name says."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..families.lora import lora
from ..families.protocol import Identity, Tensors
from ..families.registry import identify_part
from .header import TensorInfo

# Prefixes of the parts of a full checkpoint, and the name of the part. A file may also hold one
# part under its prefix.
PARTS = (
    (re.compile(r"(model\.)?diffusion_model\."), "diffusion model"),
    (re.compile(r"transformer\.(?!resblocks\.)"), "diffusion model"),
    (re.compile(r"(vae|first_stage_model)\."), "vae"),
    (re.compile(r"text_encoders?\.([^.]+\.transformer\.)?"), "text encoder"),
    (re.compile(r"(cond_stage_model|conditioner)\."), "text encoder"),
)
HINTS = ("2512", "2511", "2509", "layered", "edit", "turbo")


@dataclass(frozen=True)
class Slice:
    """Holds one part of a file, where a tensor's name is `prefix` and its name in `tensors`."""

    name: str
    prefix: str
    tensors: Tensors


def identify(tensors: Tensors) -> Identity:
    """Returns what the tensors of one part are; an answer always comes, if only that it is not
    Qwen-Image.
    """
    return lora(tensors) or identify_part(tensors)


def split_parts(tensors: Tensors) -> list[Slice]:
    """Separates a full checkpoint into its parts.

    An adapter is one part: its prefixes tell the key style. Tensors without a known prefix form the
    part "weights".
    """
    if lora(tensors) is not None:
        return [Slice("weights", "", tensors)]
    parts: dict[tuple[str, str], dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        part, prefix = _part_of(name)
        parts.setdefault((part, prefix), {})[name.removeprefix(prefix)] = info
    return [Slice(*key, own) for key, own in parts.items()] or [Slice("weights", "", {})]


def _part_of(name: str) -> tuple[str, str]:
    for pattern, part in PARTS:
        if match := pattern.match(name):
            return part, match[0]
    return "weights", ""


def file_name_hint(stem: str) -> str | None:
    """Returns what a file's name says about the variant, worded so that it is not taken for
    evidence.
    """
    words = [word for word in HINTS if word in stem.lower()]
    return (
        f"the file name says {' '.join(words)}, which nothing in the file confirms"
        if words
        else None
    )
