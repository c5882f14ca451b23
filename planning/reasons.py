"""Why a plan is as it is: the clauses that its reasons are made of."""

from __future__ import annotations

from collections.abc import Mapping

from ..spec import OFF_CARD, OLDEST_CAPABILITY, QUANTIZED, CardFacts, format_gib, sm
from .phases import KEPT_FREE_BYTES
from .request import DROPPED, ON_PROCESSOR

WORK_OF_PHASE = {
    "load": "loading",
    "text": "encoding the prompt",
    "tables": "filling the modulation's table",
    "sampling": "sampling",
    "decode": "decoding",
}
# Measured after 60 blocks at 1024x1024 on random weights, relative to bf16. Channels 100 times as
# large as others turn it round (bench/results/fidelity-planted.json).
INT8_BEFORE_FP8 = (
    "int8 is as small as fp8 and closer to bf16 on weights without outliers (relative error 0.0064 "
    "against 0.0100; `qwen-l40s audit` tells for yours)"
)
FP8_AFTER_INT8 = (
    "fp8: as small as int8, and closer to bf16 where weights have large outliers (`qwen-l40s "
    "audit` tells for yours)"
)


def need_words(phase: str, count: int) -> str:
    """`42.1 GiB while sampling`."""
    return f"{format_gib(count)} while {WORK_OF_PHASE[phase]}"


def conversion(stored: str, name: str) -> str:
    """Says how a file's precision is converted."""
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


def weight_only(name: str, card: CardFacts | None) -> str:
    """Says what quantized weights gain on a card that does not multiply them; empty elsewhere."""
    if name not in QUANTIZED:
        return ""
    if card is None:
        return f"the CPU computes in full precision from the {name} weights"
    if card.multiplies(name):
        return ""
    return (
        f"{sm(card.capability)} does not multiply {name}, which needs "
        f"{sm(OLDEST_CAPABILITY[name])}, so the {name} weights are computed in "
        f"{card.computes_in} and save memory, not time"
    )


def requested_precision(name: str, stored: str | None, as_stored: bool) -> str:
    """The reason for a precision that was requested, or that a file keeps."""
    if as_stored:
        return f"as stored: the file holds {stored}"
    return f"requested: {conversion(stored, name)}" if stored else f"{name} as requested"


def kept_precision(stored: str) -> str:
    """The reason for a quantized file's own precision under `auto`."""
    return f"auto: the file holds {stored}, and dequantizing it would gain nothing"


def automatic_precision(
    name: str,
    stored: str | None,
    *,
    resident: bool,
    first: bool,
    bf16: int,
    bf16_fits: bool,
    least: str = "",
) -> str:
    """The reason for a precision that `auto` chose.

    Args:
        resident: whether it stays on the card.
        first: whether it is the recommended one.
        bf16: bytes of the weights that steps read in bf16.
        bf16_fits: whether bf16 stays on the card.
        least: where nothing stays, the precision of which the host moves the fewest weights.
    """
    if stored in QUANTIZED:
        return kept_precision(stored)
    if least:
        return _where_nothing_stays(name, stored, first, least)
    if name == "bf16":
        fits = ", and it fits" if resident else ", and does not stay on the card"
        return f"{'auto: ' if first else ''}{_trained_in(stored)}{fits}"
    if name == "fp8":
        return FP8_AFTER_INT8
    if bf16_fits:
        return f"int8: next after bf16, for less memory and time; {INT8_BEFORE_FP8}"
    return (
        f"{'auto' if first else name}: bf16 with {format_gib(bf16)} of weights does not stay on "
        f"the card, and {INT8_BEFORE_FP8}"
    )


def _trained_in(stored: str | None) -> str:
    rounded = f" ({conversion(stored, 'bf16')})" if stored not in (None, "bf16") else ""
    return f"bf16{rounded} is what the model was trained in"


def _where_nothing_stays(name: str, stored: str | None, first: bool, least: str) -> str:
    if name == "bf16":
        words = _trained_in(stored)
        return f"auto: no precision stays on the card, and {words}" if first else words
    if first:
        closer = f"; {INT8_BEFORE_FP8}" if name == "int8" else ""
        return f"auto: no precision stays on the card, and of {name} the least is moved{closer}"
    if name == "fp8" and least == "int8":
        return FP8_AFTER_INT8
    return f"{name}: does not stay on the card either"


def modulation_words(place: str, requested: bool, size: int, together: str) -> str:
    """Where the modulation weights wait, and why.

    Args:
        place: "on card" or "off card".
        requested: whether that was asked for.
        size: bytes of its weights.
        together: whether all parts fit the card, from `together_words`; empty to say no reason.
    """
    size_words = f"modulation: {format_gib(size)}"
    if requested:
        where = "stays in host memory" if place == OFF_CARD else "stays on the card"
        return f"{size_words} {where}, as requested"
    if place != OFF_CARD:
        return f"{size_words} stays on the card{f', where {together}' if together else ''}"
    why = f", because {together}; each new schedule brings it to the card once" if together else ""
    return f"{size_words} stays in host memory{why}"


def text_encoder_words(place: str, requested: bool, size: int) -> str:
    """Where the text encoder waits; empty where it stays on the card by itself."""
    asked = ", as requested" if requested else ""
    if place == DROPPED:
        return f"text encoder: {format_gib(size)} leaves the card after each encoding{asked}"
    if place == ON_PROCESSOR:
        why = asked or f", because {format_gib(size)} of it do not fit the card"
        return f"text encoder: computes on the processor{why}"
    return f"text encoder: {format_gib(size)} stays on the card{asked}" if requested else ""


def together_words(card: CardFacts, parts: Mapping[str, int], fit: bool, need: str) -> str:
    """Whether parts fit a card together.

    Args:
        parts: {name: bytes} of the largest.
        need: of the phase that decides, from `need_words`.
    """
    names = " and ".join(f"{format_gib(size)} of {name}" for name, size in parts.items())
    return f"{names} {'fit' if fit else 'do not fit'} {card.name} together ({need})"


def room_words(
    card: CardFacts,
    weights: int,
    needs: Mapping[str, int],
    short: str,
    worst: str,
    moved: int,
    passes: int,
) -> str:
    """Says what stays on the card and what does not.

    Args:
        weights: bytes of the transformer that are to be there.
        needs: {phase: bytes}.
        short: the phase that decides.
        worst: the phase that needs the most.
        moved: bytes of them that every forward pass brings to the card.
        passes: forward passes in each step.
    """
    size, spare = format_gib(weights), card.total_bytes - KEPT_FREE_BYTES - needs[short]
    named = ", ".join(need_words(name, needs[name]) for name in dict.fromkeys((short, worst)))
    facts = f"{named}; it has {format_gib(card.total_bytes)}, of which "
    facts += f"{format_gib(KEPT_FREE_BYTES)} stay free"
    if moved:
        every = "step" if passes == 1 else "pass"
        twice = "" if passes == 1 else f", {format_gib(passes * moved)} in every step"
        return (
            f"of {size} of weights {format_gib(weights - moved)} stay on {card.name} ({facts}): "
            f"the host moves {format_gib(moved)} to it in every {every}{twice}"
        )
    if spare < 0:
        return (
            f"{size} of weights stay on {card.name} for the steps alone ({facts}): the host moves "
            f"{format_gib(-spare)} off it and back for each image"
        )
    return f"{size} of weights stay on {card.name} ({facts}: {format_gib(spare)} to spare)"
