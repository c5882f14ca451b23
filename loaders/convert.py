"""Tensor names of the text encoder and LoRAs as ComfyUI has them, and whether a file has all.

The transformer needs no conversion: both hosts use the same names. Every rule maps one name to one
name and no tensor changes its shape.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from ..errors import CheckpointError
from ..families.registry import shape_from_header
from ..spec.transformer import TransformerShape
from .quantization import unpacked_shape
from .source import Source

# transformers 5 nests the language model and the vision tower in `model`. ComfyUI keeps the flat
# names of the published folder, with the unused head inside `model`.
_TEXT_ENCODER = (
    ("model.language_model.", "model."),
    ("model.visual.", "visual."),
    ("lm_head.", "model.lm_head."),
    ("model.", "model."),
    ("visual.", "visual."),
)
# Marks a file whose layers have a `scale_weight`.
_SCALED_FP8 = "scaled_fp8"


def text_encoder_name_to_native(name: str) -> str:
    """Maps a tensor name of a Qwen2.5-VL checkpoint, or a name that is native already, to the name
    ComfyUI's class has for it; scales and markers of quantized layers go with their layer.

    Raises:
        CheckpointError: the name is not one of a Qwen2.5-VL.
    """
    if name == _SCALED_FP8:
        return name
    for prefix, native in _TEXT_ENCODER:
        if name == prefix:
            break
        if name.startswith(prefix):
            return native + name.removeprefix(prefix)
    raise CheckpointError(
        f"The tensor {name!r} is not one of a Qwen2.5-VL text encoder: give the text_encoder/ "
        "folder of a Qwen-Image diffusers folder, or ComfyUI's single file."
    )


# Brings the tensor names of a LoRA for Qwen-Image into a form that ComfyUI maps.
#
# ComfyUI 0.33 maps, for Qwen-Image, bare names (`transformer_blocks.`), `transformer.`,
# `diffusion_model.`, `lora_unet_` and `lycoris_`, and takes `.lora_A.default.weight` only under
# `default`. PEFT, DiffSynth-Studio, OneTrainer and ai-toolkit also write names that it skips with a
# line in the log.

# What trainers put before a module's name, in any combination.
_WRAPPERS = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "pipe.dit.",
    "dit.",
    "transformer.",
    "_orig_mod.",
)
# Names with "_" for ".", which only the list of the model's own modules can undo.
_FLAT = ("lora_transformer_", "lycoris_")
# PEFT writes the adapter's own name into the middle.
_ADAPTER = re.compile(r"\.lora_([AB])\.[^.]+\.weight$")


def normalize_name(name: str) -> str:
    """Returns the same tensor's name as ComfyUI maps it; a normalized name stays as it is.

    Example:
        base_model.model.transformer_blocks.0.attn.to_q.lora_A.default.weight
        becomes transformer_blocks.0.attn.to_q.lora_A.weight
    """
    simpler = _ADAPTER.sub(r".lora_\1.weight", name)
    for prefix in _WRAPPERS:
        simpler = simpler.removeprefix(prefix)
    for prefix in _FLAT:
        if simpler.startswith(prefix):
            simpler = f"lora_unet_{simpler.removeprefix(prefix)}"
    return name if simpler == name else normalize_name(simpler)


# Compares what a file holds with what a host's class needs, because hosts only log the difference
# and then compute with whatever their memory contained before.


def check_names(
    path: Path,
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    what: str,
) -> None:
    """Compares {name: shape} of a file with that of a class.

    Args:
        what: the class in words, such as "the Qwen-Image VAE".

    Raises:
        CheckpointError: a tensor is missing, unexpected, or of another shape.
    """
    if missing := sorted(expected.keys() - found.keys()):
        raise CheckpointError(
            f"This file lacks the tensor {missing[0]!r} ({len(missing)} in all) that {what} has: "
            "download it again.",
            path,
        )
    if unexpected := sorted(found.keys() - expected.keys()):
        raise CheckpointError(
            f"This file holds the tensor {unexpected[0]!r} ({len(unexpected)} in all) that {what} "
            "has no place for: get the file from the model's own source.",
            path,
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise CheckpointError(
                f"The tensor {name!r} has the shape {found[name]} where {what} has {shape}: get "
                "the file from the model's own source.",
                path,
            )


def check_finite(path: Path, name: str, tensor: torch.Tensor) -> None:
    """Raises CheckpointError when a tensor of any dtype holds NaN or infinity.

    Attention can swallow NaN and paint a plausible wrong image, so the image does not show it.
    """
    if not is_finite(tensor):
        raise not_finite(path, name)


def not_finite(path: Path, name: str) -> CheckpointError:
    """Makes the error for a tensor that holds NaN or infinity."""
    return CheckpointError(
        f"This file holds NaN or infinity in the tensor {name!r}: download it again.", path
    )


def is_finite(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor of any dtype and device holds neither NaN nor infinity.

    `aminmax` passes NaN on and reads 38 GB/s on two CPU cores, where `isfinite` reads 0.7 (bf16).
    """
    if not (tensor.is_floating_point() and tensor.numel()):
        return True
    wide = tensor.float() if tensor.itemsize == 1 else tensor
    return bool(torch.stack(torch.aminmax(wide)).isfinite().all())


def shapes_of(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Returns {name: shape} of everything that a module loads."""
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def check_complete(source: Source) -> TransformerShape:
    """Compares a transformer's header with what its sizes ask for, and returns the sizes.

    Raises:
        CheckpointError: a tensor is missing or has another shape; hosts only log that, and would
            run on random memory.
    """
    part = source.part
    try:
        shape = shape_from_header(part.family, part.dims, part.blocks)
    except CheckpointError as error:
        raise CheckpointError(error, source.path) from error
    found = {
        name: unpacked_shape(part.quantization, name, info) for name, info in source.tensors.items()
    }
    expected = shape.tensors()
    # What else a file holds, such as scales and markers, is for others to judge.
    known = {name: sizes for name, sizes in found.items() if name in expected}
    check_names(source.path, known, expected, f"a transformer with {shape.blocks} blocks")
    return shape
