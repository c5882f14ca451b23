"""Recognizes the transformers of the Qwen-Image family, and what is trained to sit beside them.

The names are those of diffusers' `QwenImageTransformer2DModel`, which ComfyUI keeps. Sizes come
from first dimensions and from norms and biases, because 4-bit formats pack the second dimension and
flatten the weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from .header import TensorInfo
from .lora import lora
from .parts import (
    Identity,
    Tensors,
    count_blocks,
    known,
    other_model,
    qwen3_vl,
    qwen_image_21_vae,
    size,
    text_encoder,
    tiny_vae,
    vae,
    vision_tower,
)

SAME_TENSORS = (
    "Qwen-Image, 2512, Edit and Edit-2509 have the same tensors: the header cannot tell which"
)


def transformer(tensors: Tensors) -> Identity | None:
    """Qwen-Image, Edit-2511 by its timestep-zero marker, Layered by its second time embedding."""
    if (
        "txt_norm.weight" not in tensors
        or "transformer_blocks.0.attn.norm_added_q.weight" not in tensors
    ):
        return None
    if any(".img_mlp.w1." in name for name in tensors):  # Lens keeps the names and has a gated MLP
        return None
    if size(tensors, "txt_norm.weight") == 2560 and size(tensors, "proj_out.weight") == 128:
        return Identity("not Qwen-Image: looks like Mage-Flow", "other")  # same names, other sizes
    if "time_text_embed.addition_t_embedding.weight" in tensors:
        family, variant = "Qwen-Image-Layered", None
    elif "__index_timestep_zero__" in tensors:
        family, variant = "Qwen-Image-Edit-2511", None
    else:
        family, variant = "Qwen-Image", SAME_TENSORS
    return Identity(
        family=family,
        role="transformer",
        variant=variant,
        dims=transformer_dims(tensors),
        blocks=count_blocks(tensors, "transformer_blocks."),
        folder="diffusion_models",
    )


def transformer_dims(tensors: Tensors) -> dict[str, int | str]:
    """Returns dim, heads, head_dim, joint_dim, in_channels and packed_out_channels as far as the
    tensors tell them. Packed: a 2 x 2 patch of every latent channel.
    """
    dim = size(tensors, "img_in.bias") or size(tensors, "img_in.weight")
    head_dim = size(tensors, "transformer_blocks.0.attn.norm_q.weight")
    packed = size(tensors, "img_in.weight") != dim  # bitsandbytes stores a flat column
    return known(
        dim=dim,
        heads=dim // head_dim if dim and head_dim else None,
        head_dim=head_dim,
        joint_dim=size(tensors, "txt_norm.weight"),
        in_channels=None if packed else size(tensors, "img_in.weight", 1),
        packed_out_channels=size(tensors, "proj_out.bias") or size(tensors, "proj_out.weight"),
    )


def controlnet(tensors: Tensors) -> Identity | None:
    """A ControlNet of InstantX's layout (diffusers' `QwenImageControlNetModel`) or of the Fun
    layout.
    """
    if "controlnet_x_embedder.weight" in tensors and "txt_norm.weight" in tensors:
        dims = transformer_dims(tensors)
        control = size(tensors, "controlnet_x_embedder.weight", 1)
        return Identity(
            family="ControlNet for Qwen-Image",
            role="controlnet",
            variant="InstantX layout",
            dims={**dims, **known(control_channels=control)},
            blocks=count_blocks(tensors, "transformer_blocks."),
            folder="controlnet",
        )
    if "control_img_in.weight" in tensors and "control_blocks.0.after_proj.weight" in tensors:
        return Identity(
            family="ControlNet for Qwen-Image",
            role="controlnet",
            variant="Fun layout",
            dims=known(
                dim=size(tensors, "control_img_in.weight"),
                control_channels=size(tensors, "control_img_in.weight", 1),
            ),
            blocks=count_blocks(tensors, "control_blocks."),
            folder="controlnet",
        )
    return None


def model_patch(tensors: Tensors) -> Identity | None:
    """DiffSynth's block-wise control, which ComfyUI loads as a model patch."""
    if "controlnet_blocks.0.y_rms.weight" not in tensors:
        return None
    return Identity(
        family="DiffSynth control patch for Qwen-Image",
        role="model_patch",
        dims=known(
            dim=size(tensors, "img_in.weight"), in_channels=size(tensors, "img_in.weight", 1)
        ),
        blocks=count_blocks(tensors, "controlnet_blocks."),
        folder="model_patches",
    )


