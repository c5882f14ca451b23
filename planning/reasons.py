"""Why a plan is as it is: the clauses that its reasons are made of."""

from __future__ import annotations

from collections.abc import Mapping

from ..spec.formats import FORMATS, GIB, QUANTIZED, CardFacts, format_gib, sm
from ..spec.transformer import OFF_CARD
from .phases import KEPT_FREE_BYTES
from .request import DROPPED, ON_PROCESSOR

WORK_OF_PHASE = {
    "load": "loading",
    "text": "encoding the prompt",
    "tables": "filling the modulation table",
    "sampling": "sampling",
    "decode": "decoding",
}
# Measured after 60 blocks at 1024x1024 on random weights, relative to bf16: 0.0064 for int8, 0.0100
# for fp8. In one block int8 is off by 0.018 and fp8 by 0.054; with channels 30 times as large as
# others by 0.024 and 0.048, 100 times by 0.066 and 0.049
# (bench/results/fidelity-planted-h200.json).
INT8_BEFORE_FP8 = (
    "int8 is as small as fp8 and closer to bf16, because a rotation spreads the outliers of "
    "weights and activations (`qwen-l40s audit` measures yours)"
)
FP8_AFTER_INT8 = "fp8: as small as int8, and closer to bf16 only where outliers are extreme"


def need_words(phase: str, count: int) -> str:
    """Says `42.1 GiB while sampling`."""
    return f"{format_gib(count)} while {WORK_OF_PHASE[phase]}"


def conversion(stored: str, name: str) -> str:
    """Says how a file's precision is converted."""
    if stored == name:
        return f"the file holds {name}"
    if name in QUANTIZED and stored in QUANTIZED:
        return f"the file's {stored} is quantized again to {name}, and both errors add up"
    if name in QUANTIZED:
        return f"the file's {stored} is quantized to {name} on load"
    if stored in QUANTIZED:
        return (
            f"the file's {stored} is expanded to {name}, which does not restore what {stored} lost"
        )
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
        f"{sm(card.capability)} has no {name} tensor cores (they need "
        f"{sm(FORMATS[name].oldest)}), so the {name} weights are computed in {card.computes_in} "
        "and save memory, not time"
    )


def packed_words(weights: int) -> str:
    """Says why weights stay in 4 or 6 bits.

    Args:
        weights: bytes that steps would read on the card in int8.
    """
    return (
        f"weights stay in the file's 4 or 6 bits and are decoded one by one, because "
        f"{format_gib(weights)} of int8 do not stay on the card"
    )


def requested_precision(name: str, stored: str | None, as_stored: bool) -> str:
    """Says why a precision was requested, or that a file keeps it."""
    if as_stored:
        return f"as stored: the file holds {stored}"
    return f"requested: {conversion(stored, name)}" if stored else f"{name} as requested"


def kept_precision(stored: str) -> str:
    """Says why `auto` keeps a quantized file's own precision."""
    return f"auto: the file holds {stored}, and expanding it would gain nothing"


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
    """Says why `auto` chose a precision.

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
        fits = ", and it fits" if resident else ", and does not fit the card"
        return f"{'auto: ' if first else ''}{_trained_in(stored)}{fits}"
    if name == "fp8":
        return FP8_AFTER_INT8
    if bf16_fits:
        return f"int8: less memory and time than bf16; {INT8_BEFORE_FP8}"
    return (
        f"{'auto' if first else name}: bf16 with {format_gib(bf16)} of weights does not fit the "
        f"card; {INT8_BEFORE_FP8}"
    )


def _trained_in(stored: str | None) -> str:
    rounded = f" ({conversion(stored, 'bf16')})" if stored not in (None, "bf16") else ""
    return f"bf16{rounded} is what the model was trained in"


def _where_nothing_stays(name: str, stored: str | None, first: bool, least: str) -> str:
    if name == "bf16":
        words = _trained_in(stored)
        return f"auto: no precision fits the card, and {words}" if first else words
    if first:
        closer = f"; {INT8_BEFORE_FP8}" if name == "int8" else ""
        return f"auto: no precision fits the card, and {name} moves the least{closer}"
    if name == "fp8" and least == "int8":
        return FP8_AFTER_INT8
    return f"{name}: does not fit the card either"


def modulation_words(place: str, requested: bool, size: int, together: str) -> str:
    """Says where the modulation weights wait, and why.

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
    return f"{size_words} stays in host memory{f', because {together}' if together else ''}"


def text_encoder_words(place: str, requested: bool, size: int) -> str:
    """Says where the text encoder waits; empty where it stays on the card by itself."""
    asked = ", as requested" if requested else ""
    if place == DROPPED:
        return f"text encoder: {format_gib(size)} leaves the card after each encoding{asked}"
    if place == ON_PROCESSOR:
        why = asked or f", because its {format_gib(size)} do not fit the card"
        return f"text encoder: computes on the CPU{why}"
    return f"text encoder: {format_gib(size)} stays on the card{asked}" if requested else ""


def together_words(card: CardFacts, parts: Mapping[str, int], fit: bool, need: str) -> str:
    """Says whether parts fit a card together.

    Args:
        parts: {name: bytes} of the largest.
        need: of the phase that decides, from `need_words`.
    """
    names = " and ".join(f"{format_gib(size)} of {name}" for name, size in parts.items())
    return f"{names} {'fit' if fit else 'do not fit'} the {card.name} together ({need})"


def room_words(
    card: CardFacts, weights: int, needs: Mapping[str, int], short: str, moved: int, passes: int
) -> str:
    """Says what stays on the card and what does not.

    Args:
        weights: bytes of the transformer that are to be there.
        needs: {phase: bytes}.
        short: the phase that decides.
        moved: bytes of them that every forward pass brings to the card.
        passes: forward passes in each step.
    """
    usable, work = card.total_bytes - KEPT_FREE_BYTES, WORK_OF_PHASE[short]
    of = f"{needs[short] / GIB:.1f} of {format_gib(usable)}"
    if moved:
        every = "step" if passes == 1 else f"pass, {format_gib(passes * moved)} in every step"
        return (
            f"{(weights - moved) / GIB:.1f} of {format_gib(weights)} of weights stay on "
            f"{card.name}, because {work} needs {of}: {format_gib(moved)} moves to the card in "
            f"every {every}"
        )
    if needs[short] > usable:
        return (
            f"{format_gib(weights)} of weights stay on {card.name} while sampling, but {work} "
            f"needs {of}: {format_gib(needs[short] - usable)} leaves the card and comes back for "
            "each image"
        )
    return f"{format_gib(weights)} of weights stay on {card.name}; the peak is {of}, while {work}"
