"""Qwen-Image 1.x in diffusers."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel

from ...families.qwen_image import QWEN_IMAGE, TEXT_TO_IMAGE
from ...spec.vae import VaeShape
from .forward import TransformerPass

PIPELINE = "QwenImagePipeline"
PASSES = {QwenImageTransformer2DModel: TransformerPass}
VAE = AutoencoderKLQwenImage
MAX_PROMPT_TOKENS = 512  # the default of its pipeline
FRAMES = 3  # a kernel's reach over time; the class pads an image to it


def parts() -> Any:
    """Lists the classes of its text-to-image pipeline, as a `load.PipelineParts`."""
    from diffusers import QwenImagePipeline
    from transformers import Qwen2_5_VLForConditionalGeneration

    from .load import PipelineParts
    from .text_encoder import load_tokenizer

    return PipelineParts(
        pipeline=QwenImagePipeline,
        models={"transformer": QwenImageTransformer2DModel, "vae": AutoencoderKLQwenImage},
        text_encoder=Qwen2_5_VLForConditionalGeneration,
        words="tokenizer",
        load_words=load_tokenizer,
        arguments={"max_sequence_length": MAX_PROMPT_TOKENS},
        member=TEXT_TO_IMAGE,
    )


def vae_shape(config: object) -> VaeShape | None:
    """Reads the sizes of a VAE's config; None of other layers than Qwen-Image's."""
    other = config.attn_scales or config.num_res_blocks != 2
    if other or tuple(config.dim_mult) != QWEN_IMAGE.vae.shape.widths:
        return None
    return VaeShape(
        dim=config.base_dim,
        latent_channels=config.z_dim,
        image_channels=config.input_channels,
        padded_frames=FRAMES,
    )


def denormalized(latents: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Gives what the VAE decodes, by the pipeline's arithmetic."""
    return latents / (1.0 / std) + mean


def up_layers(block: torch.nn.Module) -> list[torch.nn.Module]:
    """Takes a stage of the decoder apart."""
    return [*block.resnets, *(block.upsamplers or ())]
