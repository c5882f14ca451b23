"""Chooses a transformer's precision from its header, the card and the memory, before reading it."""

from __future__ import annotations

from collections.abc import Sequence

import comfy.memory_management
import comfy.model_management
import torch

from ....errors import UnavailableError
from ....loaders.precision import PrecisionChoice, check_host_memory, choose_transformer
from ....loaders.quantization import STORAGE_ONLY, computed_precision
from ....loaders.quantize import layers_to_quantize
from ....loaders.sizes import modulation_bytes
from ....loaders.source import Source
from ....machine.memory import available_memory
from ....planning.bytes import TransformerBytes, weight_bytes, weights_by_precision
from ....planning.phases import KEPT_FREE_BYTES
from ....planning.plan import PlanOption
from ....spec import GIB, QUANTIZED, CardFacts, ModulationPlace, TransformerShape, format_gib

STORED = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
# What the loading itself takes beside the result: the largest layers that are in work.
STAGING_BYTES = 2 * GIB


def stored_precision(source: Source) -> str:
    """The precision that most of the weights are stored in."""
    layers = source.part.quantization.layers
    formats = [layers[layer] for layer in layers_to_quantize(layers)]
    if formats:  # others, such as e5m2, are converted
        return computed_precision(formats) or "bf16"
    plain = {name: entry["bytes"] for name, entry in source.part.dtypes.items() if name in STORED}
    return STORED[max(plain, key=plain.__getitem__)] if plain else "bf16"


def choose(
    source: Source,
    shape: TransformerShape,
    requested: str,
    keep: Sequence[str],
    modulation: str = "auto",
) -> tuple[PrecisionChoice, ModulationPlace]:
    """Resolves the precision and the place of the modulation, and refuses what memory cannot hold.

    Args:
        modulation: one of `planning.placement.PLACES`.

    Raises:
        SettingError: the precision or the place is unknown, or a pattern in `keep` matches no
            layer.
        UnavailableError: the card cannot compute it, or memory does not suffice.
    """
    layers = shape.quantizable_layers()
    kept = frozenset(layers) - layers_to_quantize(layers, keep)
    held = {
        name: TransformerBytes(total, weight_bytes(shape, name).modulation)
        for name, total in weights_by_precision(shape, kept).items()
    }
    stored = stored_precision(source)
    if stored in QUANTIZED and not keep:  # taken over as it lies in the file
        held[stored] = TransformerBytes(source.part.bytes, modulation_bytes(source))
    card = card_facts(comfy.model_management.get_torch_device())
    found = choose_transformer(
        requested, modulation, stored=stored, shape=shape, card=card, held=held
    )
    choice, place = found.precision, found.modulation
    weights = {name: sizes.total for name, sizes in held.items()}
    resident = weights
    if place.off_card:
        resident = {name: sizes.total - sizes.modulation for name, sizes in held.items()}
    # What is converted on load is no part of the mapped file any more, wherever it waits.
    copied = weights if stored in ("fp16", "fp32") and choice.name != stored else resident
    if card is not None and found.option is not None:
        _check_card(source, choice.name, found.option, card)
    check_host_memory(
        _host_bytes(source, stored, choice.name, copied, card),
        available_memory(),
        f"{source.path.name} in {choice.name}",
    )
    return choice, place


def card_facts(device: torch.device) -> CardFacts | None:
    """The NVIDIA card that a MODEL is loaded for; None for everything else."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    properties = torch.cuda.get_device_properties(device)
    return CardFacts(properties.name, properties.total_memory, (properties.major, properties.minor))


def _check_card(source: Source, name: str, option: PlanOption, card: CardFacts) -> None:
    """Elsewhere the host offloads what does not fit; with --gpu-only or --highvram it cannot."""
    state = comfy.model_management.vram_state
    stays = state == comfy.model_management.VRAMState.HIGH_VRAM
    if stays and option.moved_bytes:
        needed = option.needs["sampling"]
        raise UnavailableError(
            f"{source.path.name} in {name} needs {format_gib(needed)} and {card.name} has "
            f"{format_gib(max(0, card.total_bytes - KEPT_FREE_BYTES))}: start ComfyUI without "
            "--highvram and --gpu-only so that it can offload"
            + (", or choose int8." if name not in QUANTIZED else ".")
        )


def _host_bytes(
    source: Source, stored: str, name: str, weights: dict[str, int], card: CardFacts | None
) -> int:
    """Peak of host memory that is no mapped file."""
    converted = STORAGE_ONLY & source.part.quantization.formats.keys()
    if name == stored and not converted:
        # Under dynamic VRAM the mapped file itself is the model; else the host copies what is
        # not quantized.
        copies = card is None or not comfy.memory_management.aimdo_enabled
        return weights[name] if copies and name not in QUANTIZED else 0
    return weights[name] + STAGING_BYTES
