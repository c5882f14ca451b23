"""What an estimate has to say beside its figures, in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .estimate import Range
from .memory import GIB, QUANTIZED, format_gib
from .setting import DROPPED, ON_PROCESSOR

if TYPE_CHECKING:
    from .cards import Card
    from .estimator import Estimate
    from .wish import Loras

# Below this a card runs the model only with nearly all of it moved in each step.
SMALL_CARD_BYTES = 6 * GIB


def notes_of(found: Estimate, *, own_price: bool, loras_seconds: Range) -> tuple[str, ...]:
    """The notes of an estimate without any.

    Args:
        own_price: whether the user gave the price.
        loras_seconds: of a step, what LoRAs beside the weights take.
    """
    additions = _additions(found, loras_seconds)
    return (*_times(found), *_room(found), *additions, *_price(found, own_price))


def words(seconds: Range) -> str:
    """`2.1 s`, `2.1 to 3.4 s`."""
    low, high = (f"{end:.3g}" for end in seconds)
    return f"{low} s" if low == high else f"{low} to {high} s"


def _times(found: Estimate) -> Iterator[str]:
    if found.basis.kind != "measured":
        yield (
            f"Times are a range because no {found.card.name} was measured: its ends are the shares "
            "of the data sheet's dense peaks that such programs reach."
        )
    yield (
        "An image is one with a new prompt when everything is loaded; the first run takes "
        f"{words(found.first_image_seconds)} with files in memory, and ComfyUI with all weights "
        f"from an NVMe disk starts in {words(found.cold_start_seconds)} (predicted)."
    )
    place = found.option.setting.text_encoder_place
    if place == ON_PROCESSOR:
        yield "The text encoder's time is predicted for a processor of 16 cores."
    elif place == DROPPED:
        yield "Each new prompt brings the text encoder to the card again; a known one does not."


def _room(found: Estimate) -> Iterator[str]:
    option = found.option
    if option.moved_bytes:
        moved = found.wish.passes * option.moved_bytes
        pcie = moved / found.card.pcie_bytes_per_second
        yield (
            f"It runs, slowly: {format_gib(moved)} of weights cross PCIe in every step, at least "
            f"{pcie:.2g} s of it."
        )
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
    at_hand = found.wish.parts.transformer_bytes is not None
    if precision in QUANTIZED and not at_hand:
        yield (
            f"{precision} is made of the bf16 file on each load; `qwen-l40s quantize` writes it "
            "once."
        )


def _additions(found: Estimate, loras_seconds: Range) -> Iterator[str]:
    wish = found.wish
    if wish.loras.count and wish.loras.mode == "beside":
        yield (
            f"{_many(wish.loras)} beside the weights take {words(loras_seconds)} of each "
            "step, counted and not measured: merged they cost nothing."
        )
    if wish.controlnet_bytes:
        yield "The ControlNet's time is counted from its bytes and was not measured."


def _price(found: Estimate, own: bool) -> Iterator[str]:
    if found.usd_per_image is None:
        yield f"No price of {found.card.name} is known: give your own to see the cost of an image."
        return
    where = "your own" if own else _listed(found.card)
    yield f"The cost of an image is that of a card that paints all the time; the price is {where}."


def _listed(card: Card) -> str:
    price = card.price()
    return f"{price.provider}'s, {price.kind}, {price.date}: {price.usd_per_hour:g} USD an hour"


def _many(loras: Loras) -> str:
    return "1 LoRA" if loras.count == 1 else f"{loras.count} LoRAs"
