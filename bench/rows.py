"""The rows of `qwen-l40s bench`: what each one runs, at which sizes, and how much work that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SettingError
from ..planning.times import TEXT_LAYERS, Work
from ..spec.formats import BYTES_PER_SCALE, QUANTIZED
from ..spec.transformer import (
    BLOCK_GEMMS,
    PIXELS_PER_TOKEN_SIDE,
    REFERENCE_TOKENS,
    TransformerShape,
)

if TYPE_CHECKING:
    import torch

COMFYUI, DIFFUSERS = "ComfyUI", "diffusers"


@dataclass(frozen=True)
class Row:
    """Describes a program in one precision.

    Args:
        name: as results call it; program and precision are its first words.
        attention: as the node Optimize takes it, of "ours".
        loras: how many of rank 64 are beside all layers of attention and MLP.
        needs_card: whether it has nothing to run on a CPU.
    """

    name: str
    attention: str = "auto"
    loras: int = 0
    needs_card: bool = False

    @property
    def host(self) -> str:
        return DIFFUSERS if DIFFUSERS in self.name else COMFYUI

    @property
    def ours(self) -> bool:
        """Whether it is this package that computes."""
        return self.name.startswith("ours")

    @property
    def precision(self) -> str:
        return self.name.replace(",", "").split()[1]

    @property
    def weights(self) -> str:
        """Which random model it needs: "bf16", of all programs, or such as "comfyui fp8". Rows of
        one model stand together, so that it is built once and its rows are timed by turns.
        """
        plain = " plain" if self.name.endswith("plain") else ""
        of_all = self.precision == "bf16"
        return self.precision if of_all else f"{self.name.split()[0]} {self.precision}{plain}"


BASELINE = "comfyui bf16"
FORWARD = (
    Row(BASELINE),
    Row("ours bf16"),
    Row("ours bf16, 1 LoRA", loras=1),
    Row("ours bf16, 3 LoRAs", loras=3),
    Row("diffusers bf16 eager"),
    Row("ours bf16 in diffusers"),
    Row("diffusers bf16 compiled", needs_card=True),
    Row("comfyui fp8"),
    Row("ours fp8"),
    Row("ours fp8, 1 LoRA", loras=1),
    Row("ours fp8, 3 LoRAs", loras=3),
    Row("comfyui int8"),
    Row("ours int8 plain"),
    Row("ours int8"),
    Row("ours int8, attention int8", "int8"),
    Row("ours int8, attention int8_fp8", "int8_fp8"),
    # The best exact attention of an L40S.
    Row("ours int8, attention sdpa_flash", "sdpa_flash", needs_card=True),
    Row("ours int8, 1 LoRA", loras=1),
    Row("ours int8, 3 LoRAs", loras=3),
)
# Of prompts in a server.
IMAGE = tuple(
    row for row in FORWARD if row.name in (BASELINE, "ours bf16", "ours fp8", "ours int8")
)


def select(names: Sequence[str], patterns: Sequence[str]) -> tuple[str, ...]:
    """Picks the names that any pattern matches; all without patterns.

    Raises:
        SettingError: A pattern matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise SettingError(
                f"--only {pattern!r} names no row: choose from {', '.join(map(repr, names))}, or "
                "a pattern such as 'ours *'."
            )
    return tuple(
        name
        for name in names
        if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
    )


@dataclass(frozen=True)
class Inputs:
    """Describes what a forward pass is asked for.

    Args:
        width: pixels, as `height` divisible by 16.
        batch: images in one pass.
        text: text tokens of each.
        references: reference images of 1024x1024 of each; Edit-2511 modulates them as at timestep
            zero.
    """

    width: int
    height: int
    batch: int = 1
    text: int = 200
    references: int = 0

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height}"

    @property
    def image_tokens(self) -> int:
        return self.width // PIXELS_PER_TOKEN_SIDE * (self.height // PIXELS_PER_TOKEN_SIDE)

    @property
    def stream_tokens(self) -> int:
        """Counts one item's image stream, with the tokens of its references."""
        return self.image_tokens + self.references * REFERENCE_TOKENS


def rope_axes(head_dim: int) -> tuple[int, int, int]:
    """Splits a head into frame, height and width: 16, 56 and 56 of the published 128."""
    frame = head_dim // 8
    side = (head_dim - frame) // 2
    return frame, side, side


def forward_work(shape: TransformerShape, inputs: Inputs, precision: str = "bf16") -> Work:
    """Counts the blocks of one forward pass.

    Each product and attention reads its inputs and weights once and writes its output once, in
    bf16 or, where the precision is fp8 or int8, reads one byte a value. What lies between them is
    not counted, and neither are the modulation's linears: their outputs depend on the timestep
    alone and can be kept.
    """
    size = 1 if precision in QUANTIZED else 2
    flops = moved = 0
    for name, (rows, columns) in BLOCK_GEMMS.items():
        n, k = rows * shape.dim, columns * shape.dim
        tokens = inputs.text if name.startswith(TEXT_LAYERS) else inputs.stream_tokens
        m = inputs.batch * tokens
        flops += 2 * m * n * k
        moved += (n * k + m * k) * size + 2 * m * n
        moved += BYTES_PER_SCALE * (n + m) if precision in QUANTIZED else 0
    joint = inputs.text + inputs.stream_tokens
    flops += 4 * inputs.batch * joint * joint * shape.dim
    moved += 4 * 2 * inputs.batch * joint * shape.dim
    return Work(shape.blocks * flops, shape.blocks * moved)


@dataclass(frozen=True)
class BenchSetup:
    """Holds what a run measures, as the options of `bench` name it.

    Args:
        rows: the programs, in the order of `FORWARD`; none of `ops`.
        names: of the operations of `ops`.
    """

    device: torch.device
    shape: TransformerShape
    rows: tuple[Row, ...]
    names: tuple[str, ...]
    inputs: tuple[Inputs, ...]
    warm_up: int
    repeats: int
    steps: int
    debug: bool
    models: Path | None
    free_gib: float | None
    server_args: tuple[str, ...]

    @property
    def edit(self) -> bool:
        return self.inputs[0].references > 0
