"""Maps the tensors of a part into memory the way ComfyUI does it itself.

`comfy.utils.load_torch_file` maps files and copies nothing. Under dynamic VRAM its tensors also
carry the place in the file that they come from, from which the host reads straight to the card.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import comfy.lora
import comfy.model_management
import comfy.utils
import torch
from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor

from ....errors import CheckpointError, SettingError
from ....loaders.precision import format_bytes
from ....loaders.quantization import AUXILIARY
from ....loaders.quantize import FORMATS, comfy_quant_tensor, layers_to_quantize, quantize_layers
from ....loaders.source import Source
from ....loaders.stored import StoredLayer, canonical_tensors
from ..lora.bypass import KEY as BESIDE
from ..sample.off_card import named_weights
from .linear import FORMAT_OF_LAYOUT
from .precision import STAGING_BYTES


def map_tensors(source: Source) -> dict[str, torch.Tensor]:
    """Returns {name without the part's prefix: tensor on the CPU}; file pages are read on use."""
    tensors: dict[str, torch.Tensor] = {}
    prefix = source.part.prefix
    for path in source.files:
        for name, tensor in comfy.utils.load_torch_file(str(path)).items():
            if name.startswith(prefix):
                tensors[name.removeprefix(prefix)] = tensor
    return tensors


# Brings a transformer's tensors into the precision that was chosen, in the names ComfyUI reads.

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def prepare(
    source: Source,
    tensors: dict[str, torch.Tensor],
    precision: str,
    keep: Sequence[str],
    device: torch.device,
    *,
    named: bool,
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Returns the state dict to load, and sentences about what was changed on the way.

    Args:
        tensors: the file's, mapped; this function reads only what it has to convert.
        precision: bf16, fp16, fp32, fp8 or int8.
        keep: patterns of layers that stay in bf16.
        device: where weights are rounded.
        named: whether the user named the precision: only then one quantized format is converted
            into another, in files that hold both as well.

    Raises:
        CheckpointError: a weight or a scale cannot be used; the message names it.
        SettingError: a pattern in `keep` matches no layer.
    """
    notes = _what_was_stored(source)
    ready: dict[str, torch.Tensor] = {}
    stored: dict[str, StoredLayer] = {}
    for name, entry in canonical_tensors(tensors, source.part.quantization):
        if isinstance(entry, StoredLayer):
            stored[name] = entry
        else:
            ready[name] = entry
    linear = [
        *stored,
        *(_layer(name) for name, tensor in ready.items() if _is_weight(name, tensor)),
    ]
    quantizable = layers_to_quantize(linear)
    kept = quantizable - layers_to_quantize(linear, keep)

    to_round = []
    # What the author of a quantized file left in bf16 stays so.
    if precision in FORMATS and not quantizable & stored.keys():
        to_round = sorted(quantizable - kept)
    for layer, entry in stored.items():
        if precision not in FORMATS or layer in kept:
            ready[f"{layer}.weight"] = entry.dequantized()
        elif named and layer in quantizable and entry.format.split()[0] != precision:
            to_round.append(layer)
        else:
            ready |= entry.tensors(layer)

    def weight_of(layer: str) -> torch.Tensor:
        entry = stored.get(layer)
        return ready[f"{layer}.weight"] if entry is None else entry.dequantized()

    if to_round:
        comfy.model_management.free_memory(STAGING_BYTES, device)
        progress = comfy.utils.ProgressBar(len(to_round))
        # The bar raises when the user cancels the prompt.
        rounded = quantize_layers(
            to_round, weight_of, precision, device, lambda: progress.update(1)
        )
        for layer, (values, scale) in rounded.items():
            ready[f"{layer}.weight"] = values
            ready[f"{layer}.weight_scale"] = scale
            ready[f"{layer}.comfy_quant"] = comfy_quant_tensor(precision)
        notes.append(f"{len(to_round)} layers quantized to {precision}, one scale for each row.")
    if kept and precision in FORMATS:
        extra = sum(ready[f"{layer}.weight"].nbytes for layer in kept) // 2
        notes.append(f"{len(kept)} layers kept in bf16, which takes {format_bytes(extra)} more.")
    return ready, notes


def _is_weight(name: str, tensor: torch.Tensor) -> bool:
    return name.endswith(".weight") and tensor.dim() == 2 and tensor.dtype in FLOATS


def _layer(name: str) -> str:
    return name.removesuffix(".weight")


def _what_was_stored(source: Source) -> list[str]:
    notes = []
    formats = Counter(source.part.quantization.layers.values())
    for name, count in formats.most_common():
        if name == "fp8 e4m3, unscaled":
            notes.append(
                f"{count} layers are stored in e4m3 without scales, which an fp8 GEMM with a fixed "
                "scale for activations spoils: here they are scaled for each token."
            )
        elif name == "fp8 e4m3, scaled":
            notes.append(
                f"{count} layers are stored in e4m3 with one scale each: it is applied to every "
                "row, and activations are scaled for each token instead of by a stored scale."
            )
        elif name.startswith("fp8 e5m2"):
            notes.append(f"{count} layers stored in {name} were converted to bf16.")
    return notes


# What a MODEL's transformer holds: every weight as it was loaded, and exactly what it stands for.
#
# While a model is on the card its weights may hold the LoRAs of any of its clones, quantized once
# more; the loaded ones are then in the backup, which all clones share.

PREFIX = "diffusion_model."
# ComfyUI's own fp8 has one scale for a weight, which is that of every row too.
HELD_FORMATS = {**FORMAT_OF_LAYOUT, "TensorCoreFP8E4M3Layout": "fp8"}
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
    if HELD_FORMATS.get(weight._layout_cls) != precision:
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
    if weight._layout_cls not in HELD_FORMATS:
        return weight.dequantize()
    form = HELD_FORMATS[weight._layout_cls]
    held = StoredLayer(weight._qdata, _row_scales(weight), form, _rotated_in(weight))
    return held.dequantized(torch.float32)


def _row_scales(weight: QuantizedTensor) -> torch.Tensor:
    """[N, 1] float32, also of a weight with one scale."""
    return weight._params.scale.float().reshape(-1, 1).expand(len(weight), 1).contiguous()


def _rotated_in(weight: QuantizedTensor) -> int | None:
    """The group size of ConvRot; None for what is not rotated."""
    params = weight._params
    return params.convrot_groupsize if getattr(params, "convrot", False) else None
