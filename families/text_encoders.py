"""The text encoders: Qwen2.5-VL, and Qwen3-VL of Qwen-Image-2.1."""

from __future__ import annotations

from .protocol import (
    QWEN_IMAGE,
    QWEN_IMAGE_21,
    Identity,
    Tensors,
    TextEncoder,
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
SIZES = {(2048, 36): "3B", (3584, 28): "7B", (5120, 64): "32B", (8192, 80): "72B"}
SIZES_OF_QWEN3_VL = {2048: "2B", 2560: "4B", 4096: "8B", 5120: "32B"}  # by their width


def qwen25_vl(tensors: Tensors) -> Identity | None:
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
            f"This is the {published} of Qwen3-VL: choose the 8B, 4096 wide, for {QWEN_IMAGE_21}, "
            f"or Qwen2.5-VL 7B for {QWEN_IMAGE}.",
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


QWEN25_VL = TextEncoder(
    name="Qwen2.5-VL 7B",
    title="Qwen2.5-VL text encoder",
    part="the Qwen2.5-VL text encoder",
    identify=qwen25_vl,
    comfyui=".hosts.comfyui.load.qwen_vl:QWEN25_VL",
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
    template=64,
    published=SIZES,
)
QWEN3_VL = TextEncoder(
    name="Qwen3-VL 8B",
    title="Qwen3-VL text encoder",
    part="the Qwen3-VL 8B text encoder",
    identify=qwen3_vl,
    comfyui=".hosts.comfyui.load.qwen_vl:QWEN3_VL",
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
    template=20,
)
