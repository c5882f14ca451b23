"""Writes GGUF files: of random blocks, of real weights, and broken ones."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import gguf
import numpy as np
import torch
from safetensors import safe_open

from qwen_l40s.loaders.gguf import BLOCK_TYPES

Metadata = Mapping[str, "str | int | list[str]"]


class Stored(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _entry(key: str, value: str | int | list[str]) -> bytes:
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, int):
        return text(key) + struct.pack("<II", 4, value)
    return text(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))


def header(tensors: Mapping[str, Stored], metadata: Metadata, version: int = 3) -> bytes:
    """Everything before the weights, without what aligns them."""
    alignment = int(metadata.get("general.alignment", 32))
    parts = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    parts += [_entry(key, value) for key, value in metadata.items()]
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        kind = gguf.GGMLQuantizationType[dtype]
        parts += [text(name), struct.pack("<I", len(shape))]
        parts += [
            struct.pack(f"<{len(shape)}Q", *reversed(shape)),
            struct.pack("<IQ", kind, offset),
        ]
        offset += -(-len(data) // alignment) * alignment
    return b"".join(parts)


def write_gguf(
    path: Path,
    tensors: Mapping[str, Stored],
    metadata: Metadata | None = MappingProxyType({}),
    version: int = 3,
) -> Path:
    """Writes a file of a Qwen-Image, or with `metadata` None of what it does not say."""
    named = {} if metadata is None else {"general.architecture": "qwen_image"}
    metadata = named | dict(metadata or {})
    alignment = int(metadata.get("general.alignment", 32))
    with path.open("wb") as file:
        file.write(header(tensors, metadata, version))
        for each in tensors.values():
            file.write(bytes(-file.tell() % alignment) + each.data)
        file.write(bytes(-file.tell() % alignment))
    return path


def random_blocks(dtype: str, count: int, seed: int = 0) -> np.ndarray:
    """Blocks whose bytes are random, the first all zeros, the second all ones."""
    block = BLOCK_TYPES[dtype]
    found = np.random.default_rng(seed).integers(0, 256, (count, block.bytes), dtype=np.uint8)
    found[0], found[1] = 0, 255
    return found


def blocks_of(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Stored:
    """A tensor of finite values below 1 in any type; F32 where its rows do not fit the blocks."""
    block = BLOCK_TYPES[dtype]
    count, rest = divmod(shape[-1], block.elements)
    if rest or block.elements == 1:
        plain = dtype if block.elements == 1 else "F32"
        values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) / 16
        data = gguf.quantize(values, gguf.GGMLQuantizationType[plain])
        return Stored(plain, shape, data.tobytes())
    blocks = random_blocks(dtype, 2 + count * math.prod(shape[:-1]), seed)[2:]
    # Whichever two bytes are a scale, as fp16 it is then below 0.0005.
    return Stored(dtype, shape, (blocks % 16).tobytes())


def stored(weight: torch.Tensor, dtype: str) -> Stored:
    """A weight in a type that gguf-py can write; a matrix whose rows do not fit stays in F32."""
    values = weight.float().numpy()
    if values.ndim != 2 or values.shape[1] % BLOCK_TYPES[dtype].elements:
        dtype = "F32"
    data = gguf.quantize(values, gguf.GGMLQuantizationType[dtype])
    return Stored(dtype, tuple(values.shape), data.tobytes())


def gguf_of(source: Path, path: Path, dtype: str = "Q8_0") -> Path:
    """The tensors of a safetensors file, matrices in `dtype`."""
    with safe_open(source, "pt") as file:
        tensors = {name: stored(file.get_tensor(name), dtype) for name in file.keys()}  # noqa: SIM118
    return write_gguf(path, tensors)
