"""Decides all about a transformer before its weights are read, as one `LoadPlan` from the headers,
the card and the memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import comfy.memory_management
import comfy.model_management
import comfy.quant_ops
import torch

from ....errors import UnavailableError
from ....families.comfyui import require
from ....families.registry import is_quantizable
from ....loaders.quantization import GGUF_IN_W4A8, PACKED, STORAGE_ONLY, computed_precision
from ....loaders.quantize import layers_to_quantize
from ....loaders.sizes import is_cast, loaded_bytes
from ....loaders.source import Source, check_complete, joined_bytes
from ....loaders.stored import PACKED_NAMES
from ....loaders.writer import KeptFile
from ....machine.memory import available_memory
from ....optimizations.linear import why_not_int8
from ....planning.bytes import Sizes, weight_bytes
from ....planning.phases import KEPT_FREE_BYTES
from ....planning.plan import check_tensor_cores, left_as_stored
from ....planning.request import AUTO
from ....spec.formats import BYTES_PER_WEIGHT, QUANTIZED, CardFacts, format_gib
from ....spec.sizes import STAGING_BYTES
from ....spec.transformer import TransformerShape
from ...loading import AS_STORED, LOADER_PRECISIONS, LoadDecision, check_known, decide_load

STORED = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}


@dataclass(frozen=True, kw_only=True)
class LoadPlan(LoadDecision):
    """A transformer as it is to be loaded; nothing in it is left to choose."""

    source: Source
    shape: TransformerShape
    left: frozenset[str]  # layers that stay in bf16 when the others are quantized
    # whether one quantized format is converted into another: where the user named one, or `auto`
    # found that the file's products do not run
    named: bool
    automatic: bool  # whether the user named no precision
    modulation_bytes: int  # of the modulation weights in that precision
    # why weights of 4 and 6 bits stay so, and are int8 for the length of a product; empty where
    # they become int8 on load
    packed: str = ""
    rounded: bool = False  # whether weights are rounded on load
    kept: KeptFile | None = None  # where these are kept, if they are


def plan_load(
    source: Source,
    requested: str,
    keep: Sequence[str] = (),
    modulation: str = "auto",
    keep_quantized: bool = False,
) -> LoadPlan:
    """Decides on precision and place, and refuses what memory cannot hold."""
    shape = host_shape(source)
    layers = shape.quantizable_layers()
    left = frozenset(layers) - layers_to_quantize(layers, keep)
    stored = _stored_precision(source)
    sizes: Sizes = {
        precision: weight_bytes(shape, precision, left) for precision in BYTES_PER_WEIGHT
    }
    if stored in QUANTIZED and not keep:  # taken over as it lies in the file
        sizes = {**sizes, stored: loaded_bytes(source)}
    card = card_facts(comfy.model_management.get_torch_device())
    gguf = source.part.quantization.gguf
    about: dict[str, Any] = {"stored": stored, "shape": shape, "card": card, "gguf": gguf}
    about["cast"] = is_cast(source.part)
    decide = functools.partial(decide_load, requested, modulation, **about)
    small = loaded_bytes(source, packed=True) if _knows_packed(source) and not keep else None
    decision = decide(sizes=sizes, packed=small)
    needed = _host_bytes(source, stored, decision, sizes, card)
    packed = "" if small is None or decision.precision != stored else _why_packed(decision, needed)
    if packed:
        # A mapped file holds these weights already, and blocks of GGUF become them.
        sizes, needed = {**sizes, stored: small}, small.total + STAGING_BYTES if gguf else 0
        if decision.option is None or not decision.option.setting.packed:
            decision = decide(sizes=sizes)
    name = decision.precision
    _check_card(source, decision, card)
    kept, rounded = None, name in QUANTIZED and (name != stored or gguf)
    if rounded and (keep_quantized or requested == AUTO):
        there = (found := KeptFile(source, name, keep)).open()
        needed = 0 if there else needed  # a mapped file
        kept = found if there or keep_quantized else None
    if rounded and not gguf and left_as_stored(requested, needed, free := available_memory()):
        why = f"auto: {name} takes {format_gib(needed)} of system RAM, {format_gib(free)} is free"
        asked = AS_STORED if stored in QUANTIZED else "bf16"
        decision = decide_load(asked, modulation, **about, sizes=sizes, because=why)
        name, rounded, kept = decision.precision, False, None
        needed = _host_bytes(source, stored, decision, sizes, card)
    check_host_memory(needed, f"{source.path.name} in {'w4a8' if packed else name}")
    return LoadPlan(
        **vars(decision),
        source=source,
        shape=shape,
        left=left,
        named=requested in QUANTIZED or (rounded and stored in QUANTIZED),
        automatic=requested == AUTO,
        modulation_bytes=sizes[name].modulation,
        packed=packed,
        rounded=rounded,
        kept=kept,
    )


def check_settings(source: Source, requested: str, keep: Sequence[str]) -> None:
    """Refuses, from headers and the card alone, settings that `plan_load` refuses."""
    check_known("precision", requested, LOADER_PRECISIONS)
    layers_to_quantize(host_shape(source).quantizable_layers(), keep)
    card = card_facts(comfy.model_management.get_torch_device())
    if card is not None and requested in QUANTIZED:
        check_tensor_cores(requested, card, LOADER_PRECISIONS)


def card_facts(device: torch.device) -> CardFacts | None:
    """Returns the NVIDIA card that a MODEL is loaded for; None for everything else."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    properties = torch.cuda.get_device_properties(device)
    sm = properties.major, properties.minor
    return CardFacts(properties.name, properties.total_memory, sm, no_int8=why_not_int8(device))


