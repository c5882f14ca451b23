"""The models that are taken for one of the families: known by name, and refused."""

from __future__ import annotations

from collections.abc import Mapping

from .protocol import Identity, Tensors

# By tensors that only they have. The first row whose names are all present wins, so a row with more
# names stands before one with fewer.
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


NOT_RUN = "not Qwen-Image: "


def told(title: str) -> str:
    """Returns what inspection says of another model, without that it is one."""
    return title.removeprefix(NOT_RUN)


def other_model(tensors: Tensors) -> Identity:
    """Answers always, as the last detector."""
    for name, signs in SIGNS.items():
        if all(sign in tensors for sign in signs):
            return Identity(f"{NOT_RUN}looks like {name}", "other")
    if not tensors:
        return Identity(f"{NOT_RUN}it holds no tensors", "other")
    return Identity(f"{NOT_RUN}no known model has these tensors", "other")
