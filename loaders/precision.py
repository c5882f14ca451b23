"""Which precision the weights are computed in, and the reason in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import SettingError, UnavailableError
from ..planning.bytes import TransformerBytes, weight_bytes
from ..planning.plan import PlanOption, check_stored, check_tensor_cores, plan
from ..planning.reasons import kept_precision, requested_precision, weight_only
from ..planning.request import Parts, RunRequest
from ..spec import (
    BYTES_PER_WEIGHT,
    OFF_CARD,
    QUANTIZED,
    USUAL_SIDE,
    CardFacts,
    ModulationPlace,
    TransformerShape,
    format_gib,
)

PRECISIONS = ("auto", "bf16", "fp32", "fp8", "int8")
AS_STORED = "as stored"
TRANSFORMER_PRECISIONS = ("auto", "bf16", "fp8", "int8", AS_STORED)
# Where a card is too small for an image of the usual side, its loader decides for one of this.
LEAST_SIDE = 256


@dataclass(frozen=True)
class PrecisionChoice:
    """A precision by name (a key of `BYTES_PER_WEIGHT`) and why it was chosen."""

    name: str
    reason: str


@dataclass(frozen=True)
class TransformerChoice:
    """How a transformer is held, where its modulation waits, and the plan's option behind both;
    None on the CPU.
    """

    precision: PrecisionChoice
    modulation: ModulationPlace
    option: PlanOption | None = None


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


def choose_transformer(
    requested: str,
    modulation: str = "auto",
    *,
    stored: str,
    shape: TransformerShape,
    card: CardFacts | None,
    held: Mapping[str, TransformerBytes] | None = None,
) -> TransformerChoice:
    """Decides how a transformer's weights are held, before they are read.

    `auto` is what `planning.plan.plan` recommends for one image of 1328x1328 beside a text encoder
    in bf16. Weights that do not stay on the card are no error, because the host moves them to it
    in every step; the reason then says so.

    Args:
        requested: one of `TRANSFORMER_PRECISIONS`.
        modulation: one of `planning.placement.PLACES`.
        stored: what the file holds, a key of `BYTES_PER_WEIGHT`.
        card: where the transformer runs; None for the CPU.
        held: {precision: bytes} where shape and precision do not tell them.

    Raises:
        SettingError: the precision or the place is unknown.
        CheckpointError: `stored` is no precision that this package computes with.
        UnavailableError: fp8 or int8 was demanded by name of a card that does not multiply it, or
            the card is too small even for a small image.
    """
    if requested not in TRANSFORMER_PRECISIONS:
        raise SettingError(
            f"precision {requested!r} is unknown: choose {', '.join(TRANSFORMER_PRECISIONS)}."
        )
    check_stored(stored)
    as_stored = requested == AS_STORED
    request = RunRequest(
        precision="auto" if as_stored else requested,
        width=USUAL_SIDE,
        height=USUAL_SIDE,
        modulation=modulation,
        parts=Parts(transformer=shape),
    )
    held = dict(held or {})
    if card is None:
        return _on_processor(requested, modulation, stored, shape, held)
    if not as_stored:
        check_tensor_cores(requested, card, TRANSFORMER_PRECISIONS)
    name = stored if as_stored else None
    if as_stored and stored not in QUANTIZED:
        held["bf16"] = held.get(stored) or _held(shape, stored)
    option = _recommended(card, request, stored, as_stored, held)
    reasons = {**option.reasons}
    place = ModulationPlace(option.setting.off_card, reasons.pop("modulation"))
    reasons.pop("text encoder", None)  # its own loader says where it is
    choice = PrecisionChoice(name or option.setting.precision, "; ".join(reasons.values()))
    return TransformerChoice(choice, place, option)


def check_host_memory(needed_bytes: int, available_bytes: int, what: str) -> None:
    """Refuses before reading what host memory cannot hold.

    Args:
        needed_bytes: the peak of host memory that is not a mapped file.
        available_bytes: what can be had now.
        what: the subject of the sentence, such as `qwen_image_bf16.safetensors in int8`.

    Raises:
        UnavailableError: less is available than needed; it names both numbers and the remedy.
    """
    if needed_bytes > available_bytes:
        raise UnavailableError(
            f"{what} needs {format_gib(needed_bytes)} of host memory and "
            f"{format_gib(available_bytes)} is available: close other programs, or load a file "
            "that is stored in fp8 or int8, which takes about half of bf16."
        )


def format_bytes(count: float) -> str:
    """Decimal units, as disks and cards are labelled: `57.7 GB`, `12 MB`."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _recommended(
    card: CardFacts,
    request: RunRequest,
    stored: str,
    as_stored: bool,
    held: Mapping[str, TransformerBytes],
) -> PlanOption:
    try:
        return plan(card, request, stored, as_stored=as_stored, held=held)[0]
    except UnavailableError:  # the image may be a smaller one
        least = replace(request, width=LEAST_SIDE, height=LEAST_SIDE)
        return plan(card, least, stored, as_stored=as_stored, held=held)[0]


def _on_processor(
    requested: str,
    modulation: str,
    stored: str,
    shape: TransformerShape,
    held: Mapping[str, TransformerBytes],
) -> TransformerChoice:
    """There is no card to leave, and no room to be short of."""
    name = stored if requested in ("auto", AS_STORED) else requested
    if requested == "auto":
        why = (
            kept_precision(stored)
            if stored in QUANTIZED
            else f"auto on the CPU: as the file holds it, {stored}"
        )
    else:
        why = requested_precision(name, stored, requested == AS_STORED)
    size = (held.get(name) or _held(shape, name)).total
    clauses = (why, weight_only(name, None), f"{format_gib(size)} of weights in host memory")
    place = "modulation: stays with the rest, because only an NVIDIA card has an off card"
    return TransformerChoice(
        PrecisionChoice(name, "; ".join(filter(None, clauses))),
        ModulationPlace(False, place if modulation == OFF_CARD else ""),
    )


def _held(shape: TransformerShape, precision: str) -> TransformerBytes:
    counted = weight_bytes(shape, precision)
    return TransformerBytes(counted.total, counted.modulation)
