"""The notes that an estimate has beside its figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ..families.protocol import APACHE
from ..planning.cards import STARTING
from ..planning.files import NETWORK, NVME, PAGE_CACHE, SOURCES
from ..planning.phases import Range
from ..planning.rates import GEMM, attention_share, constants, measured
from ..planning.request import DROPPED, EXACT, FAST, ON_PROCESSOR
from ..spec.formats import GIB, QUANTIZED, format_gib, sm
from .figures import dollars, duration, many

if TYPE_CHECKING:
    from ..planning.estimate import Estimate

# Below this a card runs the model only with nearly all of it moved in each step.
SMALL_CARD_BYTES = 6 * GIB


def notes_of(found: Estimate) -> tuple[str, ...]:
    """Gives what an estimate has to say, without the caller's own notes."""
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
    yield from _range_notes(found)
    yield (
        "The time of an image includes a new prompt, with all models loaded. The first run takes "
        f"{duration(found.first_image_seconds)}; ComfyUI starts and loads everything from an NVMe "
        f"disk in {duration(found.times.cold_start)}."
    )
    yield f"Loading takes {_loads(found.times.loads)}."
    place = found.option.setting.text_encoder_place
    if place == ON_PROCESSOR:
        yield "The text encoder's time assumes a CPU with 16 cores."
    elif place == DROPPED:
        yield "Each new prompt loads the text encoder onto the card again."


def _range_notes(found: Estimate) -> Iterator[str]:
    low, high = found.step_seconds
    if low == high:
        return
    setting, left_out = found.option.setting, found.basis.left_out
    if found.basis.origin and setting.precision not in left_out:
        return  # attention in 8 bits, which says so
    if found.basis.origin:
        yield f"Times are a range because the calibration did not measure {setting.precision}."
    if setting.precision in QUANTIZED and not setting.weight_only:
        reached = constants()
        yield (
            f"Expect the slow end: the card we measured ({measured()['conditions']['card']}) "
            f"reached {reached.gemm_int8:.0%} of its dense peak in int8 and {reached.gemm_fp8:.0%} "
            f"in fp8, and this range assumes {GEMM[0]:.0%} to {GEMM[1]:.0%}."
        )


def _loads(loads: Mapping[str, Range]) -> str:
    places = {
        PAGE_CACHE: "with files cached in memory",
        NVME: f"from an NVMe disk ({SOURCES[NVME] / 1e9:g} GB/s)",
        NETWORK: f"from a network volume ({SOURCES[NETWORK] / 1e9:g} GB/s)",
    }
    *others, last = (f"{duration(seconds)} {places[source]}" for source, seconds in loads.items())
    return f"{', '.join(others)} and {last}"


def _room_notes(found: Estimate) -> Iterator[str]:
    option = found.option
    if option.card.computes_in == "fp32":
        yield (
            f"{sm(option.card.capability)} has no bf16 tensor cores: ComfyUI computes in fp32, "
            "which is slow and takes up to twice the working memory shown."
        )
    if option.moved_bytes:
        moved = found.request.passes * option.moved_bytes
        link = found.card.pcie_bytes_per_second  # 0 where nobody has listed it
        least = f", which takes at least {moved / link:.2g} s" if link else ""
        yield f"It runs slowly: {format_gib(moved)} of weights crosses PCIe in every step{least}."
    elif not option.resident:
        yield "It runs, but weights leave the card and come back for each image."
    if found.card.memory_bytes < SMALL_CARD_BYTES:
        yield (
            f"With {format_gib(found.card.memory_bytes)}, nearly all weights move in every step, "
            "and a smaller image hardly helps. A rented card with 24 GiB or more is far faster."
        )
    precision = option.setting.precision
    at_hand = found.request.parts.transformer_bytes is not None
    if precision in QUANTIZED and not at_hand:
        ready = found.times and found.times.prequantized_loads
        yield (
            f"Each load quantizes the bf16 file to {precision}. `qwen-l40s quantize` writes that "
            f"file once{f'; loading then takes {_loads(ready)}' if ready else ''}."
        )


def _addition_notes(found: Estimate) -> Iterator[str]:
    request = found.request
    if found.times is None:
        return
    if request.loras.beside(found.option.setting.precision):
        yield (
            f"{many(request.loras.count, 'LoRA')} in bypass mode add {duration(found.times.loras)} "
            "to each step (computed, not measured). Merged, they cost nothing."
        )
    yield from attention_notes(found)
    if request.controlnet_bytes:
        yield "The ControlNet's time is computed from its size, not measured."
    if request.member.layers and request.layers:
        yield f"One image here is the whole picture and its {request.layers} layers."
    elif request.member.layers:
        yield (
            "This counts one picture. Qwen-Image-Layered also paints layers, 3 by default in "
            "ComfyUI's node: set layers (--layers) to count them."
        )


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
