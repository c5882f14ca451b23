"""Fits a text encoder's file to ComfyUI: its sizes, and its weights as ComfyUI loads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import torch

from ....errors import CheckpointError
from ....families.parts import text_encoder_name_to_native
from ....families.registry import text_encoder_titled
from ....loaders.quantize import check_finite
from ....loaders.source import Source, check_names, left_out, native_names, shapes_of
from ....loaders.stored import KINDS, MARKER, StoredLayer, accompanies, stored_layers
from ....spec.formats import MULTIPLIED, QUANTIZED
from .encoder_kind import EncoderKind, kind_of
from .report import FLOAT_NAMES
from .weights import quantize_shown

HEAD_DIM = 128  # fixed in ComfyUI's class
HEAD = "model.lm_head."
VISION = "visual."
NO_HEAD = "lm_head left out, because prompts are encoded and not continued"
ONLY_7B = "Qwen-Image needs the 7B, which is 3584 wide: download it from the model's publisher."


@dataclass(frozen=True)
class TextEncoderLayout:
    kind: EncoderKind
    names: Mapping[str, str]  # {native name: name in the file, less its prefix} of what is loaded
    config: Mapping[str, Any]  # the sizes that differ from the published 7B
    vision: bool
    vocabulary: int  # rows of the embedding
    notes: tuple[str, ...]  # sentences about what is left out


def read_layout(source: Source) -> TextEncoderLayout:
    """Reads names and shapes from the headers."""
    kind, dims = kind_of(source), source.part.dims
    encoder = text_encoder_titled(source.part.family)
    size = dims.get("hidden"), source.part.blocks
    if size in encoder.published and size != (encoder.hidden, encoder.layers):
        raise CheckpointError(
            f"This is the {encoder.published[size]} of {kind.title}: {ONLY_7B}", source.path
        )
    config = _model_config(source, kind)
    names = native_names(source, text_encoder_name_to_native)
    notes = []
    if any(name.startswith(HEAD) for name in names):
        notes.append(NO_HEAD)
    vision = dims.get("vision_dim") == kind.vision_width
    if not vision:
        found = dims.get("vision_dim")
        notes.append(
            "no vision tower: the text encode nodes of Edit cannot take images"
            if found is None
            else (
                f"vision tower left out, because it is {found} wide and ComfyUI's is "
                f"{kind.vision_width}: the text encode nodes of Edit cannot take images"
            )
        )
    expected = shapes_of(kind.model(config, torch.bfloat16, "meta", torch.nn))
    if not vision:
        expected = {name: expected[name] for name in expected if not name.startswith(VISION)}
    loaded = {native: name for native, name in names.items() if _has_place(native, expected)}
    shapes = {native: source.tensors[names[native]].shape for native in loaded.keys() & expected}
    what = f"ComfyUI's {kind.title}"
    check_names(source.path, shapes, expected, what)
    told = (HEAD,) if vision else (HEAD, VISION)
    notes += left_out([it for it in names if it not in loaded and not it.startswith(told)], what)
    return TextEncoderLayout(
        kind=kind,
        names=loaded,
        config=config,
        vision=vision,
        vocabulary=int(dims["vocabulary"]),
        notes=tuple(notes),
    )


def _has_place(native: str, expected: Mapping[str, Any]) -> bool:
    layer = native.rpartition(".")[0]
    weighs = native == MARKER or (accompanies(native) and f"{layer}.weight" in expected)
    return weighs or native in expected


def _model_config(source: Source, kind: EncoderKind) -> dict[str, Any]:
    dims = source.part.dims
    nested = source.config.get("text_config")
    settings = {**source.config, **nested} if isinstance(nested, dict) else dict(source.config)
    found = {
        "vocab_size": dims.get("vocabulary"),
        "hidden_size": dims.get("hidden"),
        "intermediate_size": dims.get("intermediate"),
        "num_hidden_layers": source.part.blocks,
        "num_attention_heads": _heads(source, "q_dim", settings.get("num_attention_heads")),
        "num_key_value_heads": _heads(source, "kv_dim", settings.get("num_key_value_heads")),
        "rms_norm_eps": settings.get("rms_norm_eps"),
        "rope_theta": _rope_theta(settings),
    }
    missing = [
        name for name in ("vocab_size", "hidden_size", "intermediate_size") if not found[name]
    ]
    if missing:
        raise CheckpointError(
            f"The tensors that give the text encoder's {missing[0]} are missing: download the "
            "file again.",
            source.path,
        )
    published = kind.config()
    return dict(kind.fixed) | {
        name: value
        for name, value in found.items()
        if value is not None and value != getattr(published, name)
    }


def _heads(source: Source, dim: str, declared: object) -> int:
    width = int(source.part.dims.get(dim, 0))
    heads, rest = divmod(width, HEAD_DIM)
    if rest or not heads or declared not in (None, heads):
        raise CheckpointError(
            f"This text encoder projects to {width} in {declared or 'an unknown number of'} "
            f"heads, but ComfyUI needs heads of {HEAD_DIM}: {ONLY_7B}",
            source.path,
        )
    return heads


def _rope_theta(settings: Mapping[str, Any]) -> float | None:
    nested = settings.get("rope_parameters")
    inner = nested.get("rope_theta") if isinstance(nested, dict) else None
    return settings.get("rope_theta", inner)


# Brings the weights of a Qwen2.5-VL into a form that ComfyUI's own layers load.
#
# ComfyUI computes this encoder in fp32 and dequantizes each layer for it, so a quantized text
# encoder saves memory and reading, and only the error of the weights counts. What ComfyUI has no
# format for becomes bf16.

LANGUAGE_LINEAR = re.compile(
    r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.weight"
)


@dataclass(frozen=True)
class TextEncoderTensors:
    tensors: dict[str, torch.Tensor]  # {native name: tensor}; mapped, unless they were converted
    converted: bool  # whether any is a new tensor in plain memory
    precision: str  # what most of the language model is loaded in, in words
    notes: tuple[str, ...]  # sentences about what was changed


def text_encoder_tensors(
    source: Source, layout: TextEncoderLayout, mapped: Mapping[str, Any], precision: str
) -> TextEncoderTensors:
    """Converts what has to be; of the rest nothing is read but vectors and scales."""
    target = precision if precision in MULTIPLIED else None
    tensors = {native: mapped[name] for native, name in layout.names.items()}
    stored = _stored(source, layout, tensors)
    ready: dict[str, torch.Tensor] = {}
    to_round: list[str] = []
    converted = False
    for native, tensor in tensors.items():
        if accompanies(native):
            continue
        layer = native.removesuffix(".weight")
        entry = stored.get(layer)
        fits = entry is not None and _fits_core(entry)
        if target in QUANTIZED and LANGUAGE_LINEAR.fullmatch(native):
            if fits and KINDS[tensor.dtype] == target:
                ready |= entry.tensors(layer)
            else:
                to_round.append(layer)
        elif fits and target != "bf16":
            ready |= entry.tensors(layer)
        else:
            plain = entry.dequantized() if entry else _plain(tensor, target)
            if plain is not tensor or tensor.dim() < 2:
                check_finite(source.path, native, plain)
            converted |= plain is not tensor
            ready[native] = plain

    def weight_of(layer: str) -> torch.Tensor:
        entry = stored.get(layer)
        return entry.dequantized(torch.float32) if entry else tensors[f"{layer}.weight"]

    if to_round:
        device = comfy.model_management.get_torch_device()
        # ComfyUI's own fp8 has one scale for the whole weight.
        per_row = target != "fp8"
        ready |= quantize_shown(source, to_round, weight_of, target, device, per_row=per_row)
    return TextEncoderTensors(
        tensors=ready,
        converted=converted or bool(to_round),
        precision=_precision(ready),
        notes=tuple(_notes(stored, to_round, target)),
    )


def _stored(
    source: Source, layout: TextEncoderLayout, tensors: Mapping[str, torch.Tensor]
) -> dict[str, StoredLayer]:
    declared = source.part.quantization.settings
    settings = {
        native.removesuffix(".weight"): declared.get(name.removesuffix(".weight"), {})
        for native, name in layout.names.items()
    }
    try:
        return stored_layers(tensors, settings)
    except CheckpointError as error:
        raise CheckpointError(error, source.path) from error


def _fits_core(entry: StoredLayer) -> bool:
    # Their fp8 has one scale for the weight.
    return entry.weight.dtype == torch.int8 or entry.scale.dim() == 0


def _plain(tensor: torch.Tensor, target: str | None) -> torch.Tensor:
    keep = tensor.dtype in FLOAT_NAMES and target is None
    return tensor if keep else tensor.to(torch.bfloat16)


def _precision(tensors: Mapping[str, torch.Tensor]) -> str:
    names = {**FLOAT_NAMES, **KINDS}
    found = {
        names[tensor.dtype] for name, tensor in tensors.items() if LANGUAGE_LINEAR.fullmatch(name)
    }
    return " and ".join(sorted(found))


def _notes(stored: Mapping[str, StoredLayer], rounded: list[str], target: str | None) -> list[str]:
    notes = []
    if rounded:
        scales = "one scale for each " + ("weight" if target == "fp8" else "row")
        notes.append(
            f"{len(rounded)} layers quantized to {target}, {scales}; not embedding, norms and "
            "vision tower"
        )
    if twice := sum(layer in stored for layer in rounded):
        notes.append(f"{twice} of them were already quantized in the file: both errors add up")
    if stored and target == "bf16":
        notes.append("dequantized, which does not restore what the file's format lost")
    elif odd := sum(not _fits_core(stored[layer]) for layer in stored.keys() - set(rounded)):
        notes.append(
            f"{odd} layers in fp8 with a scale for each row became bf16, because ComfyUI's layers "
            "have one scale for the whole weight"
        )
    fp8 = [it.scale for it in stored.values() if it.format == "fp8" and it.scale.dim() == 0]
    if any(float(scale) == 1.0 for scale in fp8):
        notes.append(
            "the file's fp8 has no scales, which loses small weights: a scaled fp8 or a bf16 file "
            "follows prompts more closely"
        )
    return notes
