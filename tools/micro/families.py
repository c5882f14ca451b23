"""What differs between the micro models: classes, dims, words, and how training calls the parts.

The real classes at the smallest dims that both hosts accept.

1.x: ComfyUI fixes the text encoder's head_dim at 128 and finds it by 512 key rows; transformers
wants hidden = heads x 128; so the text encoder has 4 heads, 4 key-value heads and a hidden size of
512. The VAE keeps the real compression, channels and latent statistics: ComfyUI's Wan 2.1 latent
format holds those as constants.

2.1: ComfyUI reads the transformer's dims from its shapes, but fixes the RoPE axes at 16 + 56 + 56,
so that a head has 128 channels. The text encoder's heads have 128 too, with the rotation of 24 + 20
+ 20; its other dims are arguments. Of the VAE it fixes the multipliers, the 64 latent channels and
their statistics, and reads the two widths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diffusers import (
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    DiffusionPipeline,
    ModelMixin,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from ...loaders.source import TEMPLATE_PREFIX
from .streams import DualStream, SingleStream
from .tokenizer import PREFIX_TOKENS

USER = "<|im_start|>user\n"
SYSTEM_21 = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
REFERENCE_21 = "<image1><|vision_start|><|image_pad|><|vision_end|> <image2>"


@dataclass(frozen=True)
class Family:
    """One kind of micro model.

    Attributes:
        name: a key of `MICRO_FOLDERS`.
        transformer_dims, vae_dims: arguments of those classes.
        text, vision: arguments of the two parts of `text_config`.
        words: the part of the pipeline that holds the tokenizer: tokenizer or processor.
        dropped: the start of a prompt in its template that is cut off after encoding.
        prefix: what of the template follows up to the prompt.
        templates: {text whose words the tokenizer has to know: its tokens, where hosts count them}.
        stream: how training runs the transformer.
    """

    name: str
    pipeline: type[DiffusionPipeline]
    transformer: type[ModelMixin]
    transformer_dims: Mapping[str, Any]
    vae: type[ModelMixin]
    vae_dims: Mapping[str, Any]
    text_encoder: type[PreTrainedModel]
    text_config: type[PreTrainedConfig]
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    words: str
    dropped: str
    prefix: str
    templates: Mapping[str, int | None]
    stream: type[DualStream] | type[SingleStream]


QWEN_IMAGE = Family(
    name="1.x",
    pipeline=QwenImagePipeline,
    transformer=QwenImageTransformer2DModel,
    transformer_dims={
        "patch_size": 2,
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 6,
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "joint_attention_dim": 512,
        "axes_dims_rope": (8, 12, 12),
    },
    vae=AutoencoderKLQwenImage,
    vae_dims={"base_dim": 8, "z_dim": 16},
    text_encoder=Qwen2_5_VLForConditionalGeneration,
    text_config=Qwen2_5_VLConfig,
    text={
        "hidden_size": 512,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_scaling": {
            "type": "mrope",
            "rope_type": "default",
            "mrope_section": [16, 24, 24],
            "rope_theta": 1_000_000.0,
        },
    },
    vision={
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 512,
        "fullatt_block_indexes": [0],
    },
    words="tokenizer",
    dropped=TEMPLATE_PREFIX,
    prefix="",
    templates=PREFIX_TOKENS,
    stream=DualStream,
)

QWEN_IMAGE_21 = Family(
    name="2.1",
    pipeline=QwenImage21Pipeline,
    transformer=QwenImage21Transformer2DModel,
    transformer_dims={
        "num_layers": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 128,
        "context_in_dim": 128,
        "mlp_ratio": 1,
    },
    vae=AutoencoderKLQwenImage21,
    vae_dims={"base_dim": 4, "decoder_base_dim": 8},
    text_encoder=Qwen3VLForConditionalGeneration,
    text_config=Qwen3VLConfig,
    text={
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5_000_000.0,
        "rope_scaling": {
            "rope_type": "default",
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_theta": 5_000_000.0,
        },
    },
    vision={
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    },
    words="processor",
    dropped=SYSTEM_21,
    prefix=USER,
    templates={SYSTEM_21 + USER: None, REFERENCE_21: None},
    stream=SingleStream,
)
FAMILIES = {family.name: family for family in (QWEN_IMAGE, QWEN_IMAGE_21)}
