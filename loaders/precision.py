"""Which precision the weights are computed in, and the reason in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import CheckpointError, SettingError, UnavailableError
from ..planning.formats import OLDEST_CAPABILITY
from ..planning.memory import (
    BYTES_PER_WEIGHT,
    QUANTIZED,
    RESERVE_BYTES,
    USUAL_SIDE,
    CardFacts,
    format_gib,
)

PRECISIONS = ("auto", "bf16", "fp32", "fp8", "int8")
AS_STORED = "as stored"
TRANSFORMER_PRECISIONS = ("auto", "bf16", "fp8", "int8", AS_STORED)


@dataclass(frozen=True)
class PrecisionChoice:
    """A precision by name (a key of `BYTES_PER_WEIGHT`) and why it was chosen."""

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


def choose_transformer_precision(
    requested: str,
    *,
    stored: str,
    weights: Mapping[str, int],
    activations: int,
    card: CardFacts | None,
) -> PrecisionChoice:
    """Decides how a transformer's weights are held, before they are read.

    `auto` leaves a quantized file as it is, and takes of the others the most faithful precision
    that stays on the card: bf16, else int8. Weights that do not stay are no error, because the
    host moves them to the card in every step; the reason then says so.

    Args:
        requested: one of `TRANSFORMER_PRECISIONS`.
        stored: what the file holds, a key of `BYTES_PER_WEIGHT`.
        weights: bytes that have to be on the card in bf16, fp8, int8 and `stored`: what
            `planning.memory.weights_by_precision` gives, less modulation that waits elsewhere.
        activations: bytes of one step at 1328x1328, from `planning.memory.step_activation_bytes`.
        card: where the transformer runs; None for the CPU.

    Raises:
        SettingError: `requested` is no known name.
        CheckpointError: `stored` is no precision that this package computes with.
        UnavailableError: fp8 or int8 was demanded by name of a card that does not multiply it.
    """
    if requested not in TRANSFORMER_PRECISIONS:
        raise SettingError(
            f"precision {requested!r} is unknown: choose {', '.join(TRANSFORMER_PRECISIONS)}."
        )
    if stored not in BYTES_PER_WEIGHT:
        raise CheckpointError(
            f"the file stores its weights as {stored!r}: this package computes with "
            f"{', '.join(BYTES_PER_WEIGHT)}, so get the model in one of these."
        )
    if requested == AS_STORED:
        name, why = stored, f"as stored: the file holds {stored}"
    elif requested == "auto":
        name, why = _automatic(stored, weights, activations, card)
    else:
        _check_tensor_cores(requested, card)
        name, why = requested, f"requested: {_conversion(stored, requested)}"
    clauses = (why, _weight_only(name, card), _place(weights[name], activations, card))
    return PrecisionChoice(name, "; ".join(clause for clause in clauses if clause))


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


def _automatic(
    stored: str, weights: Mapping[str, int], activations: int, card: CardFacts | None
) -> tuple[str, str]:
    if stored in QUANTIZED:
        return stored, f"auto: the file holds {stored}, and dequantizing it would gain nothing"
    if card is None:
        return stored, f"auto on the CPU: as the file holds it, {stored}"
    if weights["bf16"] <= card.weight_budget(activations):
        rounded = "" if stored == "bf16" else f" ({_conversion(stored, 'bf16')})"
        return "bf16", f"auto: bf16{rounded} is what the model was trained in, and it fits"
    # Measured after 60 blocks at 1024x1024 on random weights, relative to bf16. Channels 100 times
    # as large as others turn it round (benchmarks/results/fidelity-planted.json).
    return "int8", (
        f"auto: bf16 with {format_gib(weights['bf16'])} of weights does not stay on the card, and "
        "int8 is as small as fp8 and closer to bf16 on weights without outliers (relative error "
        "0.0076 against 0.0100; `qwen-l40s audit` tells for yours)"
    )


def _conversion(stored: str, name: str) -> str:
    if stored == name:
        return f"the file holds {name}"
    if name in QUANTIZED and stored in QUANTIZED:
        return (
            f"the file's {stored} is quantized a second time to {name}, so that both errors add up"
        )
    if name in QUANTIZED:
        return f"the file's {stored} is quantized to {name} on load"
    if stored in QUANTIZED:
        return f"the file's {stored} is dequantized, which does not bring back what {stored} lost"
    return f"the file's {stored} is rounded to {name}"


def _check_tensor_cores(name: str, card: CardFacts | None) -> None:
    """Only demands are refused: weights that are quantized already save memory on any card."""
    if card is None or not _lacks(name, card):
        return
    others = [
        other for other in TRANSFORMER_PRECISIONS if other != name and not _lacks(other, card)
    ]
    raise UnavailableError(
        f"{name} was demanded and {card.name} is {_sm(card.capability)}: {name} is multiplied by "
        f"cards from {_sm(OLDEST_CAPABILITY[name])} on, so choose {', '.join(others)}."
    )


def _lacks(name: str, card: CardFacts) -> bool:
    return name in OLDEST_CAPABILITY and card.capability < OLDEST_CAPABILITY[name]


def _weight_only(name: str, card: CardFacts | None) -> str:
    if name not in QUANTIZED:
        return ""
    if card is None:
        return f"the CPU computes in full precision from the {name} weights"
    if not _lacks(name, card):
        return ""
    return (
        f"{_sm(card.capability)} does not multiply {name}, which needs "
        f"{_sm(OLDEST_CAPABILITY[name])}, so the {name} weights are computed in bf16 and save "
        "memory, not time"
    )


def _place(size: int, activations: int, card: CardFacts | None) -> str:
    if card is None:
        return f"{format_gib(size)} of weights in host memory"
    room = card.weight_budget(activations)
    facts = (
        f"{format_gib(card.total_bytes)} less {format_gib(RESERVE_BYTES)} in reserve and "
        f"{format_gib(activations)} for a step at {USUAL_SIDE}x{USUAL_SIDE}"
    )
    if size <= room:
        return f"{format_gib(size)} of weights stay on {card.name} ({facts})"
    return (
        f"of {format_gib(size)} of weights {format_gib(room)} stay on {card.name} ({facts}): the "
        f"host moves {format_gib(size - room)} to it in every step"
    )


def _sm(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"
