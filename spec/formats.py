"""Defines units, number formats, and the cards that multiply them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

MIB, GIB = 2**20, 2**30
GB = 10**9  # as disks, files and downloads are sold
METADATA_KEY = "qwen_l40s"  # of what this package writes into safetensors files and images


def format_gib(count: float) -> str:
    """Writes a size of memory or of a file: `38.1 GiB`, `12 MiB`."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / MIB:.0f} MiB"


class Format(NamedTuple):
    """Holds what is known of weights in 8 bits with a scale for each row."""

    dtype: str  # torch's name of what holds the values
    largest: float  # magnitude that a row's own becomes: of e4m3, and of int8 used symmetrically
    # so many columns are rotated together before, the first that divides them
    rotations: tuple[int, ...]
    oldest: tuple[int, int]  # compute capability whose tensor cores multiply it here
    # what multiplies it, and the multiple that N and K must be of: other layers fall to
    # `dequantize`
    gemms: Mapping[str, int]
    marker: str  # what `.comfy_quant` calls it
    layout: str  # ComfyUI's class of such a weight
    # its classes with one scale for the weight, which is that of every row too
    one_scale: tuple[str, ...] = ()
    packed: str = ""  # its class of codes in 4 or 6 bits that stand for such values


FORMATS = {
    "fp8": Format(
        dtype="float8_e4m3fn",
        largest=448.0,
        rotations=(),
        oldest=(8, 9),
        gemms={"scaled_mm": 16, "scaled_mm_fast": 16, "triton": 1, "dequantize": 1},
        # Core ComfyUI has no fp8 with one scale a row: it refuses our name instead of computing
        # with one scale.
        marker="float8_e4m3fn_rowwise",
        layout="QwenL40S_FP8Rows",
        one_scale=("TensorCoreFP8E4M3Layout", "TensorCoreFP8Layout"),
    ),
    "int8": Format(
        dtype="int8",
        largest=127.0,
        rotations=(256, 64),  # ComfyUI's own files have 256
        oldest=(8, 0),
        gemms={"kitchen": 16, "triton": 1, "int_mm": 8, "dequantize": 1},
        marker="int8_tensorwise",
        layout="TensorWiseINT8Layout",
        packed="AsymW4A8Int8Layout",
    ),
}
QUANTIZED = tuple(FORMATS)
MULTIPLIED = ("bf16", *QUANTIZED)  # the precisions that a transformer computes its products in
BYTES_PER_WEIGHT = {"bf16": 2, "fp16": 2, "fp32": 4, **dict.fromkeys(QUANTIZED, 1)}
BYTES_PER_SCALE = 4  # fp32, one for each output row
# Attention in 8 bits, which multiplies int8: the backend of comfy-kitchen.
KITCHEN_INT8 = "kitchen_int8"
# Of a row of weights: for less than any model has, the scale would be subnormal.
SMALLEST_SCALE = 1e-30


class RowFormat(NamedTuple):
    """Tells how the rows of a matrix are quantized, each by its own largest magnitude."""

    storage: str  # a key of `FORMATS`
    # before that, so many columns at a time are multiplied by a Hadamard matrix, as ConvRot does: a
    # power of 4, or 0 for none
    rotation: int = 0

    def __str__(self) -> str:
        return f"{self.storage} rotated by {self.rotation}" if self.rotation else self.storage


def is_rotation(size: object, columns: int) -> bool:
    """Tells whether so many columns can be rotated in groups of `size`, a power of 4."""
    if type(size) is not int or size < 4 or columns % size:
        return False
    return size & (size - 1) == 0 and size.bit_length() % 2 == 1


# The tensor cores of older cards do not multiply bf16 either; ComfyUI computes in fp32 there.
OLDEST_BF16 = (8, 0)


def multiplies_bf16(capability: tuple[int, int]) -> bool:
    return capability >= OLDEST_BF16


@dataclass(frozen=True)
class CardFacts:
    """Holds what a choice needs to know of one card."""

    name: str  # as the driver calls it
    total_bytes: int  # what CUDA shows, with ECC's share already gone: 45,373 MiB on an L40S
    capability: tuple[int, int]  # compute capability, (8, 9) on an L40S
    limit_watts: int = 0  # the power limit that the driver has set; 0 where nobody asked
    # why this machine's software does not run int8 products on it; empty where it does, and for a
    # card of another machine
    no_int8: str = ""

    def multiplies(self, precision: str) -> bool:
        """Tells whether its tensor cores multiply a precision."""
        return precision not in FORMATS or self.capability >= FORMATS[precision].oldest

    def runs(self, precision: str) -> bool:
        """Tells whether products in a precision run: by the tensor cores and by the software."""
        return self.multiplies(precision) and not (precision == "int8" and self.no_int8)

    @property
    def computes_in(self) -> str:
        """Names what ComfyUI computes bf16 weights in."""
        return "bf16" if multiplies_bf16(self.capability) else "fp32"

    def splits(self, precision: str) -> bool:
        """Tells whether text encoders in a precision multiply bf16x2 by default."""
        return multiplies_bf16(self.capability) and precision in MULTIPLIED


def sm(capability: tuple[int, int]) -> str:
    """Writes a compute capability as NVIDIA does: sm_89."""
    return f"sm_{capability[0]}{capability[1]}"
