"""Tensor names: the diffusers form of the Qwen-Image VAE and ComfyUI's native (Wan 2.1) form, and
those of the text encoder.

The transformer needs no conversion: both hosts use the same names. Every rule maps one name to one
name and no tensor changes its shape.
"""

from __future__ import annotations

import re

from ..errors import CheckpointError

_RESNET = {
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}
_ENDS = {"conv_in": "conv1", "norm_out": "head.0", "conv_out": "head.2"}
_MIDDLE = {"resnets.0": "middle.0", "attentions.0": "middle.1", "resnets.1": "middle.2"}
# Each of the decoder's up blocks holds three residual blocks and, except the last, one upsampler;
# natively they form one list.
_UP_BLOCK_LENGTH = 4


def vae_name_to_native(name: str) -> str:
    """Maps a tensor name of `AutoencoderKLQwenImage` to the name ComfyUI's Wan VAE has for it.

    Raises:
        CheckpointError: the name is not one of a Qwen-Image VAE in diffusers form.
    """
    for prefix, native in (("quant_conv.", "conv1."), ("post_quant_conv.", "conv2.")):
        if name.startswith(prefix):
            return native + name.removeprefix(prefix)
    half, _, rest = name.partition(".")
    native = _coder_name(rest) if half in ("encoder", "decoder") else None
    if native is None:
        raise CheckpointError(
            f"tensor {name!r} is not one of a Qwen-Image VAE in diffusers form; give the "
            "vae/ folder of a Qwen-Image diffusers folder."
        )
    return f"{half}.{native}"


def _coder_name(rest: str) -> str | None:
    """Names inside the encoder or the decoder; the two share all rules."""
    stem, _, end = rest.partition(".")
    if stem in _ENDS:
        return f"{_ENDS[stem]}.{end}"
    if match := re.fullmatch(r"mid_block\.((?:resnets|attentions)\.\d)\.(.+)", rest):
        return _join(_MIDDLE.get(match[1]), _resnet_or_same(match[2]))
    if match := re.fullmatch(r"down_blocks\.(\d+)\.(.+)", rest):
        return f"downsamples.{match[1]}.{_resnet_or_same(match[2])}"
    if match := re.fullmatch(r"up_blocks\.(\d+)\.(resnets|upsamplers)\.(\d+)\.(.+)", rest):
        block, kind, index, inner = int(match[1]), match[2], int(match[3]), match[4]
        position = block * _UP_BLOCK_LENGTH + (index if kind == "resnets" else _UP_BLOCK_LENGTH - 1)
        return f"upsamples.{position}.{_resnet_or_same(inner)}"
    return None


def _resnet_or_same(inner: str) -> str:
    stem, _, end = inner.partition(".")
    return f"{_RESNET[stem]}.{end}" if stem in _RESNET else inner


def _join(stem: str | None, rest: str) -> str | None:
    return None if stem is None else f"{stem}.{rest}"


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
        f"tensor {name!r} is not one of a Qwen2.5-VL text encoder: give the text_encoder/ folder "
        "of a Qwen-Image diffusers folder, or ComfyUI's single file."
    )
