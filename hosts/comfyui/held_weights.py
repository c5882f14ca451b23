"""What a MODEL's transformer holds: every weight as it was loaded, and exactly what it stands for.

While a model is on the card its weights may hold the LoRAs of any of its clones, quantized once
more; the loaded ones are then in the backup, which all clones share.
"""

from __future__ import annotations

from collections.abc import Mapping

import comfy.lora
import torch
from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor

from ...errors import CheckpointError, SettingError
from ...loaders.quantization import AUXILIARY
from ...loaders.stored_weights import StoredLayer
from .beside import KEY as BESIDE
from .off_card import named_weights
from .operations import FORMAT_OF_LAYOUT

PREFIX = "diffusion_model."
# ComfyUI's own fp8 has one scale for a weight, which is that of every row too.
FORMATS = {**FORMAT_OF_LAYOUT, "TensorCoreFP8E4M3Layout": "fp8"}
Tensors = Mapping[str, torch.Tensor]


def loaded_weights(model: ModelPatcher) -> dict[str, torch.Tensor]:
    """Returns {name less `diffusion_model.`: tensor}, of a dtype to compute with or quantized.

    Raises:
        CheckpointError: the model is not a Qwen-Image transformer, or of a form that is not known.
        SettingError: it has a LoRA beside its weights.
    """
    # torch.compile and others put modules of their own into a model while it is loaded, and do so
    # again when it samples.
    model.unpatch_model(unpatch_weights=False)
    module = model.model.diffusion_model
    if not isinstance(module, QwenImageTransformer2DModel):
        raise CheckpointError(
            f"the model is a {type(module).__name__} and only Qwen-Image transformers are written: "
            "connect a Qwen-Image MODEL."
        )
    if model.get_additional_models_with_key(BESIDE) or model.get_injections("bypass_lora"):
        raise SettingError(
            "the model has a LoRA beside its weights, which a file cannot hold: merge it, or leave "
            "it out."
        )
    found = {}
    for name, tensor in (*named_weights(module), *module.named_buffers()):
        if name.endswith(".input_scale"):
            continue  # activations are scaled for each token as they come
        backup = model.backup.get(PREFIX + name)
        weight = tensor if backup is None else backup.weight
        if AUXILIARY.search(name) or not weight.is_floating_point():
            raise CheckpointError(
                f"{name!r} of the model is stored in a way that is not written ({weight.dtype}): "
                "load a bf16, fp8 or int8 safetensors file."
            )
        found[name] = weight
    return found


def layer_as_held(
    model: ModelPatcher, layer: str, weights: Tensors, precision: str
) -> StoredLayer | None:
    """Returns the layer as the model holds it, if that is in `precision` and no patch changes it.

    Args:
        weights: what `loaded_weights` returned.
        precision: fp8 or int8.
    """
    name = f"{layer}.weight"
    weight = weights[name]
    if not isinstance(weight, QuantizedTensor) or PREFIX + name in model.patches:
        return None
    if FORMATS.get(weight._layout_cls) != precision:
        return None
    group = _rotated_in(weight)
    form = "int8 ConvRot" if group else precision
    module = model.model.diffusion_model.get_submodule(layer)
    scale, slow = _row_scales(weight), module._full_precision_mm_config
    return StoredLayer(weight._qdata, scale, form, group, slow)


def with_patches(
    model: ModelPatcher, name: str, weight: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Returns a loaded weight plus its LoRAs and other patches, rounded nowhere.

    It is on `device` and in float32, unless it is the weight itself.
    """
    patches = model.patches.get(PREFIX + name)
    if isinstance(weight, QuantizedTensor):
        weight = _dequantized(weight.to(device))
    if patches is None:
        return weight
    weight = weight.to(device, torch.float32, copy=True)
    return comfy.lora.calculate_weight(patches, weight, PREFIX + name)


def _dequantized(weight: QuantizedTensor) -> torch.Tensor:
    """In float32: the host rounds to the dtype that the weight stands for, and rotates in it."""
    if weight._layout_cls not in FORMATS:
        return weight.dequantize()
    form = FORMATS[weight._layout_cls]
    held = StoredLayer(weight._qdata, _row_scales(weight), form, _rotated_in(weight))
    return held.dequantized(torch.float32)


def _row_scales(weight: QuantizedTensor) -> torch.Tensor:
    """[N, 1] float32, also of a weight with one scale."""
    return weight._params.scale.float().reshape(-1, 1).expand(len(weight), 1).contiguous()


def _rotated_in(weight: QuantizedTensor) -> int | None:
    """The group size of ConvRot; None for what is not rotated."""
    params = weight._params
    return params.convrot_groupsize if getattr(params, "convrot", False) else None
