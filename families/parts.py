"""Describes what a transformer runs with: the text encoders Qwen2.5-VL and Qwen3-VL, the VAEs of
1.x and 2.1 in native and diffusers names, and the tiny ones that replace the first of each.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping

from ..spec.vae import PUBLISHED_VAE, Strips, VaeCounts, VaeShape
from .protocol import (
    LICENCE_21,
    QWEN_IMAGE,
    QWEN_IMAGE_21,
    File,
    Identity,
    Tensors,
    TextEncoder,
    Vae,
    count_blocks,
    known,
    size,
)

# transformers 5 nests the language model; ComfyUI's single file and the published folders do not.
LAYOUTS = (
    ("model.language_model.", "model.visual.", "transformers 5 names"),
    ("model.", "visual.", "flat names (ComfyUI's single file and the published folder)"),
)
# (hidden, layers) of the published sizes
SIZES_OF_QWEN25_VL = {(2048, 36): "3B", (3584, 28): "7B", (5120, 64): "32B", (8192, 80): "72B"}
SIZES_OF_QWEN3_VL = {2048: "2B", 2560: "4B", 4096: "8B", 5120: "32B"}  # by their width


def qwen25_vl(tensors: Tensors) -> Identity | None:
    """Recognizes Qwen2.5(-VL) by biases on q, k and v without norms, unlike Llama and Qwen3."""
    for language, visual, style in LAYOUTS:
        first = f"{language}layers.0.self_attn."
        if f"{first}k_proj.bias" in tensors and f"{first}q_norm.weight" not in tensors:
            return _qwen25(tensors, language, visual, style)
    return None


def _qwen25(tensors: Tensors, language: str, visual: str, style: str) -> Identity:
    layers = count_blocks(tensors, f"{language}layers.")
    hidden = size(tensors, f"{language}norm.weight") or size(
        tensors, f"{language}layers.0.input_layernorm.weight"
    )
    vision_blocks = count_blocks(tensors, f"{visual}blocks.")
    head = size(tensors, "lm_head.weight") or size(tensors, "model.lm_head.weight")
    parts = [
        SIZES_OF_QWEN25_VL.get((hidden or 0, layers), "a size that was never published"),
        "with its vision tower"
        if vision_blocks
        else "without a vision tower (edit models need one)",
        "with lm_head" if head else "without lm_head",
        style,
    ]
    return Identity(
        family="Qwen2.5-VL text encoder",
        role="text_encoder",
        variant=", ".join(parts),
        dims=known(
            hidden=hidden,
            intermediate=size(tensors, f"{language}layers.0.mlp.gate_proj.weight"),
            q_dim=size(tensors, f"{language}layers.0.self_attn.q_proj.bias"),
            kv_dim=size(tensors, f"{language}layers.0.self_attn.k_proj.bias"),
            vocabulary=size(tensors, f"{language}embed_tokens.weight"),
            vision_dim=size(tensors, f"{visual}patch_embed.proj.weight"),
            vision_blocks=vision_blocks or None,
            lm_head=head,
        ),
        blocks=layers,
        folder="text_encoders",
    )


def qwen3_vl(tensors: Tensors) -> Identity | None:
    """Recognizes Qwen3-VL by its DeepStack mergers. Qwen-Image-2.1 takes the one of 8B."""
    towers = [it for _, it, _ in LAYOUTS if f"{it}deepstack_merger_list.0.norm.weight" in tensors]
    if not towers:
        return None
    # ComfyUI's single files have flat names of the language model and nested ones of the tower.
    nested = "model.language_model.norm.weight" in tensors
    language = "model.language_model." if nested else "model."
    hidden = size(tensors, f"{language}norm.weight")
    published = SIZES_OF_QWEN3_VL.get(hidden or 0, "of a size that was never published")
    other = hidden != QWEN3_VL.hidden and hidden in SIZES_OF_QWEN3_VL
    first = f"{language}layers.0"
    return Identity(
        family="Qwen3-VL text encoder" + ("" if other else f" ({QWEN_IMAGE_21}'s among others)"),
        role="text_encoder",
        variant=f"{published}, " + ("transformers names" if nested else "ComfyUI's names"),
        dims=known(
            hidden=hidden,
            intermediate=size(tensors, f"{first}.mlp.gate_proj.weight"),
            q_dim=size(tensors, f"{first}.self_attn.q_proj.weight"),
            kv_dim=size(tensors, f"{first}.self_attn.k_proj.weight"),
            vocabulary=size(tensors, f"{language}embed_tokens.weight"),
            vision_dim=size(tensors, f"{towers[0]}patch_embed.proj.weight"),
        ),
        blocks=count_blocks(tensors, f"{language}layers."),
        folder="text_encoders",
        cannot_run=(
            f"This is the {published} of Qwen3-VL. {QWEN_IMAGE_21} needs the 8B, 4096 wide, and "
            f"{QWEN_IMAGE} needs Qwen2.5-VL 7B: choose one of them.",
        )
        if other
        else (),
    )


def vision_tower(tensors: Tensors) -> Identity | None:
    """Recognizes a vision tower on its own, which GGUF users call mmproj."""
    for prefix, style in (("visual.blocks.", "transformers names"), ("v.blk.", "llama.cpp names")):
        blocks = count_blocks(tensors, prefix)
        if blocks and not any(".layers." in name for name in tensors):
            return Identity(
                family="mmproj: a vision tower of Qwen-VL without its language model",
                role="vision_tower",
                variant=style,
                dims=known(vision_dim=size(tensors, "visual.patch_embed.proj.weight")),
                blocks=blocks,
                folder="text_encoders",
            )
    return None


# transformers 5 nests the language model and the vision tower in `model`. ComfyUI keeps the flat
# names of the published folder, with the unused head inside `model`.
_TEXT_ENCODER = (
    ("model.language_model.", "model."),
    ("model.visual.", "visual."),
    ("lm_head.", "model.lm_head."),
    ("model.", "model."),
    ("visual.", "visual."),
)


def text_encoder_name_to_native(name: str) -> str:
    """Maps a tensor name of a Qwen2.5-VL checkpoint to the name ComfyUI's class has for it; scales
    and markers of quantized layers go with their layer. Any other name stays.
    """
    for prefix, native in _TEXT_ENCODER:
        if name.startswith(prefix):
            return native + name.removeprefix(prefix)
    return name


QWEN25_VL = TextEncoder(
    name="Qwen2.5-VL 7B",
    title="Qwen2.5-VL text encoder",
    part="the Qwen2.5-VL text encoder",
    identify=qwen25_vl,
    comfyui=".hosts.comfyui.load.encoder_kind:QWEN25_VL",
    hidden=3584,
    intermediate=18944,
    heads=28,
    kv_heads=4,
    layers=28,
    vocabulary=152_064,
    biases=True,
    vision=676_550_144,
    vision_hidden=1280,
    vision_head=80,
    vision_attends=4,
    template=64,
    published=SIZES_OF_QWEN25_VL,
    files={
        "bf16": File("qwen_2.5_vl_7b", 15.44),
        "fp8": File("qwen_2.5_vl_7b_fp8_scaled", 8.74),
    },
)
QWEN3_VL = TextEncoder(
    name="Qwen3-VL 8B",
    title="Qwen3-VL text encoder",
    part="the Qwen3-VL 8B text encoder",
    identify=qwen3_vl,
    comfyui=".hosts.comfyui.load.encoder_kind:QWEN3_VL",
    hidden=4096,
    intermediate=12288,
    heads=32,
    kv_heads=8,
    layers=36,
    vocabulary=151_936,
    biases=False,
    vision=576_388_336,
    vision_hidden=1152,
    vision_head=72,
    vision_attends=27,
    template=20,
    files={
        "bf16": File("qwen3vl_8b_bf16", 16.33),
        "int8": File("qwen3vl_8b_int8_convrot", 8.71),
        "w4a8": File("qwen3vl_8b_w4a8", 5.88),
    },
)


# VAEs

VAE_21 = VaeShape(
    dim=144,
    latent_channels=64,
    image_channels=4,
    encoder_dim=96,
    widths=(1, 2, 4, 8, 8),
    shortcuts=True,
    counts=VaeCounts(kept=1, made=2, enlarged=(3.5, 9.5, 11.1), margins=(56, 42, 279)),
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
_STAGES: dict[str, Callable[..., str]] = {
    **_MIDDLE,
    r"down_blocks\.(\d+)": "downsamples.{}".format,
    r"up_blocks\.(\d{1,4})\.resnets\.(\d{1,4})": lambda i, j: f"upsamples.{4 * int(i) + int(j)}",
    r"up_blocks\.(\d{1,4})\.upsamplers\.\d+": lambda i: f"upsamples.{4 * int(i) + 3}",
}
# ComfyUI's class of 2.1 has the layers of Wan 2.2 for one frame.
_STAGES_21 = {
    **_MIDDLE,
    r"down_blocks\.(\d)\.resnets\.(\d)": "downsamples.{}.downsamples.{}".format,
    r"down_blocks\.(\d)\.downsampler": "downsamples.{}.downsamples.2".format,
    r"up_blocks\.(\d)\.resnets\.(\d)": "upsamples.{}.upsamples.{}".format,
    r"up_blocks\.(\d)\.upsampler": "upsamples.{}.upsamples.3".format,
}


def _native_name(stages: Mapping[str, Callable[..., str]], name: str) -> str:
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
    return name


vae_name_to_native = functools.partial(_native_name, _STAGES)
vae_21_name_to_native = functools.partial(_native_name, _STAGES_21)
SIZES = ("dim", "latent_channels", "image_channels")
QWEN_IMAGE_VAE = Vae(
    title="Qwen-Image VAE",
    part="the Qwen-Image VAE",
    shape=PUBLISHED_VAE,
    bytes=2 * 126_892_531,
    identify=qwen_image_vae,
    read_shape=lambda dims: VaeShape(*map(dims.__getitem__, SIZES)),
    native_name=vae_name_to_native,
    comfyui=".hosts.comfyui.decode.fused:WAN21",
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
    comfyui=".hosts.comfyui.decode.fused:WAN22",
)
