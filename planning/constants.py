"""The fitted numbers of the estimates: eight, all from what a card measured.

`benchmarks/fit.py` fits them on one half of the runs in `measured.json` and writes them there with
their errors on both halves; nothing else in an estimate is fitted.

Figures of the host and its link are no fits: each was measured once, on the host of an H200, and is
taken for every machine.

    timing.LAUNCH_SECONDS, timing.TABLE_LAYER_SECONDS   what the processor launches
    timing.STOCK                                        ComfyUI's own blocks beside the fused ones
    timing.TABLE_FACTOR, rates.MEASURED_LINK            what copies reach of the link
    vae_timing.HOST_BYTES_PER_SECOND                    copies that are not pinned
    vae_timing.TILE_STEP_SECONDS                        what a further tile launches and copies
    load_time.WHOLE_LOADS, load_time.QUANTIZING         files from memory to the card
    load_time.MAPPED, load_time.START                   files from a disk; ComfyUI's start

Predicted and not measured are encoder_timing.PROCESSOR_FLOPS, load_time.SOURCES, and the shares of
data sheets' peaks in `rates`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import UnavailableError

MEASURED = Path(__file__).with_name("measured.json")


@dataclass(frozen=True)
class Constants:
    """How much of a card's dense peaks the programs reach, and what memory cannot be counted.

    Attributes:
        gemm_bf16, gemm_fp8, gemm_int8: Of the precision's own peak.
        attention: Of the bf16 peak.
        bandwidth: Of the memory's.
        convolution: Of the bf16 peak, in the VAE.
        workspace: Bytes beside weights and activations while sampling.
        context: Bytes of the CUDA context, kernels and libraries.
    """

    gemm_bf16: float
    gemm_fp8: float
    gemm_int8: float
    attention: float
    bandwidth: float
    convolution: float
    workspace: float
    context: float

    def gemm(self, precision: str) -> float:
        """The share of a precision's peak."""
        return getattr(self, f"gemm_{precision}")


NAMES = tuple(field.name for field in fields(Constants))


@functools.cache
def measured() -> Mapping[str, Any]:
    """What is in `measured.json`: conditions, constants, their errors, runs and loads.

    Raises:
        UnavailableError: the file is not there or damaged.
    """
    try:
        found = json.loads(MEASURED.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise UnavailableError(
            f"{MEASURED.name}, on which estimates rest, cannot be read ({error}): install the "
            "package again."
        ) from error
    return found


@functools.cache
def constants() -> Constants:
    """The fitted constants.

    Raises:
        UnavailableError: as `measured`; or a constant is missing.
    """
    found = measured().get("constants", {})
    if missing := [name for name in NAMES if not _is_figure(found.get(name))]:
        raise UnavailableError(
            f"{MEASURED.name} has no constant {missing[0]}: install the package again, or run "
            "`python benchmarks/fit.py` in a clone."
        )
    return Constants(**{name: float(found[name]) for name in NAMES})


def _is_figure(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
