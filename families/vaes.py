"""The VAEs: that of Qwen-Image, in native and in diffusers names, that of Qwen-Image-2.1, and the
tiny ones that stand in for the first.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping

from ..errors import CheckpointError
from ..spec.vae import PUBLISHED_VAE, Strips, VaeShape
from .protocol import LICENCE_21, QWEN_IMAGE_21, Identity, Tensors, Vae, known, size

VAE_21 = VaeShape(
    dim=144,
    latent_channels=64,
    image_channels=4,
    encoder_dim=96,
    widths=(1, 2, 4, 8, 8),
    shortcut_frames=(1, 2, 2, 2),
    # Counted on tensors without memory. An H200 took 3.41 GiB to encode 2048x2048. Its last layers
    # hold so much at once that two tiles take half of what ComfyUI's strips take, for 5 to 11 %
    # more arithmetic to decode 2048x2048 and 1024x1024.
    strips=Strips((17_700_000, 90_700), (3_050_000, 29_900), (116_100_000, 845), least_tiles=2),
)


def qwen_image_vae(tensors: Tensors) -> Identity | None:
    """Recognizes the causal 3-D VAE that Qwen-Image shares with Wan 2.1; RGBA in Layered."""
    if "decoder.middle.0.residual.0.gamma" in tensors:
        if any(name.startswith("decoder.upsamples.0.upsamples.") for name in tensors):
            return None  # Wan 2.2
        style, names = (
            "native (ComfyUI, Wan) names",
            ("encoder.conv1", "decoder.conv1", "decoder.head.2"),
        )
        dim = size(tensors, "decoder.head.0.gamma")
    elif "decoder.mid_block.resnets.0.norm1.gamma" in tensors:
        if any(".upsampler." in name for name in tensors):
            return None  # Wan 2.2 and Qwen-Image-2.1
        style, names = "diffusers names", ("encoder.conv_in", "decoder.conv_in", "decoder.conv_out")
        dim = size(tensors, "decoder.norm_out.gamma")
    else:
        return None
    encoder_in, decoder_in, decoder_out = (f"{name}.weight" for name in names)
    channels = size(tensors, decoder_out)
    shared = (
        "RGBA, as Qwen-Image-Layered has it"
        if channels == 4
        else "the tensors are those of Wan 2.1's VAE too"
    )
    return Identity(
        family="Qwen-Image VAE",
        role="vae",
        variant=f"{shared}, {style}",
        dims=known(
            dim=dim,
            latent_channels=size(tensors, decoder_in, 1),
            image_channels=size(tensors, encoder_in, 1) or channels,
        ),
        folder="vae",
    )


def tiny_vae(tensors: Tensors) -> Identity | None:
    """Recognizes TAEHV (a list with memory blocks) and TAESD (a list, or `AutoencoderTiny`)."""
    if "decoder.22.bias" in tensors and size(tensors, "decoder.1.weight", 1):
        kind, channels = "TAEHV", size(tensors, "decoder.1.weight", 1)
    elif "decoder.layers.0.weight" in tensors and "decoder.layers.2.conv.0.weight" in tensors:
        kind, channels = "TAESD in diffusers names", size(tensors, "decoder.layers.0.weight", 1)
    elif "decoder.3.conv.0.weight" in tensors and size(tensors, "decoder.1.weight", 1):
        kind, channels = "TAESD", size(tensors, "decoder.1.weight", 1)
    else:
        return None
    fits = channels == PUBLISHED_VAE.latent_channels
    return Identity(
        family="tiny VAE" if fits else "not Qwen-Image: looks like a tiny VAE of another model",
        role="tiny_vae",
        variant=f"{kind}, 16 latent channels: Qwen-Image's and Wan 2.1's look like others here"
        if fits
        else kind,
        dims=known(latent_channels=channels),
        folder="vae_approx",
    )


def qwen_image_21_vae(tensors: Tensors) -> Identity | None:
    """Recognizes the VAE of 2.1: 64 latent channels, RGBA, the layers of Wan 2.2 for one frame."""
    if "decoder.upsamples.0.upsamples.0.residual.2.weight" in tensors:
        style, first, last = "native (ComfyUI) names", "conv1", "head.2"
    elif "decoder.mid_block.resnets.0.norm1.gamma" in tensors:
        style, first, last = "diffusers names", "conv_in", "conv_out"
    else:
        return None
    channels = size(tensors, f"decoder.{first}.weight", 1)
    if channels != VAE_21.latent_channels:
        return None
    dim = size(tensors, f"encoder.{first}.weight")
    return Identity(
        family=f"{QWEN_IMAGE_21} VAE",
        role="vae",
        variant=style,
        dims=known(
            dim=dim,
            latent_channels=channels,
            image_channels=size(tensors, f"decoder.{last}.weight"),
        ),
        folder="vae",
        licence=LICENCE_21 if dim == PUBLISHED_VAE.dim else None,
    )


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


def _native_name(stages: Mapping[str, Callable[..., str]], what: str, name: str) -> str:
    """Maps the name that diffusers has for a tensor to ComfyUI's.

    Raises:
        CheckpointError: the name is not one of this VAE in diffusers form.
    """
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


vae_name_to_native = functools.partial(_native_name, _STAGES, "a Qwen-Image VAE")
vae_21_name_to_native = functools.partial(_native_name, _STAGES_21, "Qwen-Image-2.1's VAE")
SIZES = ("dim", "latent_channels", "image_channels")
QWEN_IMAGE_VAE = Vae(
    title="Qwen-Image VAE",
    part="the Qwen-Image VAE",
    shape=PUBLISHED_VAE,
    bytes=2 * 126_892_531,
    identify=qwen_image_vae,
    read_shape=lambda dims: VaeShape(*map(dims.__getitem__, SIZES)),
    native_name=vae_name_to_native,
    comfyui=".hosts.comfyui.decode.wan:WAN21",
    other_channels=((4, "4 channels: it decodes to RGBA, for Qwen-Image-Layered"),),
)
QWEN_IMAGE_21_VAE = Vae(
    title=f"{QWEN_IMAGE_21} VAE",
    part=f"the {QWEN_IMAGE_21} VAE",
    shape=VAE_21,
    bytes=675_480_808,
    identify=qwen_image_21_vae,
    read_shape=lambda dims: VAE_21,
    native_name=vae_21_name_to_native,
    comfyui=".hosts.comfyui.decode.wan:WAN22",
)