def host_shape(source: Source) -> TransformerShape:
    """Returns a transformer's sizes as ComfyUI builds it."""
    shape = check_complete(source)
    require(shape.family, source.path)
    return shape.in_comfyui()


def check_host_memory(needed: int, what: str) -> None:
    """Refuses before reading what system RAM cannot hold."""
    available = available_memory()
    if needed > available:
        raise UnavailableError(
            f"{what} needs {format_gib(needed)} of system RAM, and {format_gib(available)} is "
            "available: close other programs, or load an fp8 or int8 file, which takes about half "
            "of bf16."
        )


def _stored_precision(source: Source) -> str:
    layers = source.part.quantization.layers
    formats = [form for layer, form in layers.items() if is_quantizable(layer)]
    if formats:  # others, such as e5m2, are converted
        return computed_precision(formats) or "bf16"
    plain = {name: entry["bytes"] for name, entry in source.part.dtypes.items() if name in STORED}
    return STORED[max(plain, key=plain.__getitem__)] if plain else "bf16"


def _knows_packed(source: Source) -> bool:
    """Returns whether weights are in 4 or 6 bits, and this ComfyUI's layers take all."""
    quantization = source.part.quantization
    if joined_bytes(source):  # each has a codebook of its own: together they become int8
        return False
    packed = (layer for layer, form in quantization.layers.items() if form in PACKED)
    names = {quantization.settings[layer]["format"] for layer in packed}
    if not GGUF_IN_W4A8.isdisjoint(quantization.formats):
        names.add(PACKED_NAMES[4])
    return bool(names) and names <= comfy.quant_ops.QUANT_ALGOS.keys()


def _why_packed(decision: LoadDecision, needed: int) -> str:
    """Says in one clause why weights stay in 4 or 6 bits; empty where they become int8."""
    if decision.option is not None and decision.option.setting.packed:
        return "in int8 they would not fit in VRAM"
    return "system RAM has no room for them in int8" if needed > available_memory() else ""


def _check_card(source: Source, decision: LoadDecision, card: CardFacts | None) -> None:
    # Elsewhere the host offloads what does not fit; with --gpu-only or --highvram it cannot.
    name, option = decision.precision, decision.option
    state = comfy.model_management.vram_state
    stays = state == comfy.model_management.VRAMState.HIGH_VRAM
    if stays and card is not None and option is not None and option.moved_bytes:
        needed = option.needs["sampling"]
        raise UnavailableError(
            f"{source.path.name} in {name} needs {format_gib(needed)}, but {card.name} has "
            f"{format_gib(max(0, card.total_bytes - KEPT_FREE_BYTES))}: start ComfyUI without "
            "--highvram and --gpu-only, so that it can offload"
            + (", or choose int8." if name not in QUANTIZED else ".")
        )


def _host_bytes(
    source: Source,
    stored: str,
    decision: LoadDecision,
    sizes: Sizes,
    card: CardFacts | None,
) -> int:
    name, size = decision.precision, sizes[decision.precision]
    weights, formats = size.total, source.part.quantization.formats.keys()
    # What is converted on load is no part of the mapped file any more, wherever it waits.
    gguf = source.part.quantization.gguf
    mapped = (stored not in ("fp16", "fp32") or name == stored) and not gguf
    if decision.off_card and mapped and not PACKED & formats:
        weights -= size.modulation
    plain = not {name, stored} & {*QUANTIZED}
    if (name == stored or plain) and not gguf and not (STORAGE_ONLY | PACKED) & formats:
        # Under dynamic VRAM the mapped file itself is the model, and fp16 and fp32 become bf16 on
        # the card; else the host copies what is not quantized.
        copies = card is None or not comfy.memory_management.aimdo_enabled
        return weights if copies and name not in QUANTIZED else joined_bytes(source)
    return weights + STAGING_BYTES
