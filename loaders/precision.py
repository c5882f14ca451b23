"""Which precision the weights are computed in, and the reason in words."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SettingError

BYTES_PER_WEIGHT = {"bf16": 2, "fp32": 4, "fp8": 1, "int8": 1}
PRECISIONS = ("auto", *BYTES_PER_WEIGHT)


@dataclass(frozen=True)
class PrecisionChoice:
    """A precision by name (`bf16`, `fp32`, `fp8` or `int8`) and why it was chosen."""

    name: str
    reason: str


def choose_precision(
    requested: str, device: str, *, parameters: int, available_bytes: int
) -> PrecisionChoice:
    """Resolves `auto`; any other known name is taken as it is.

    Args:
        requested: one of `PRECISIONS`.
        device: where the model runs, such as `cpu` or `cuda:0`.
        parameters: number of weights of all parts together.
        available_bytes: memory that can be had on `device` now.

    Raises:
        SettingError: `requested` is no known name.
    """
    if requested not in PRECISIONS:
        raise SettingError(f"precision {requested!r} is unknown: choose {', '.join(PRECISIONS)}.")
    if requested != "auto":
        return PrecisionChoice(requested, "requested")
    if device != "cpu":
        return PrecisionChoice(
            "bf16", f"auto on {device}: the precision that the model was trained in"
        )
    fp32_bytes = parameters * BYTES_PER_WEIGHT["fp32"]
    sizes = f"{format_bytes(fp32_bytes)} in fp32, {format_bytes(available_bytes)} available"
    if fp32_bytes <= available_bytes / 2:
        return PrecisionChoice("fp32", f"auto on cpu: fits in half of the memory ({sizes})")
    return PrecisionChoice(
        "bf16", f"auto on cpu: fp32 would take more than half of the memory ({sizes})"
    )


def format_bytes(count: float) -> str:
    """Decimal units, as disks and cards are labelled: `57.7 GB`, `12 MB`."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
