"""The rows that `qwen-l40s bench` can measure, and which of them a run asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..errors import SettingError

COMFYUI, DIFFUSERS = "ComfyUI", "diffusers"


@dataclass(frozen=True)
class Row:
    """One program in one precision.

    Args:
        name: as results call it.
        host: whose module runs: ComfyUI or diffusers.
        weights: which random model it needs, such as "bf16" or "comfyui fp8". Rows of one model
            stand together, and so the model is built once.
        variant: what is done to the model, a name that the host's code knows.
        precision: bf16, fp8 or int8.
        needs_card: whether it has nothing to run on a CPU.
        step: the technique that it adds to the row before it in the waterfall.
    """

    name: str
    host: str
    weights: str
    variant: str
    precision: str = "bf16"
    needs_card: bool = False
    step: str = ""


BASELINE = "comfyui bf16"
TABLE = "ours bf16 table build"
FORWARD = (
    Row(BASELINE, COMFYUI, "bf16", "stock", step="stock ComfyUI, bf16"),
    Row("comfyui bf16 cudnn", COMFYUI, "bf16", "stock_cudnn", needs_card=True),
    Row("ours bf16 attention", COMFYUI, "bf16", "attention", step="+ attention choice"),
    Row("ours bf16 blocks", COMFYUI, "bf16", "unscheduled", step="+ fused blocks"),
    Row("ours bf16", COMFYUI, "bf16", "ours", step="+ modulation tables"),
    Row(TABLE, COMFYUI, "bf16", "table"),
    Row("diffusers bf16 eager", DIFFUSERS, "bf16", "eager"),
    Row("ours bf16 in diffusers", DIFFUSERS, "bf16", "ours"),
    Row("diffusers bf16 compiled", DIFFUSERS, "bf16", "compiled", needs_card=True),
    Row("comfyui fp8", COMFYUI, "comfyui fp8", "stock", "fp8"),
    Row("ours fp8", COMFYUI, "ours fp8", "ours", "fp8", step="+ fp8"),
    Row("comfyui int8", COMFYUI, "comfyui int8", "stock", "int8"),
    Row("ours int8", COMFYUI, "ours int8", "ours", "int8", step="or int8"),
)
BLOCK = tuple(row for row in FORWARD if row.name != TABLE)
IMAGE = tuple(row for row in FORWARD if row.host == COMFYUI and row.variant in ("stock", "ours"))


def select(rows: Sequence[Row], patterns: Sequence[str]) -> tuple[Row, ...]:
    """The rows that any pattern names; all without patterns.

    Raises:
        SettingError: A pattern names none.
    """
    names = select_names([row.name for row in rows], patterns)
    return tuple(row for row in rows if row.name in names)


def select_names(names: Sequence[str], patterns: Sequence[str]) -> tuple[str, ...]:
    """As `select`, of plain names."""
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
