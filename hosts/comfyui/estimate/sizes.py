"""Reads the true sizes of a MODEL, CLIP and VAE where they lie, without moving them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import comfy.model_management
import comfy.sd
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor

from ....errors import SettingError
from ....families.comfyui import kind_of, kind_of_vae
from ....families.registry import (
    blocks_of,
    counted_vae,
    load,
    text_encoders,
)
from ....optimizations.attention.choice import asked_name
from ....planning.request import FAST, ON_PROCESSOR, Loras
from ....planning.step_cache import CacheSettings
from ....spec.formats import FORMATS, KITCHEN_INT8, QUANTIZED
from ....spec.transformer import OFF_CARD, ON_CARD, TransformerShape
from ....spec.vae import VaeShape
from ..contract import read_sizes, transformer_of, unsupported_model
from ..decode.fused import vae_shape
from ..linear import LAYOUTS
from ..load.report import FLOAT_NAMES
from ..lora.bypass import split_patches
from ..sample.attention import SLOT, SlotAttention
from ..sample.off_card import named_weights, off_card_layers
from ..sample.run import NAG_KEY, STEP_CACHE_KEY

FOREIGN = "another extension's quantization"
COMPUTED_IN = LAYOUTS | {form.packed: name for name, form in FORMATS.items() if form.packed}


@dataclass(frozen=True)
class TrueModel:
    shape: TransformerShape
    bytes: int  # of all weights as they are stored, on the card or off it
    modulation_bytes: int  # of the modulation among them
    precision: str  # bf16, fp8 or int8, as which it is counted
    stored: str  # how most of it is stored, where that is another one
    computed: str  # bf16, fp16 or fp32, in which ComfyUI computes what is not quantized
    modulation: str | None  # where the modulation waits; None where no card has decided it
    loras: Loras  # on it; of bypass LoRAs the rank that takes as many bytes
    timestep_zero: bool  # whether references are modulated as at timestep zero
    cache: CacheSettings | None  # settings of its step cache; None without one
    attention: str | None  # "fast" or "kitchen_int8", where one is to run; else None
    cards: int  # that each have a copy of it
    nag_tokens: int  # of NAG's negative prompt; 0 without NAG


@dataclass(frozen=True)
class TrueClip:
    bytes: int  # of the whole text encoder as it is stored
    precision: str  # bf16, fp8 or int8, in which most of it is stored
    place: str | None  # where it is to stay; None where nobody has asked
    name: str


def model_sizes(model: ModelPatcher) -> TrueModel:
    """Reads a MODEL."""
    if unsupported_model(model):
        raise SettingError(
            f"the MODEL is {type(model.model).__name__}, but estimates are only for Qwen-Image "
            "(2512, Edit, Layered, 2.1): connect one of these, or none."
        )
    return read_sizes(_model_sizes, model)


def _model_sizes(model: ModelPatcher) -> TrueModel:
    transformer = transformer_of(model)
    kind = kind_of(model.model)
    shape = kind.shape(transformer)
    stored = stored_in(transformer)
    cache, guidance = map(model.get_attachment, (STEP_CACHE_KEY, NAG_KEY))
    on_processor = comfy.model_management.is_device_cpu(model.load_device)
    place = None if on_processor else ON_CARD
    return TrueModel(
        shape=shape,
        bytes=comfy.model_management.module_size(transformer),
        modulation_bytes=sum(
            comfy.model_management.module_size(modulation)
            for block in blocks_of(transformer)
            for modulation in map(block.get_submodule, shape.block.modulation.values())
        ),
        precision=stored if stored in QUANTIZED else "bf16",
        stored="" if stored in (*QUANTIZED, "bf16") else stored,
        computed=_name(model.model.get_dtype_inference()),
        modulation=OFF_CARD if off_card_layers(transformer) else place,
        loras=_loras(model, shape),
        timestep_zero=kind.timestep_zero(transformer),
        cache=None if cache is None else cache.settings,
        attention=_attention(model),
        cards=1 + len(model.get_additional_models_with_key("multigpu")),
        nag_tokens=0 if guidance is None else guidance.tokens,
    )


def _attention(model: ModelPatcher) -> str | None:
    filled = model.model_options["transformer_options"].get(SLOT)
    name = asked_name(filled.name) if isinstance(filled, SlotAttention) else None
    return name if name in (FAST, KITCHEN_INT8) else None


def clip_sizes(clip: comfy.sd.CLIP) -> TrueClip:
    """Reads a CLIP."""
    encoder = getattr(clip, "cond_stage_model", None)
    known = (it for it in text_encoders() if load(it.comfyui).is_one(encoder))
    found = next(known, None)
    if found is None:
        raise SettingError(
            f"the CLIP's text encoder is a {type(encoder).__name__}, but Qwen-Image's is "
            "Qwen2.5-VL: connect Qwen-Image's CLIP, or none."
        )
    place = getattr(clip, "placement", "auto")  # of our loader's
    # On a machine without a card everything computes on the CPU, which nobody has asked for.
    has_card = not comfy.model_management.is_device_cpu(comfy.model_management.get_torch_device())
    if has_card and comfy.model_management.is_device_cpu(clip.patcher.load_device):
        place = ON_PROCESSOR
    stored = stored_in(encoder)
    return TrueClip(
        bytes=comfy.model_management.module_size(encoder),
        precision=stored if stored in QUANTIZED else "bf16",
        place=None if place == "auto" else place,
        name=found.name,
    )


def vae_sizes(vae: comfy.sd.VAE) -> tuple[VaeShape, int]:
    """Reads a VAE's shape, and the bytes of its weights as they are stored."""
    model = getattr(vae, "first_stage_model", None)
    try:
        kind = kind_of_vae(model)
        shape = counted_vae(kind.shape(model) if kind and kind.strips else vae_shape(model))
    except SettingError as error:
        raise SettingError(
            f"the VAE is a {type(model).__name__}, but Qwen-Image needs its own VAE: connect "
            "Qwen-Image's VAE, or none."
        ) from error
    return shape, comfy.model_management.module_size(model)


def stored_in(module: torch.nn.Module) -> str:
    """Names the form of most elements of weight matrices."""
    elements: Counter[str] = Counter()
    for _, weight in named_weights(module):
        if weight.ndim == 2:
            elements[_form(weight)] += weight.numel()
    return elements.most_common(1)[0][0] if elements else "bf16"


def _form(weight: torch.Tensor) -> str:
    weight = getattr(weight, "data", weight)
    if isinstance(weight, QuantizedTensor):
        return COMPUTED_IN.get(weight._layout_cls, weight._layout_cls)
    # Blocks of whole numbers, as GGUF's: what they are is known to what loaded them.
    return _name(weight.dtype) if weight.is_floating_point() else FOREIGN


def _name(dtype: torch.dtype) -> str:
    return FLOAT_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _loras(model: ModelPatcher, shape: TransformerShape) -> Loras:
    bypass = split_patches(model).bypass
    if not bypass:
        return Loras(count=max(map(len, model.patches.values()), default=0), mode="merge")
    count, size = sum(it.model.count for it in bypass), sum(it.model_size() for it in bypass)
    of_rank_one = 2 * sum(rows + columns for rows, columns in shape.quantizable_layers().values())
    rank = max(1, math.ceil(size / count / of_rank_one))
    return Loras(count=count, rank=rank, mode="bypass")
