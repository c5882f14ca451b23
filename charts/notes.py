"""What an estimate has to say with its figures, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ..planning.cards import STARTING, Card
from ..planning.estimate import Estimate
from ..planning.files import NETWORK, NVME, PAGE_CACHE, SOURCES
from ..planning.phases import Range
from ..planning.rates import GEMM, constants, measured, why_predicted
from ..planning.request import DROPPED, ON_PROCESSOR
from ..spec import GIB, QUANTIZED, format_gib

if TYPE_CHECKING:
    from ..planning.request import Loras

# Below this a card runs the model only with nearly all of it moved in each step.
SMALL_CARD_BYTES = 6 * GIB


def notes_of(found: Estimate) -> tuple[str, ...]:
    """What an estimate has to say, without the caller's own notes."""
    return (*_times(found), *_room(found), *_additions(found), *_price(found))


def words(seconds: Range) -> str:
    """`2.1 s`, `2.1 to 3.4 s`."""
    low, high = (f"{end:.3g}" for end in seconds)
    return f"{low} s" if low == high else f"{low} to {high} s"


def _times(found: Estimate) -> Iterator[str]:
    if found.times is None:
        yield (
            f"No times and no cost are predicted, because {found.card.name} is not in the list of "
            f"cards: of these the {found.card.nearest} has likely the nearest times, and "
            "`qwen-l40s bench --calibrate` measures yours."
        )
        return
    yield from _range(found)
    yield (
        "An image is one with a new prompt when everything is loaded; the first run takes "
        f"{words(found.first_image_seconds)} with files in memory, and ComfyUI with all weights "
        f"from an NVMe disk starts in {words(found.times.cold_start)} (predicted)."
    )
    yield f"Loading takes {_loads(found.times.loads)} (predicted)."
    place = found.option.setting.text_encoder_place
    if place == ON_PROCESSOR:
        yield "The text encoder's time is predicted for a processor of 16 cores."
    elif place == DROPPED:
        yield "Each new prompt brings the text encoder to the card again."


def _range(found: Estimate) -> Iterator[str]:
    """Why times are a range, and where in it one card is."""
    low, high = found.step_seconds
    if low == high:
        return
    setting = found.option.setting
    if found.basis.origin:
        why = f"the calibration left {setting.precision} out"
    else:
        why = why_predicted(found.card)
    yield (
        f"Times are a range because {why}: its ends are the shares of the data sheet's dense peaks "
        "that such programs reach."
    )
    if setting.precision in QUANTIZED and not setting.weight_only:
        reached = constants()
        yield (
            f"The card that was measured, an {measured()['conditions']['card']}, reached "
            f"{reached.gemm_int8:.0%} of its dense peak in int8 and {reached.gemm_fp8:.0%} in fp8, "
            f"where this range takes {GEMM[0]:.0%} to {GEMM[1]:.0%}: its slow end is the likelier."
        )


def _loads(loads: Mapping[str, Range]) -> str:
    """`9.4 to 13 s with files in the page cache, ...`."""
    places = {
        PAGE_CACHE: "with files in the page cache",
        NVME: f"from an NVMe disk of {SOURCES[NVME] / 1e9:g} GB/s",
        NETWORK: f"from a network volume of {SOURCES[NETWORK] / 1e9:g} GB/s",
    }
    *others, last = (f"{words(seconds)} {places[source]}" for source, seconds in loads.items())
    return f"{', '.join(others)} and {last}"


def _room(found: Estimate) -> Iterator[str]:
    option = found.option
    if option.moved_bytes:
        moved = found.request.passes * option.moved_bytes
        link = found.card.pcie_bytes_per_second  # 0 where nobody has listed it
        least = f", at least {moved / link:.2g} s of it" if link else ""
        yield (f"It runs, slowly: {format_gib(moved)} of weights cross PCIe in every step{least}.")
    elif not option.resident:
        yield "It runs, with weights that leave the card and come back for each image."
    stays = next((other for other in found.options[1:] if other.resident), None)
    if not option.resident and stays is not None:
        setting = stays.setting
        yield (
            f"{setting.precision} with modulation {setting.modulation} and the text encoder: "
            f"{setting.text_encoder_place}, would stay on the card."
        )
    if found.card.memory_bytes < SMALL_CARD_BYTES:
        yield (
            f"With {format_gib(found.card.memory_bytes)} nearly all weights are moved in each "
            "step, and a smaller image saves little of that: a rented card with 24 GiB or more is "
            "faster by far."
        )
    precision = option.setting.precision
    at_hand = found.request.parts.transformer_bytes is not None
    if precision in QUANTIZED and not at_hand:
        ready = found.times and found.times.prequantized_loads
        yield (
            f"{precision} is made of the bf16 file on each load; `qwen-l40s quantize` writes it "
            f"once{f', and loading then takes {_loads(ready)} (predicted)' if ready else ''}."
        )


def _additions(found: Estimate) -> Iterator[str]:
    request = found.request
    if found.times is None:
        return
    if request.loras.count and request.loras.mode == "bypass":
        yield (
            f"{_many(request.loras)} beside the weights take {words(found.times.loras)} of each "
            "step, counted and not measured: merged they cost nothing."
        )
    if request.controlnet_bytes:
        yield "The ControlNet's time is counted from its bytes and was not measured."
    if request.member.layers and request.layers:
        yield f"An image is a set: the whole and its {request.layers} layers."
    elif request.member.layers:
        yield (
            "One picture is counted: Qwen-Image-Layered paints layers beside it, 3 where ComfyUI's "
            "node is left as it is, so give how many (--layers, or the node's)."
        )


def _price(found: Estimate) -> Iterator[str]:
    if found.times is None:
        return
    if found.usd_per_image is None:
        yield f"No price of {found.card.name} is known: give your own to see the cost of an image."
        return
    where = "your own" if found.own_usd_per_hour is not None else _listed(found.card)
    yield f"The cost of an image is that of a card that paints all the time; the price is {where}."


def _listed(card: Card) -> str:
    price = card.price()
    starting = price.kind == STARTING
    usd = f"{'from ' * starting}{price.usd_per_hour:g} USD an hour"
    return f"{price.provider}'s, on demand, {price.date}: {usd}"


def _many(loras: Loras) -> str:
    return "1 LoRA" if loras.count == 1 else f"{loras.count} LoRAs"
