"""Units, number formats, and the cards that multiply them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MIB, GIB = 2**20, 2**30
GB = 10**9  # as disks, files and downloads are sold
METADATA_KEY = "qwen_l40s"  # of what this package writes into safetensors files and images


def format_gib(count: float) -> str:
    """Writes a size of memory or of a file: `38.1 GiB`, `12 MiB`."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / MIB:.0f} MiB"


BYTES_PER_WEIGHT = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "int8": 1}
QUANTIZED = ("fp8", "int8")
MULTIPLIED = ("bf16", *QUANTIZED)  # the precisions that a transformer computes its products in
BYTES_PER_SCALE = 4  # fp32, one for each output row
# Largest magnitude of e4m3, and of int8 used symmetrically.
LARGEST = {"fp8": 448.0, "int8": 127.0}
# Of a row of weights: for less than any model has, the scale would be subnormal.
SMALLEST_SCALE = 1e-30


class RowFormat(NamedTuple):
    """Tells how the rows of a matrix are quantized, each by its own largest magnitude.

    Attributes:
        storage: "fp8" or "int8".
        rotation: Before that, so many columns at a time are multiplied by a Hadamard matrix, as
            ConvRot does: a power of 4, or 0 for none.
    """

    storage: str
    rotation: int = 0

    def __str__(self) -> str:
        return f"{self.storage} rotated by {self.rotation}" if self.rotation else self.storage


def is_rotation(size: object, columns: int) -> bool:
    """Tells whether so many columns can be rotated in groups of `size`, a power of 4."""
    if type(size) is not int or size < 4 or columns % size:
        return False
    return size & (size - 1) == 0 and size.bit_length() % 2 == 1


# The oldest compute capability whose tensor cores multiply the format here.
OLDEST_CAPABILITY = {"fp8": (8, 9), "int8": (8, 0)}
# Those of older cards do not multiply bf16 either; ComfyUI computes in fp32 there.
OLDEST_BF16 = (8, 0)


@dataclass(frozen=True)
class CardFacts:
    """Holds what a choice needs to know of one card.

    Args:
        name: as the driver calls it.
        total_bytes: what CUDA shows, with ECC's share already gone: 45,373 MiB on an L40S.
        capability: compute capability, (8, 9) on an L40S.
    """

    name: str
    total_bytes: int
    capability: tuple[int, int]

    def multiplies(self, precision: str) -> bool:
        """Tells whether its tensor cores multiply a precision."""
        return self.capability >= OLDEST_CAPABILITY.get(precision, (0, 0))

    @property
    def computes_in(self) -> str:
        """Names what ComfyUI computes bf16 weights in."""
        return "bf16" if self.capability >= OLDEST_BF16 else "fp32"


def sm(capability: tuple[int, int]) -> str:
    """Writes a compute capability as NVIDIA does: sm_89."""
    return f"sm_{capability[0]}{capability[1]}"
