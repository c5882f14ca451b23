"""Expands the blocks of GGUF's quantized types to fp32, bit for bit as gguf-py does.

Layouts and formulas: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/quants.py, and
ggml-common.h for the fields of a block.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..spec.formats import MIB
from .gguf import BLOCK_TYPES
from .header import Header

PIECE_BYTES = 32 * MIB  # that are expanded at a time; fp32 takes four to twelve times as much
NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python's mmap names since 3.13
Blocks = torch.Tensor  # (n, bytes of a block), uint8


PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class BlockRows:
    """Holds a matrix as a GGUF file does, and hands it to code that takes a weight a few rows at a
    time.
    """

    values: torch.Tensor  # [N, bytes of a row], uint8, may be mapped
    dtype: str  # a key of `EXPANDED`

    @property
    def shape(self) -> tuple[int, int]:
        rows, count = self.values.shape
        block = BLOCK_TYPES[self.dtype]
        return rows, count // block.bytes * block.elements

    def expand(self, values: torch.Tensor) -> torch.Tensor:
        """Returns rows of `values` [n, bytes of a row], on any device, as float32 [n, K]."""
        blocks = values.reshape(-1, BLOCK_TYPES[self.dtype].bytes)
        return EXPANDED[self.dtype](blocks).reshape(len(values), -1)

    def dequantized(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Returns the matrix in bf16 on the CPU, expanded on `device`, rounded once."""
        parts = [
            self.expand(part.to(device)).to(torch.bfloat16).cpu()
            for part in self.values.split(max(1, PIECE_BYTES // self.values.shape[1]))
        ]
        return torch.cat(parts)


def map_gguf(header: Header) -> dict[str, torch.Tensor | BlockRows]:
    """Maps the tensors of a file under their names; pages are read on use."""
    with open(header.path, "rb") as file:
        # A private copy, of which no page is made: torch warns of memory that must not be written.
        how: dict[str, Any] = {"access": mmap.ACCESS_COPY}
        if sys.platform == "linux":  # which else refuses one of more than the machine's memory
            how = {"flags": mmap.MAP_PRIVATE | NO_RESERVE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
        mapped = mmap.mmap(file.fileno(), 0, **how)
    tensors: dict[str, torch.Tensor | BlockRows] = {}
    for name, info in header.tensors.items():
        whole = torch.frombuffer(
            mapped, dtype=torch.uint8, count=info.nbytes, offset=header.data_start + info.start
        )
        if info.dtype in PLAIN:
            tensors[name] = whole.view(PLAIN[info.dtype]).view(info.shape)
        else:
            rows = BlockRows(whole.view(math.prod(info.shape[:-1]), -1), info.dtype)
            matrix = len(info.shape) == 2
            tensors[name] = rows if matrix else rows.dequantized().view(info.shape)
    return tensors


def _half(blocks: Blocks, at: int) -> torch.Tensor:
    # A slice of a block need not lie on an even byte.
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _bits(values: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """Takes `count` numbers of `width` bits of each byte, the lowest first, as a dimension before
    the last.
    """
    shifts = torch.arange(0, width * count, width, dtype=torch.uint8, device=values.device)
    return (values.unsqueeze(-2) >> shifts[:, None]) & ((1 << width) - 1)


def _fifth_bits(blocks: Blocks, at: int) -> torch.Tensor:
    bits = _bits(blocks[:, at : at + 4].unsqueeze(-1), 1, 8)  # (n, 4, 8, 1)
    return bits.flatten(1) << 4


def _nibbles(blocks: Blocks, at: int) -> torch.Tensor:
    return _bits(blocks[:, at : at + 16], 4, 2).flatten(1)


def _q4_0(blocks: Blocks) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks, 2).float() - 8)


def _q4_1(blocks: Blocks) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks, 4).float() + _half(blocks, 2)


def _q5_0(blocks: Blocks) -> torch.Tensor:
    values = _nibbles(blocks, 6) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (values.float() - 16)


def _q5_1(blocks: Blocks) -> torch.Tensor:
    values = _nibbles(blocks, 8) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * values.float() + _half(blocks, 2)


def _q8_0(blocks: Blocks) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)


def _q2_k(blocks: Blocks) -> torch.Tensor:
    scales = _bits(blocks[:, :16], 4, 2).float()
    values = _bits(blocks[:, 16:80].view(-1, 2, 32), 2, 4).reshape(-1, 16, 16).float()
    scale, least = _half(blocks, 80) * scales[:, 0], _half(blocks, 82) * scales[:, 1]
    return scale[..., None] * values - least[..., None]


def _q3_k(blocks: Blocks) -> torch.Tensor:
    low = _bits(blocks[:, 96:104], 4, 2).flatten(1)
    high = _bits(blocks[:, 104:108], 2, 4).flatten(1)
    scales = (low | high << 4).float() - 32
    # The third bit takes 4 away where it is 0.
    third = _bits(blocks[:, :32], 1, 8).reshape(-1, 16, 16).float()
    values = _bits(blocks[:, 32:96].view(-1, 2, 32), 2, 4).reshape(-1, 16, 16).float()
    return (_half(blocks, 108) * scales)[..., None] * (values - 4 * (1 - third))


def _scaled(blocks: Blocks, values: torch.Tensor) -> torch.Tensor:
    """Scales Q4_K's and Q5_K's values (n, 8, 32) by eight scales and minima of 6 bits each."""
    scale, least, both = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat([scale & 63, both & 15 | scale >> 2 & 48], 1).float()
    minima = torch.cat([least & 63, both >> 4 | least >> 2 & 48], 1).float()
    scales, minima = _half(blocks, 0) * scales, _half(blocks, 2) * minima
    return scales[..., None] * values.float() - minima[..., None]


def _q4_k(blocks: Blocks) -> torch.Tensor:
    return _scaled(blocks, _bits(blocks[:, 16:144].view(-1, 4, 32), 4, 2).reshape(-1, 8, 32))


def _q5_k(blocks: Blocks) -> torch.Tensor:
    low = _bits(blocks[:, 48:176].view(-1, 4, 32), 4, 2).reshape(-1, 8, 32)
    return _scaled(blocks, low | _bits(blocks[:, 16:48], 1, 8) << 4)


def _q6_k(blocks: Blocks) -> torch.Tensor:
    low = _bits(blocks[:, :128].view(-1, 2, 64), 4, 2).reshape(-1, 16, 16)
    high = _bits(blocks[:, 128:192].view(-1, 2, 32), 2, 4).reshape(-1, 16, 16)
    scales = blocks[:, 192:208].view(torch.int8).float() * _half(blocks, 208)
    return scales[..., None] * ((low | high << 4).float() - 32)


EXPANDED: dict[str, Callable[[Blocks], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
