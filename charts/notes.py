"""Why a plan is as it is, and the notes that an estimate has beside its figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..families.protocol import APACHE
from ..planning.bytes import text_encoder_bytes
from ..planning.cards import STARTING
from ..planning.files import made_on_load
from ..planning.phases import transformer_bytes
from ..planning.rates import attention_share
from ..planning.request import AUTO, DROPPED, EXACT, FAST, ON_PROCESSOR, STREAMED
from ..spec.formats import FORMATS, GIB, QUANTIZED, CardFacts, format_gib, sm
from .figures import dollars, duration, many

if TYPE_CHECKING:
    from ..planning.estimate import Estimate
    from ..planning.plan import PlanOption

WORK_OF_PHASE = {
    "load": "loading",
    "text": "encoding the prompt",
    "tables": "filling the modulation table",
    "sampling": "sampling",
    "decode": "decoding",
}
# Of int8 with rotation, which `auto` takes, relative to bf16: the latent on an H200, the images as
# others published them of an RTX 3090. In one block int8 is off by 0.018 and fp8 by 0.054; with
# channels 30 times as large by 0.024 and 0.048 (bench/results/fidelity-planted-h200.json).
INT8_DIFFERENCE = (
    "int8 with rotation changes the latent by 0.0058 after 6 steps on random weights (two bf16 "
    "implementations: 0.0042), and images of 2.1 by MS-SSIM 0.995, 38.8 dB (measured by others)"
)
# Of each precision, where people see it.
SHOWN = {"bf16": "bf16 (most accurate)"}


def notes_of(found: Estimate) -> tuple[str, ...]:
    parts = _time_notes, _room_notes, _addition_notes, _licence_notes, _price_notes
    return tuple(note for part in parts for note in part(found))


def price_of(found: Estimate) -> str:
    """Says `$0.72 an hour or more`, of an estimate that has a price."""
    if found.own_usd_per_hour is not None:
        return f"${dollars(found.own_usd_per_hour)} an hour"
    price = found.card.price()
    starting = " or more" * (price.kind == STARTING)
    return f"${dollars(price.usd_per_hour)} an hour{starting}"


def _time_notes(found: Estimate) -> Iterator[str]:
    if found.times is None:
        yield (
            f"{found.card.name} is not in the list of cards, so times and cost are not predicted. "
            f"The {found.card.nearest} is probably the closest in speed; `qwen-l40s bench "
            "--calibrate` measures your card."
        )
        return
    yield (
        "The time of an image includes a new prompt, with all models loaded. The first run takes "
        f"{duration(found.first_image_seconds)}; ComfyUI starts and loads everything from an NVMe "
        f"disk in {duration(found.times.cold_start)}."
    )
    if found.option.setting.text_encoder_place == ON_PROCESSOR:
        yield "The text encoder's time assumes a CPU with 16 cores."


def _room_notes(found: Estimate) -> Iterator[str]:
    option = found.option
    if option.card.computes_in == "fp32":
        yield (
            f"{sm(option.card.capability)} has no bf16 tensor cores: ComfyUI computes in fp32, "
            "which is slow and takes up to twice the working memory shown."
        )
    if made_on_load(option.request, option.setting):
        yield (
            f"Each load quantizes the file to {option.setting.precision}. `qwen-l40s quantize` "
            "writes that file once."
        )


def _addition_notes(found: Estimate) -> Iterator[str]:
    request = found.request
    if found.times is None:
        return
    if request.loras.beside(found.option.setting.precision):
        added = duration(found.lora_seconds)
        yield (
            f"{many(request.loras.count, 'LoRA')} in bypass mode add {added} to each step "
            "(computed, not measured). Merged, they cost nothing."
        )
    yield from attention_notes(found)
    if request.controlnet_bytes:
        yield "The ControlNet's time is computed from its size, not measured."
    if request.layers:
        yield f"One image here is the whole picture and its {request.layers} layers."


def attention_notes(found: Estimate) -> Iterator[str]:
    """Says which attention counts, where it is not simply exact."""
    asked, form = found.request.attention, found.option.setting.attention
    if form != EXACT:
        best, worst = attention_share(found.card, form)
        share = f"{best:.0%}" if best == worst else f"{best:.0%} to {worst:.0%}"
        fast = "fast counts as " * (asked == FAST)
        yield (
            f"Attention {fast}{form}: predicted at {share} of the time of exact attention, not "
            "measured in a run."
        )
    elif asked == FAST:
        yield "Attention fast counts as exact, which is predicted to be faster on this card."


def _licence_notes(found: Estimate) -> Iterator[str]:
    family = found.request.member
    if family.licence != APACHE:
        yield f"The licence of the weights: {family.licence}."


def _price_notes(found: Estimate) -> Iterator[str]:
    if found.times is None:
        return
    if found.usd_per_image is None:
        yield (
            f"{found.card.name} has no price in the list: enter yours (--price, or the node's "
            "price_per_hour) to see the cost of an image."
        )
        return
    price, source = found.card.price(), "your own"
    if found.own_usd_per_hour is None:
        source = f"{price.provider}'s, on demand, {price.date}"
    yield (
        f"The cost assumes that the card is always busy, at {price_of(found)}; the price is "
        f"{source}."
    )


# Why an option of a plan is as it is.


def reasons(option: PlanOption) -> dict[str, str]:
    """Says {of what: why it is so, with figures} of an option that `plan` gives, in order."""
    found = {
        "precision": _precision_reason(option),
        "products": weight_only(option.setting.precision, option.card),
        "packed": _packed_reason(option),
        "modulation": _modulation_reason(option),
        "text encoder": _text_encoder_reason(option),
        "room": _room_reason(option),
    }
    return {what: clause for what, clause in found.items() if clause}


def weight_only(name: str, card: CardFacts | None) -> str:
    """Says what quantized weights gain where their products do not run; empty elsewhere.

    Args:
        card: None where there is no NVIDIA card.
    """
    if name not in QUANTIZED:
        return ""
    if card is None:
        return f"without an NVIDIA GPU the {name} weights are computed in full precision"
    if card.runs(name):
        return ""
    return (
        f"{_refusal(name, card)}, so the {name} weights are computed in {card.computes_in} and "
        "save memory, not time"
    )


def _refusal(name: str, card: CardFacts) -> str:
    if card.multiplies(name):
        return card.no_int8
    return (
        f"{sm(card.capability)} has no {name} tensor cores (they need {sm(FORMATS[name].oldest)})"
    )


def automatic(name: str, card: CardFacts | None, stored: str | None) -> str:
    """Says why `auto` makes a precision of weights that are not quantized; as `auto_precision`."""
    if card is None:
        return f"auto: {_conversion(stored, name)}, and there is no NVIDIA GPU"
    if name != "bf16":
        made = f", and {_conversion(stored, name)}" if stored else ""
        return f"auto: {name} products run on {card.name}{made}; {INT8_DIFFERENCE}"
    return f"auto: {_trained(stored)}; {_refusal('int8', card)}"


def _trained(stored: str | None) -> str:
    rounded = f", {_conversion(stored, 'bf16')}" if stored not in (None, "bf16") else ""
    return f"{SHOWN['bf16']} is what the model was trained in{rounded}"


def requested_precision(name: str, stored: str | None, as_stored: bool) -> str:
    """Says why a precision was requested, or that a file keeps it."""
    if as_stored:
        return f"as stored: the file holds {stored}"
    return f"requested: {_conversion(stored, name)}" if stored else f"{name} as requested"


def kept_precision(stored: str) -> str:
    """Says why `auto` keeps a quantized file's own precision."""
    return f"auto: the file holds {stored}, and expanding it would gain nothing"


