"""The micro Qwen-Image with untrained weights.

The real classes at the smallest dims that both hosts accept: ComfyUI fixes the text encoder's
head_dim at 128 and finds it by 512 key rows; transformers wants hidden = heads x 128; so the text
encoder has 4 heads, 4 key-value heads and a hidden size of 512. The VAE keeps the real compression,
channels and latent statistics: ComfyUI's Wan 2.1 latent format holds those as constants.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2TokenizerFast

from .tokenizer import save_tokenizer, train_tokenizer

TRANSFORMER = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 6,
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "joint_attention_dim": 512,
    "axes_dims_rope": (8, 12, 12),
}
VAE = {"base_dim": 8, "z_dim": 16}
TEXT = {
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
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 512,
    "fullatt_block_indexes": [0],
}
# The real Qwen-Image scheduler.
SCHEDULER = {
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "time_shift_type": "exponential",
}
_VOCABULARY_MULTIPLE = 32


@dataclass
class MicroModel:
    """The five components of the pipeline."""

    transformer: QwenImageTransformer2DModel
    vae: AutoencoderKLQwenImage
    text_encoder: Qwen2_5_VLForConditionalGeneration
    tokenizer: Qwen2TokenizerFast
    scheduler: FlowMatchEulerDiscreteScheduler

    def save(self, folder: Path) -> None:
        """Writes an ordinary diffusers folder with bf16 weights."""
        parts = {name: getattr(self, name) for name in ("transformer", "vae", "text_encoder")}
        half = {name: _half_copy(part) for name, part in parts.items()}
        pipeline = QwenImagePipeline(**half, tokenizer=self.tokenizer, scheduler=self.scheduler)
        pipeline.save_pretrained(folder)
        save_tokenizer(folder / "tokenizer")
        _add_transformers_4_rope(folder / "text_encoder" / "config.json")


def _add_transformers_4_rope(path: Path) -> None:
    """transformers 5 writes `rope_parameters` alone; 4 reads `rope_theta` and `rope_scaling`."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["text_config"] |= {name: TEXT[name] for name in ("rope_theta", "rope_scaling")}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def build(seed: int = 0) -> MicroModel:
    """Builds the untrained components in fp32 on the CPU, the same for the same seed."""
    torch.manual_seed(seed)
    tokenizer = train_tokenizer()
    return MicroModel(
        transformer=QwenImageTransformer2DModel(**TRANSFORMER),
        vae=AutoencoderKLQwenImage(**VAE),
        text_encoder=Qwen2_5_VLForConditionalGeneration(_text_config(tokenizer)),
        tokenizer=tokenizer,
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
    )


def _text_config(tokenizer: Qwen2TokenizerFast) -> Qwen2_5_VLConfig:
    names = ("endoftext", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names}
    return Qwen2_5_VLConfig(
        text_config=dict(
            TEXT,
            vocab_size=-(-len(tokenizer) // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE,
            bos_token_id=None,
            eos_token_id=ids["im_end"],
            pad_token_id=ids["endoftext"],
            tie_word_embeddings=True,
        ),
        vision_config=VISION,
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=True,
    )


def _half_copy(part: torch.nn.Module) -> torch.nn.Module:
    if isinstance(part, Qwen2_5_VLForConditionalGeneration):
        copy = type(part)(part.config)
    else:  # without _name_or_path, the folder that the part came from
        copy = type(part)(**{k: v for k, v in part.config.items() if not k.startswith("_")})
    copy.load_state_dict(part.state_dict())
    return copy.to(torch.bfloat16).eval()


def load(folder: Path) -> MicroModel:
    """Reads a folder that `MicroModel.save` wrote, in fp32, to train on."""
    pipeline = QwenImagePipeline.from_pretrained(folder, local_files_only=True).to(torch.float32)
    return MicroModel(**{name: getattr(pipeline, name) for name in MicroModel.__dataclass_fields__})