def qwen_image_21(tensors: Tensors) -> Identity | None:
    """Qwen-Image-2.1 (diffusers' `QwenImage21Transformer2DModel`): one stream, one shared
    modulation.
    """
    if (
        "txt_in.text_norm.weight" not in tensors
        or "transformer_blocks.0.img_mlp.gate_layer.weight" not in tensors
    ):
        return None
    return Identity(
        family="Qwen-Image-2.1",
        role="transformer",
        dims=known(
            dim=size(tensors, "img_in.weight"),
            head_dim=size(tensors, "transformer_blocks.0.attn.norm_q.weight"),
            joint_dim=size(tensors, "txt_in.text_norm.weight"),
        ),
        blocks=count_blocks(tensors, "transformer_blocks."),
        folder="diffusion_models",
        cannot_run=(
            "Qwen-Image-2.1 is another, single-stream model that this package does not run: load "
            "it with ComfyUI's own nodes.",
        ),
    )


# Says what a set of tensors is, from names and shapes alone.

# The first answer wins. A ControlNet holds a whole transformer's names, and so stands before it;
# Qwen3-VL before the vision tower that it contains.
DETECTORS: tuple[Callable[[Tensors], Identity | None], ...] = (
    lora,
    controlnet,
    model_patch,
    transformer,
    qwen_image_21,
    text_encoder,
    qwen3_vl,
    vision_tower,
    qwen_image_21_vae,
    vae,
    tiny_vae,
)

# Prefixes of the parts of a full checkpoint, and the name of the part. A file may also hold one
# part under its prefix.
PARTS = (
    (re.compile(r"(model\.)?diffusion_model\."), "diffusion model"),
    (re.compile(r"transformer\.(?!resblocks\.)"), "diffusion model"),
    (re.compile(r"(vae|first_stage_model)\."), "vae"),
    (re.compile(r"text_encoders?\.([^.]+\.transformer\.)?"), "text encoder"),
    (re.compile(r"(cond_stage_model|conditioner)\."), "text encoder"),
)
HINTS = ("2512", "2511", "2509", "layered", "edit")


@dataclass(frozen=True)
class Slice:
    """One part of a file; a tensor's name in the file is `prefix` and its name in `tensors`."""

    name: str
    prefix: str
    tensors: Tensors


def identify(tensors: Tensors) -> Identity:
    """Returns what the tensors of one part are; an answer always comes, if only that it is not
    Qwen-Image.
    """
    for detector in DETECTORS:
        if (identity := detector(tensors)) is not None:
            return identity
    return other_model(tensors)


def split_parts(tensors: Tensors) -> list[Slice]:
    """Separates a full checkpoint into its parts.

    An adapter is one part: its prefixes tell the key style. Tensors without a known prefix form the
    part "weights".
    """
    if lora(tensors) is not None:
        return [Slice("weights", "", tensors)]
    parts: dict[tuple[str, str], dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        part, prefix = _part_of(name)
        parts.setdefault((part, prefix), {})[name.removeprefix(prefix)] = info
    return [Slice(*key, own) for key, own in parts.items()] or [Slice("weights", "", {})]


def _part_of(name: str) -> tuple[str, str]:
    for pattern, part in PARTS:
        if match := pattern.match(name):
            return part, match[0]
    return "weights", ""


def file_name_hint(stem: str) -> str | None:
    """Returns what a file's name says about the variant, worded so that it is not taken for
    evidence.
    """
    words = [word for word in HINTS if word in stem.lower()]
    return (
        f"the file name says {' '.join(words)}, which nothing in the file confirms"
        if words
        else None
    )
