"""Tensor names of the VAE, the text encoder and LoRAs as ComfyUI has them, and whether a file has
all of them.

The transformer needs no conversion: both hosts use the same names. Every rule maps one name to one
name and no tensor changes its shape.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ..errors import CheckpointError
from ..spec.transformer import TransformerShape
from .quantization import unpacked_shape
from .source import Source

_RESNET = {
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}
_ENDS = {"conv_in": "conv1", "norm_out": "head.0", "conv_out": "head.2"}
_QUANT = {"quant_conv": "conv1", "post_quant_conv": "conv2"}
# {pattern in the encoder or the decoder: native name, of its groups}
_MIDDLE = {
    r"mid_block\.resnets\.0": "middle.0".format,
    r"mid_block\.attentions\.0": "middle.1".format,
    r"mid_block\.resnets\.1": "middle.2".format,
}
# Each of the decoder's up blocks holds three residual blocks and, except the last, one upsampler;
# natively they form one list.
_STAGES = {
    **_MIDDLE,
    r"down_blocks\.(\d+)": "downsamples.{}".format,
    r"up_blocks\.(\d+)\.resnets\.(\d+)": lambda i, j: f"upsamples.{4 * int(i) + int(j)}",
    r"up_blocks\.(\d+)\.upsamplers\.\d+": lambda i: f"upsamples.{4 * int(i) + 3}",
}
# ComfyUI's class of 2.1 has the layers of Wan 2.2 for one frame.
_STAGES_21 = {
    **_MIDDLE,
    r"down_blocks\.(\d)\.resnets\.(\d)": "downsamples.{}.downsamples.{}".format,
    r"down_blocks\.(\d)\.downsampler": "downsamples.{}.downsamples.2".format,
    r"up_blocks\.(\d)\.resnets\.(\d)": "upsamples.{}.upsamples.{}".format,
    r"up_blocks\.(\d)\.upsampler": "upsamples.{}.upsamples.3".format,
}


def vae_name_to_native(name: str) -> str:
    """Maps a tensor name of `AutoencoderKLQwenImage` to the name ComfyUI's Wan VAE has for it.

    Raises:
        CheckpointError: the name is not one of a Qwen-Image VAE in diffusers form.
    """
    return _vae_name(name, _STAGES, "a Qwen-Image VAE")


def vae_21_name_to_native(name: str) -> str:
    """Maps a tensor name of `AutoencoderKLQwenImage21` in the same way.

    Raises:
        CheckpointError: the name is not one of Qwen-Image-2.1's VAE in diffusers form.
    """
    return _vae_name(name, _STAGES_21, "Qwen-Image-2.1's VAE")


def _vae_name(name: str, stages: Mapping[str, Callable[..., str]], what: str) -> str:
    half, _, rest = name.partition(".")
    if half in _QUANT and rest:
        return f"{_QUANT[half]}.{rest}"
    if half in ("encoder", "decoder"):
        stem, _, end = rest.partition(".")
        if stem in _ENDS:
            return f"{half}.{_ENDS[stem]}.{end}"
        for pattern, native in stages.items():
            if match := re.fullmatch(rf"{pattern}\.(.+)", rest):
                *where, inner = match.groups()
                stem, _, end = inner.partition(".")
                inner = f"{_RESNET[stem]}.{end}" if stem in _RESNET else inner
                return f"{half}.{native(*where)}.{inner}"
    raise CheckpointError(
        f"The tensor {name!r} is not one of {what} in diffusers form: give the vae/ folder of its "
        "diffusers folder."
    )


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
        shape = TransformerShape.from_dims(part.dims, part.blocks, part.family)
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
