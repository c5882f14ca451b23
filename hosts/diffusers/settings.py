"""Checks settings, precision and place of one generation before anything heavy is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import SettingError, UnavailableError
from ...families.registry import schedule_names
from ...planning.request import AUTO
from ...planning.step_cache import OFF, cache_settings
from ...spec.formats import BYTES_PER_WEIGHT, format_gib
from ..loading import check_known

OFFLOADS = ("auto", "none", "model")
SIZE_STEP = 16  # 8 from the VAE times 2 from the transformer's patches
MAX_SEED = 2**63 - 1
PIPELINE_PRECISIONS = (AUTO, "bf16", "fp32")


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """Checks the settings of one generation."""

    prompt: str
    negative_prompt: str = " "
    # width, height: pixels, divisible by 16
    width: int
    height: int
    # None for those of the schedule, else as many as a Turbo is trained for, or as of the family's
    # model card
    steps: int | None = None
    # classifier-free guidance scale; at most 1 switches it off and halves the work. None for the
    # pipeline's own: 4, and 1 of Qwen-Image-2.1 and of few-step schedules.
    cfg: float | None = None
    seed: int = 0  # image i of the batch starts from the noise of `seed + i`
    batch: int = 1
    cache: str = OFF  # the step cache, one of `step_cache.CHOICES`
    # one of `families.registry.schedule_names`; None for the folder's own
    schedule: str | None = None

    def __post_init__(self) -> None:
        _check_text("prompt", self.prompt)
        _check_text("negative_prompt", self.negative_prompt)
        _check_size("width", self.width)
        _check_size("height", self.height)
        if self.steps is not None:
            _check_count("steps", self.steps)
        _check_count("batch", self.batch)
        if not isinstance(self.seed, int) or not 0 <= self.seed <= MAX_SEED:
            raise SettingError(
                f"seed must be a whole number from 0 to 2**63 - 1, got {self.seed!r}."
            )
        cfg = 0 if self.cfg is None else self.cfg
        if not isinstance(cfg, int | float) or not math.isfinite(cfg) or cfg < 0:
            raise SettingError(
                f"cfg must be a finite number of at least 0, got {self.cfg!r}: use 4.0, or 1 to "
                "switch guidance off."
            )
        cache_settings(self.cache)
        if self.schedule is not None and self.schedule not in schedule_names():
            raise SettingError(
                f"schedule {self.schedule!r} is unknown: choose {', '.join(schedule_names())}."
            )


def _check_text(name: str, value: str) -> None:
    if not isinstance(value, str):
        raise SettingError(f"{name} must be one string, got {value!r}.")
    try:
        value.encode()
    except UnicodeEncodeError:
        # A terminal that is not UTF-8 hands over lone surrogates, which the tokenizer cannot take.
        raise SettingError(
            f"{name} is not valid Unicode, got {value!r}: type it in UTF-8."
        ) from None


def _check_size(name: str, value: int) -> None:
    if isinstance(value, int) and value >= SIZE_STEP and value % SIZE_STEP == 0:
        return
    rule = f"{name} must be a whole number of pixels divisible by {SIZE_STEP}, at least {SIZE_STEP}"
    nearest = (
        max(SIZE_STEP, SIZE_STEP * round(value / SIZE_STEP)) if isinstance(value, int) else 1024
    )
    raise SettingError(f"{rule}, got {value!r}: use {nearest}.")


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise SettingError(
            f"{name} must be a whole number of at least 1, got {value!r}: use 1 or more."
        )


@dataclass(frozen=True)
class OffloadChoice:
    """Names "none" or "model", as in `load_pipeline`, and says why."""

    name: str
    reason: str


def choose_offload(
    requested: str,
    *,
    what: str,
    device: str,
    weights: Mapping[str, int],
    work: int,
    free: int,
    host_free: int,
) -> OffloadChoice:
    """Resolves `auto`, and refuses weights that cannot fit.

    Args:
        what: the subject of a refusal, such as `models/Qwen-Image in bf16`.
        work: bytes that `auto` leaves free on a card for activations.
        free, host_free: bytes that can be had on the device and in system RAM now.
    """
    if requested not in OFFLOADS:
        raise SettingError(f"offload {requested!r} is unknown: choose {', '.join(OFFLOADS)}.")
    total, largest = sum(weights.values()), max(weights.values())
    if device == "cpu":
        choice = OffloadChoice("none", "everything runs on the CPU")
    elif requested == "auto":
        reason = f"all parts take {format_gib(total)} and {format_gib(free)} is free"
        choice = OffloadChoice("none" if total + work <= free else "model", reason)
    else:
        choice = OffloadChoice(requested, "requested")
    needs = [(total if choice.name == "none" else largest, device, free)]
    if choice.name == "model":
        needs.append((total, "the host", host_free))
    for needed, place, there in needs:
        if needed > there:
            raise UnavailableError(
                f"{what} needs {format_gib(needed)} for its weights alone and {place} has "
                f"{format_gib(there)} free: free memory, or choose another --device, "
                "--precision or --offload."
            )
    return choice


class PrecisionChoice(NamedTuple):
    """A precision by name (a key of `BYTES_PER_WEIGHT`) and why it was chosen."""

    name: str
    reason: str


def choose_precision(
    requested: str, device: str, *, parameters: int, available_bytes: int
) -> PrecisionChoice:
    """Resolves `auto`; any other known name is taken as it is."""
    check_known("precision", requested, PIPELINE_PRECISIONS)
    if requested != "auto":
        return PrecisionChoice(requested, "requested")
    if device != "cpu":
        reason = f"auto on {device}: diffusers' layers run in bf16; int8 runs in the ComfyUI nodes"
        return PrecisionChoice("bf16", reason)
    fp32_bytes = parameters * BYTES_PER_WEIGHT["fp32"]
    sizes = f"{format_gib(fp32_bytes)} in fp32, {format_gib(available_bytes)} available"
    if fp32_bytes <= available_bytes / 2:
        return PrecisionChoice("fp32", f"auto on cpu: fits in half of the memory ({sizes})")
    return PrecisionChoice(
        "bf16", f"auto on cpu: fp32 would take more than half of the memory ({sizes})"
    )
