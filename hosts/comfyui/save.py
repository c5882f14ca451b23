"""Writes a MODEL's transformer in fp8 or int8, with the LoRAs that were merged into it.

A LoRA is added to the weight that was loaded and the sum is rounded once, so that from a bf16 MODEL
nothing is rounded twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import comfy.lora
import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor

from ...errors import CheckpointError, SettingError, UnavailableError
from ...families.comfyui import kind_of_transformer
from ...families.registry import attention_names, blocks_of
from ...loaders.quantization import ATTENTION_CONFIG, AUXILIARY
from ...loaders.quantize import is_finite
from ...loaders.quantized_file import (
    READERS,
    check_destination,
    check_precision,
    choose_layers,
    specs_of_layer,
)
from ...loaders.slabs import RoundedLayer, quantize_layers
from ...loaders.stored import StoredLayer
from ...loaders.writer import (
    SAFETENSORS_DTYPES,
    SafetensorsLayout,
    file_metadata,
    write_safetensors,
)
from ...spec.formats import RowFormat, format_gib
from ...spec.sizes import STAGING_BYTES
from .linear import LAYOUTS, rotation_of
from .sample.attention import file_choice
from .sample.off_card import named_weights

PREFIX = "diffusion_model."
FOLDER = "diffusion_models"
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class SavedModel:
    path: Path
    precision: str
    bytes: int  # of the file
    quantized: int  # layers in `precision`
    twice: int  # of them the model stores in another quantized form, or with a LoRA
    merged: int  # tensors that LoRAs or other patches changed

    @property
    def name(self) -> str:
        """As loaders offer it: with its folders inside models/diffusion_models."""
        parts = self.path.parts
        if FOLDER not in parts:
            return self.path.name
        return "/".join(parts[len(parts) - parts[::-1].index(FOLDER) :])

    def text(self) -> str:
        lines = [
            f"{self.name}: {format_gib(self.bytes)}, {self.quantized} layers in "
            f"{self.precision}, for {READERS[self.precision]}",
            f"In models/{FOLDER}: press R, then choose the file in Load Qwen-Image Model",
        ]
        if self.merged:
            lines.append(f"{self.merged} weights have LoRAs merged into them")
        if self.twice:
            lines.append(
                f"{self.twice} layers were already quantized and are rounded again, so both "
                "errors add up: start from bf16 to round once"
            )
        return "\n".join(lines)


def save_quantized(
    model: ModelPatcher,
    destination: Path,
    precision: str,
    keep: Sequence[str] = (),
    *,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SavedModel:
    """Writes the file whole, or not at all.

    Layers that are quantized in `precision` already, and that no LoRA changes, are written as they
    are. Everything else that is not quantized becomes bf16.

    Args:
        model: of any loader; loaded on a card or not.
        destination: a .safetensors file; its folder is created.
        precision: fp8 or int8.
        keep: shell patterns of layers that stay in bf16, or become it.
        progress: called with the tensors that are done and their number; may raise to cancel.

    Raises:
        SettingError: the precision, a pattern or the destination cannot be used, or the model has a
            bypass LoRA.
        CheckpointError: the model is not a Qwen-Image transformer, or a weight is not finite.
        UnavailableError: the disk does not take the file.
    """
    check_precision(precision)
    weights = loaded_weights(model)
    layers = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
    chosen, kept = choose_layers(layers, keep)
    taken_over: dict[str, StoredLayer] = {}
    for layer in set(layers) - kept:
        entry = _as_loaded(model, layer, weights, precision, layer in chosen)
        if entry is not None:
            taken_over[layer] = entry
    quantized = chosen | taken_over.keys()
    specs: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, weight in weights.items():
        layer, shape = name.removesuffix(".weight"), tuple(weight.shape)
        if layer in quantized:
            specs |= specs_of_layer(layer, shape, precision, taken_over.get(layer))
        elif name.endswith(ATTENTION_CONFIG):
            specs[name] = ("U8", shape)
        else:  # only a marker has no elements
            specs[name] = ("BF16" if weight.numel() else "F32", shape)
    config = kind_of_transformer(model.model.diffusion_model).settings(model.model.diffusion_model)
    layout = SafetensorsLayout(specs, file_metadata(precision, keep, config))
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnavailableError(
            f"The folder cannot be created ({error.strerror}): choose another name.",
            destination.parent,
        ) from error
    check_destination(destination, overwrite=overwrite)
    done = 0
    with write_safetensors(destination, layout) as file:

        def take(tensors: dict[str, torch.Tensor]) -> None:
            nonlocal done
            file.write_all(tensors)
            done += 1
            progress(done, len(weights))

        _stream(model, weights, layout, taken_over, chosen, precision, take)
    twice = [
        layer
        for layer in quantized - taken_over.keys()
        if isinstance(weights[f"{layer}.weight"], QuantizedTensor)
    ]
    return SavedModel(
        path=destination,
        precision=precision,
        bytes=layout.file_bytes,
        quantized=len(quantized),
        twice=len(twice),
        merged=sum(PREFIX + name in model.patches for name in weights),
    )


def _stream(
    model: ModelPatcher,
    weights: Tensors,
    layout: SafetensorsLayout,
    taken_over: Mapping[str, StoredLayer],
    chosen: Collection[str],
    precision: str,
    take: Callable[[dict[str, torch.Tensor]], None],
) -> None:
    """Hands out what becomes of each weight, on the CPU; those that are rounded come last."""
    device = comfy.model_management.get_torch_device()
    comfy.model_management.free_memory(STAGING_BYTES, device)
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        if layer in taken_over:
            tensors = taken_over[layer].tensors(layer)
        elif layer in chosen:
            continue
        else:
            dtype = SAFETENSORS_DTYPES[layout.tensors[name].dtype]
            tensors = {name: _with_patches(model, name, weight, device).to(dtype)}
        if not all(map(is_finite, tensors.values())):
            raise _not_finite(name)
        take({name: tensor.cpu() for name, tensor in tensors.items()})

    def weight_of(layer: str) -> torch.Tensor:
        name = f"{layer}.weight"
        return _with_patches(model, name, weights[name], device)

    def take_rounded(rounded: RoundedLayer) -> None:
        layer, values, scale, form, _ = rounded
        take(StoredLayer.rounded(values, scale, form).tensors(layer))

    to_round = sorted(layer for layer in chosen if layer not in taken_over)
    quantize_layers(to_round, weight_of, precision, device, take_rounded, _not_finite)


def _not_finite(name: str) -> CheckpointError:
    return CheckpointError(
        f"The model with its LoRAs has NaN or infinity in {name!r}: leave the LoRAs out, or load "
        "the model again."
    )


# What a MODEL's transformer has loaded: every weight as its file had it, and what it stands for.
#
# While a model is on the card its weights may have LoRAs of any of its clones in them, quantized
# once more; the loaded ones are then in the backup, which all clones share.


def loaded_weights(model: ModelPatcher) -> dict[str, torch.Tensor]:
    """Returns {name less `diffusion_model.`: tensor}, of a dtype to compute with or quantized, and
    what the files say of attention, uint8.
    """
    # torch.compile and others put modules of their own into a model while it is loaded, and do so
    # again when it samples.
    model.unpatch_model(unpatch_weights=False)
    module = model.model.diffusion_model
    if kind_of_transformer(module) is None:
        raise CheckpointError(
            f"The model is a {type(module).__name__}, but only Qwen-Image transformers can be "
            "saved: connect a Qwen-Image MODEL."
        )
    if model.get_injections("bypass_lora"):
        raise SettingError(
            "The model has a LoRA bypass of ComfyUI's, which cannot be saved: load it with "
            "Load Qwen-Image LoRA or Load LoRA, or leave it out."
        )
    found = {}
    for name, tensor in (*named_weights(module), *module.named_buffers()):
        if name.endswith(".input_scale"):
            continue  # activations are scaled for each token as they come
        backup = model.backup.get(PREFIX + name)
        weight = tensor if backup is None else backup.weight
        if AUXILIARY.search(name) or not weight.is_floating_point():
            raise CheckpointError(
                f"The model has {name!r} as {weight.dtype}, which cannot be saved: load a bf16, "
                "fp8 or int8 safetensors file."
            )
        found[name] = weight
    stack = kind_of_transformer(module).family.stack
    for index, block in enumerate(blocks_of(module)):
        if file_choice(block) is not None:
            attention = next(it for it in attention_names() if it in block._modules)
            name = f"{stack}.{index}.{attention}.comfy_attention"
            choice = model.get_model_object(PREFIX + name)  # a LoRA's, where one has its own
            found |= choice.state_dict(prefix=f"{name}.")
    return found


def _as_loaded(
    model: ModelPatcher, layer: str, weights: Tensors, precision: str, quantizable: bool
) -> StoredLayer | None:
    """Returns the layer as it is loaded, if that is in `precision` and no patch changes it."""
    name = f"{layer}.weight"
    weight = weights[name]
    if PREFIX + name in model.patches:
        return None
    if not isinstance(weight, QuantizedTensor):
        unscaled = precision == "fp8" and weight.dtype == torch.float8_e4m3fn and quantizable
        return StoredLayer(weight, torch.ones((len(weight), 1)), precision) if unscaled else None
    if LAYOUTS.get(weight._layout_cls) != precision:
        return None
    form = RowFormat(precision, rotation_of(weight._params))
    module = model.model.diffusion_model.get_submodule(layer)
    scale, slow = _row_scales(weight), module._full_precision_mm_config
    return replace(StoredLayer.rounded(weight._qdata, scale, form), full_precision=slow)


def _with_patches(
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
    # In float32: the host rounds to the dtype that the weight stands for, and rotates in it.
    if weight._layout_cls not in LAYOUTS:
        return weight.dequantize()
    form = RowFormat(LAYOUTS[weight._layout_cls], rotation_of(weight._params))
    loaded = StoredLayer.rounded(weight._qdata, _row_scales(weight), form)
    return loaded.dequantized(torch.float32)


def _row_scales(weight: QuantizedTensor) -> torch.Tensor:
    return weight._params.scale.float().reshape(-1, 1).expand(len(weight), 1).contiguous()
