"""Recognizes Qwen2.5-VL, the text encoder of Qwen-Image, in the names that the three kinds of file
use.
"""

from __future__ import annotations

from .identity import Identity, Tensors, count_blocks, known, size

# transformers 5 nests the language model; ComfyUI's single file and the published folders do not.
LAYOUTS = (
    ("model.language_model.", "model.visual.", "transformers 5 names"),
    ("model.", "visual.", "flat names (ComfyUI's single file and the published folder)"),
)
# (hidden, layers) of the published sizes
SIZES = {(2048, 36): "3B", (3584, 28): "7B", (5120, 64): "32B", (8192, 80): "72B"}


def text_encoder(tensors: Tensors) -> Identity | None:
    """Qwen2.5(-VL): biases on q, k and v, and no norm on q and k, which sets it apart from Llama
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
    """A vision tower on its own: what GGUF users call mmproj."""
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


def qwen3_vl(tensors: Tensors) -> Identity | None:
    """Qwen3-VL, the text encoder of Qwen-Image-2.1 among others: DeepStack mergers, norms on q and
    k.
    """
    for language, visual, style in LAYOUTS:
        if f"{visual}deepstack_merger_list.0.norm.weight" not in tensors:
            continue
        hidden = size(tensors, f"{language}norm.weight")
        return Identity(
            family="Qwen3-VL text encoder (Qwen-Image-2.1 takes the one that is 4096 wide)",
            role="text_encoder",
            variant=style,
            dims=known(hidden=hidden, vocabulary=size(tensors, f"{language}embed_tokens.weight")),
            blocks=count_blocks(tensors, f"{language}layers."),
            folder="text_encoders",
            cannot_run=(
                "Qwen3-VL belongs to models that this package does not run, such as "
                "Qwen-Image-2.1: Qwen-Image needs Qwen2.5-VL 7B.",
            ),
        )
    return None
