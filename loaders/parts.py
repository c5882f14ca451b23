"""Recognizes Qwen2.5-VL, VAEs, Qwen-Image-2.1, and the models that are taken for Qwen-Image."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..spec.families import LICENCE_21
from ..spec.transformer import FAMILY_21, GATE_UP, GATED, SHAPE_21
from ..spec.vae import PUBLISHED_VAE
from .header import TensorInfo

Tensors = Mapping[str, TensorInfo]


@dataclass(frozen=True)
class Identity:
    """Tells what a set of tensors is.

    Args:
        family: the name people know it by, such as "Qwen-Image-Edit-2511" or "not Qwen-Image: looks
            like FLUX".
        role: transformer, text_encoder, vision_tower, vae, tiny_vae, lora, controlnet, model_patch
            or other.
        variant: what the tensors leave open, or which of several forms it is.
        dims: sizes read from the tensors, by name.
        blocks: number of blocks or layers, where the model is a stack of them.
        folder: the folder under ComfyUI's `models/` that it belongs in.
        licence: of the published weights, where it is another one than this package's.
        cannot_run: sentences about what this package cannot run.
        errors: sentences about tensors that contradict each other.
    """

    family: str
    role: str
    variant: str | None = None
    dims: Mapping[str, int | str] = field(default_factory=dict)
    blocks: int | None = None
    folder: str | None = None
    licence: str | None = None
    cannot_run: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


def size(tensors: Tensors, name: str, axis: int = 0) -> int | None:
    """Returns the length of one axis, or None when the tensor is absent or has fewer axes."""
    info = tensors.get(name)
    return info.shape[axis] if info is not None and len(info.shape) > axis else None


def known(**dims: int | str | None) -> dict[str, int | str]:
    """Drops the dims that the tensors do not tell."""
    return {name: value for name, value in dims.items() if value is not None}


def count_blocks(names: Iterable[str], prefix: str) -> int:
    """Counts the different numbers N in names that begin `<prefix>N.`"""
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
    return len({match[1] for match in map(pattern.match, names) if match})


# Recognizes Qwen2.5-VL, the text encoder of Qwen-Image, in the names that the three kinds of file
# use.

# transformers 5 nests the language model; ComfyUI's single file and the published folders do not.
LAYOUTS = (
    ("model.language_model.", "model.visual.", "transformers 5 names"),
    ("model.", "visual.", "flat names (ComfyUI's single file and the published folder)"),
)
# (hidden, layers) of the published sizes
SIZES = {(2048, 36): "3B", (3584, 28): "7B", (5120, 64): "32B", (8192, 80): "72B"}


def text_encoder(tensors: Tensors) -> Identity | None:
    """Recognizes Qwen2.5(-VL), which has biases on q, k and v, and no norm on q and k, unlike Llama
    and Qwen3.
    """
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
    head = any(name in tensors for name in ("lm_head.weight", "model.lm_head.weight"))
    parts = [
        SIZES.get((hidden, layers), "a size that was never published"),
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
        ),
        blocks=layers,
        folder="text_encoders",
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


# Recognizes the VAE of Qwen-Image, in native and in diffusers names, and the tiny VAEs that stand
# in for it.

LATENT_CHANNELS = 16


def vae(tensors: Tensors) -> Identity | None:
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
    fits = channels == LATENT_CHANNELS
    return Identity(
        family="tiny VAE" if fits else "not Qwen-Image: looks like a tiny VAE of another model",
        role="tiny_vae",
        variant=f"{kind}, 16 latent channels: Qwen-Image's and Wan 2.1's look like others here"
        if fits
        else kind,
        dims=known(latent_channels=channels),
        folder="vae_approx",
    )


# Recognizes Qwen-Image-2.1 and its parts.

# A header does not tell the licence of what others train for it.
LICENCE_21_OF_OTHERS = f"of {FAMILY_21}: research, not commercial use"
LATENT_CHANNELS_21 = 64
QWEN3_VL = "Qwen3-VL"
SIZES_OF_QWEN3_VL = {2048: "2B", 2560: "4B", 4096: "8B", 5120: "32B"}  # by their width
# The gated MLP of its blocks: gate and up apart, or, in ComfyUI's files, in one weight.
MLP_21 = ("img_mlp.proj", "img_mlp.gate_layer", GATE_UP, "img_mlp.out")


def qwen_image_21(tensors: Tensors) -> Identity | None:
    """Recognizes Qwen-Image-2.1 (diffusers' `QwenImage21Transformer2DModel`), which has one stream
    and one shared modulation.
    """
    if "txt_in.text_norm.weight" not in tensors or not any(".img_mlp." in it for it in tensors):
        return None
    dim = size(tensors, "img_in.weight")
    head_dim = size(tensors, "transformer_blocks.0.attn.norm_q.weight")
    blocks = count_blocks(tensors, "transformer_blocks.")
    forms = [form for form in (GATE_UP, GATED[0]) if any(f".{form}." in name for name in tensors)]
    mlp = forms[0] if forms else None
    rows = size(tensors, f"transformer_blocks.0.{mlp}.weight")
    return Identity(
        family=FAMILY_21,
        role="transformer",
        variant="2.1-Turbo has the same tensors: the header cannot tell which",
        dims=known(
            dim=dim,
            heads=dim // head_dim if dim and head_dim else None,
            head_dim=head_dim,
            joint_dim=size(tensors, "txt_in.text_norm.weight"),
            in_channels=size(tensors, "img_in.weight", 1),
            packed_out_channels=size(tensors, "proj_out.weight"),
            mlp=mlp,
            mlp_ratio=rows // dim // (2 if mlp == GATE_UP else 1) if rows and dim else None,
        ),
        blocks=blocks,
        folder="diffusion_models",
        licence=LICENCE_21 if (dim, blocks) == (SHAPE_21.dim, SHAPE_21.blocks) else None,
        errors=(
            f"It holds {' and '.join(forms)}, which are the same weights in two forms: a file has "
            "one of them, so download it again.",
        )
        if len(forms) > 1
        else (),
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
    published = SIZES_OF_QWEN3_VL.get(hidden, "of a size that was never published")
    other = hidden != SHAPE_21.joint_dim and hidden in SIZES_OF_QWEN3_VL
    first = f"{language}layers.0"
    return Identity(
        family=f"{QWEN3_VL} text encoder" + ("" if other else f" ({FAMILY_21}'s among others)"),
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
            f"This is the {published} of {QWEN3_VL}: choose the 8B, 4096 wide, for {FAMILY_21}, or "
            "Qwen2.5-VL 7B for Qwen-Image.",
        )
        if other
        else (),
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
    if channels != LATENT_CHANNELS_21:
        return None
    dim = size(tensors, f"encoder.{first}.weight")
    return Identity(
        family=f"{FAMILY_21} VAE",
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


# Names the models that are taken for Qwen-Image most often, by tensors that only they have.

# The first row whose names are all present wins, so a row with more names stands before one with
# fewer.
SIGNS: Mapping[str, tuple[str, ...]] = {
    "Lens": (
        "transformer_blocks.0.attn.norm_added_q.weight",
        "transformer_blocks.0.img_mlp.w1.weight",
    ),
    "FLUX.2": ("double_stream_modulation_img.lin.weight",),
    "FLUX.2 in diffusers names": ("double_stream_modulation_img.linear.weight",),
    "HunyuanVideo or HunyuanImage": ("txt_in.individual_token_refiner.blocks.0.norm1.weight",),
    "HunyuanVideo in diffusers names": (
        "context_embedder.token_refiner.refiner_blocks.0.norm1.weight",
    ),
    "Chroma": ("distilled_guidance_layer.norms.0.scale",),
    "FLUX": ("double_blocks.0.img_attn.qkv.weight",),
    "FLUX or a FLUX ControlNet in diffusers names": (
        "context_embedder.weight",
        "x_embedder.weight",
        "transformer_blocks.0.attn.norm_added_q.weight",
    ),
    "Wan": ("head.modulation", "patch_embedding.weight"),
    "Wan in diffusers names": ("condition_embedder.time_proj.weight", "patch_embedding.weight"),
    "Stable Diffusion 3": ("joint_blocks.0.context_block.attn.qkv.weight",),
    "Stable Diffusion 3 in diffusers names": ("pos_embed.proj.weight", "context_embedder.weight"),
    "Z-Image or Lumina 2": ("cap_embedder.1.weight", "noise_refiner.0.attention.k_norm.weight"),
    "Z-Image in diffusers names": (
        "cap_embedder.1.weight",
        "noise_refiner.0.attention.norm_k.weight",
    ),
    "HiDream": ("caption_projection.0.linear.weight",),
    "LTX-Video": (
        "adaln_single.emb.timestep_embedder.linear_1.bias",
        "transformer_blocks.0.attn2.to_k.weight",
    ),
    "OmniGen2": ("time_caption_embed.timestep_embedder.linear_1.bias",),
    "Cosmos": ("blocks.0.mlp.layer1.weight", "x_embedder.proj.1.weight"),
    "SDXL": ("input_blocks.0.0.weight", "label_emb.0.0.weight"),
    "Stable Diffusion 1 or 2": ("input_blocks.0.0.weight", "time_embed.0.weight"),
    "SDXL in diffusers names": ("conv_in.weight", "add_embedding.linear_1.weight"),
    "Stable Diffusion 1 or 2 in diffusers names": (
        "conv_in.weight",
        "down_blocks.0.resnets.0.conv1.weight",
    ),
    "the Wan 2.2 VAE": ("decoder.upsamples.0.upsamples.0.residual.2.weight",),
    "the Wan 2.2 VAE in diffusers names": ("decoder.up_blocks.0.upsampler.resample.1.weight",),
    "a FLUX or Stable Diffusion VAE": (
        "decoder.conv_in.weight",
        "decoder.mid.block_1.norm1.weight",
    ),
    "a FLUX or Stable Diffusion VAE in diffusers names": (
        "decoder.conv_in.weight",
        "decoder.mid_block.resnets.0.norm1.weight",
    ),
    "a Qwen3.5 language model, as the prompt enhancers of Qwen-Image-2.1 are": (
        "model.language_model.layers.0.linear_attn.A_log",
    ),
    "a T5 text encoder": ("encoder.block.0.layer.0.SelfAttention.k.weight",),
    "a CLIP text encoder": ("text_model.encoder.layers.0.mlp.fc1.weight",),
    "a Qwen3 text encoder": ("model.layers.0.self_attn.q_norm.weight", "model.embed_tokens.weight"),
    "a Llama or Mistral text encoder": (
        "model.layers.0.self_attn.q_proj.weight",
        "model.embed_tokens.weight",
    ),
}


def other_model(tensors: Tensors) -> Identity:
    """Answers always, as the last detector."""
    for name, signs in SIGNS.items():
        if all(sign in tensors for sign in signs):
            return Identity(f"not Qwen-Image: looks like {name}", "other")
    if not tensors:
        return Identity("not Qwen-Image: it holds no tensors", "other")
    return Identity("not Qwen-Image: no known model has these tensors", "other")
