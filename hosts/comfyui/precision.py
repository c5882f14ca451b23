"""Chooses a transformer's precision from its header, the card and the memory, before reading it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import comfy.memory_management
import comfy.model_management
import torch

from ...errors import UnavailableError
from ...loaders.precision import PrecisionChoice, check_host_memory, choose_transformer_precision
from ...loaders.quantization import STORAGE_ONLY
from ...loaders.quantize import layers_to_quantize
from ...loaders.source import Source
from ...optimizations.resources import available_memory
from ...planning.memory import (
    GIB,
    QUANTIZED,
    USUAL_SIDE,
    CardFacts,
    TransformerShape,
    format_gib,
    step_activation_bytes,
    weight_bytes,
    weights_by_precision,
)
from ...planning.placement import ON_CARD, ModulationPlace, place_modulation

MODULATION_LAYER = re.compile(r"\.(img|txt)_mod\.1\.")
STORED = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
# What the loading itself takes beside the result: the largest layers that are in work.
STAGING_BYTES = 2 * GIB


def stored_precision(source: Source) -> str:
    """The precision that most of the weights are stored in."""
    layers = source.part.quantization.layers
    formats = Counter(layers[layer] for layer in layers_to_quantize(layers))
    for name, _ in formats.most_common():
        if name.startswith("int8"):
            return "int8"
        if name.startswith("fp8 e4m3"):
            return "fp8"
    if formats:  # e5m2, which is converted
        return "bf16"
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
    weights = weights_by_precision(shape, kept)
    modulations = {name: weight_bytes(shape, name).modulation for name in weights}
    stored = stored_precision(source)
    if stored in QUANTIZED and not keep:
        weights[stored] = source.part.bytes  # taken over as it lies in the file
        modulations[stored] = _modulation_bytes(source)
    card = card_facts(comfy.model_management.get_torch_device())
    activations = step_activation_bytes(shape, width=USUAL_SIDE, height=USUAL_SIDE)
    fewest = weights
    if card is not None and modulation != ON_CARD:
        fewest = {name: size - modulations[name] for name, size in weights.items()}
    choice = choose_transformer_precision(
        requested, stored=stored, weights=fewest, activations=activations, card=card
    )
    place = place_modulation(
        modulation,
        weights=weights[choice.name],
        modulation=modulations[choice.name],
        activations=activations,
        card=card,
    )
    resident = fewest if place.off_card else weights
    # What is converted on load is no part of the mapped file any more, wherever it waits.
    copied = weights if stored in ("fp16", "fp32") and choice.name != stored else resident
    if card is not None:
        _check_card(source, choice.name, resident[choice.name], activations, card)
    check_host_memory(
        _host_bytes(source, stored, choice.name, copied, card),
        available_memory(),
        f"{source.path.name} in {choice.name}",
    )
    return choice, place


def _modulation_bytes(source: Source) -> int:
    """Of a file that is taken over as it is."""
    tensors = source.tensors.items()
    return sum(info.nbytes for name, info in tensors if MODULATION_LAYER.search(name))


def card_facts(device: torch.device) -> CardFacts | None:
    """The NVIDIA card that a MODEL is loaded for; None for everything else."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    properties = torch.cuda.get_device_properties(device)
    return CardFacts(properties.name, properties.total_memory, (properties.major, properties.minor))


def _check_card(source: Source, name: str, weights: int, activations: int, card: CardFacts) -> None:
    """Elsewhere the host offloads what does not fit; with --gpu-only or --highvram it cannot."""
    state = comfy.model_management.vram_state
    stays = state == comfy.model_management.VRAMState.HIGH_VRAM
    if stays and weights > card.weight_budget(activations):
        raise UnavailableError(
            f"{source.path.name} in {name} needs {format_gib(weights + activations)} and "
            f"{card.name} has {format_gib(card.weight_budget(0))}: start ComfyUI without "
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