def expanded_blocks(name: str) -> str:
    """Says why GGUF's blocks are rounded anew."""
    return f"GGUF's blocks are expanded and rounded to {name}, which tensor cores multiply"


def _conversion(stored: str, name: str) -> str:
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


def _precision_reason(option: PlanOption) -> str:
    name, first, asked = option.setting.precision, option.first, option.asked
    stored, parts, kept = asked.stored, asked.request.parts, asked.kept
    if asked.as_stored or not (kept or asked.request.precision == AUTO):
        return requested_precision(name, stored, asked.as_stored)
    if name == kept in QUANTIZED:
        return expanded_blocks(name) if parts.gguf else kept_precision(name)
    if kept in QUANTIZED:
        return automatic(name, option.card, kept)
    if name == first.setting.precision:
        return automatic(name, option.card, stored)
    return _trained(stored) if name == "bf16" else f"{name}: less memory than bf16"


def _packed_reason(option: PlanOption) -> str:
    if not option.setting.packed:
        return ""
    decoded = replace(option, setting=replace(option.setting, packed=False)).weights_bytes
    return (
        f"weights stay in the file's 4 or 6 bits and are decoded one by one, because "
        f"{format_gib(decoded)} of int8 do not stay on the card"
    )


def _modulation_reason(option: PlanOption) -> str:
    sizes = transformer_bytes(option.request, option.setting)
    if not sizes.modulation:
        return ""
    place = "in system RAM" if option.setting.off_card else "on the card"
    asked = ", as requested" * (option.asked.request.modulation != AUTO)
    return f"modulation: {format_gib(sizes.modulation)} stays {place}{asked}"


def _text_encoder_reason(option: PlanOption) -> str:
    place = option.setting.text_encoder_place
    named = option.asked.request.text_encoder_place != AUTO
    size = format_gib(text_encoder_bytes(option.request, option.setting.text_encoder))
    asked = ", as requested" * named
    if place in (DROPPED, STREAMED):
        way = "leaves the card after" if place == DROPPED else "streams from system RAM for"
        return f"text encoder: {size} {way} each encoding{asked}"
    if place == ON_PROCESSOR:
        return f"text encoder: computes on the CPU{asked}"
    return f"text encoder: {size} stays on the card{asked}" if named else ""


def _room_reason(option: PlanOption) -> str:
    weights, moved, card = option.weights_bytes, option.moved_bytes, option.card.name
    need, usable = option.needs[option.short_phase], option.usable_bytes
    work, passes = WORK_OF_PHASE[option.short_phase], option.request.passes
    of = f"{need / GIB:.1f} of {format_gib(usable)}"
    if moved:
        every = "step" if passes == 1 else f"pass, {format_gib(passes * moved)} in every step"
        return (
            f"{(weights - moved) / GIB:.1f} of {format_gib(weights)} of weights stay on {card}, "
            f"because {work} needs {of}: {format_gib(moved)} moves to the card in every {every}"
        )
    if need > usable:
        return (
            f"{format_gib(weights)} of weights stay on {card} while sampling, but {work} needs "
            f"{of}: {format_gib(need - usable)} leaves the card and comes back for each image"
        )
    return f"{format_gib(weights)} of weights stay on {card}; the peak is {of}, while {work}"
