"""Runs Qwen-Image-2.1 in diffusers, from 0.42 on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

try:
    from diffusers import AutoencoderKLQwenImage21
    from diffusers.models.transformers import transformer_qwenimage21 as code
except ImportError:  # an older one
    AutoencoderKLQwenImage21 = code = None

from ...families.qwen_image_21 import MEMBER, QWEN_IMAGE_21
from ...optimizations.blocks.block import Step
from ...optimizations.blocks.host import PrefixedStream
from ...optimizations.blocks.workspace import Prefix
from ...optimizations.reference import Rotary, Tokens
from ...optimizations.vae.tiles import Layer, stage
from ...spec.vae import VaeShape
from ...verdict import Verdict
from .parts import PipelineParts, load_processor
from .qwen_image import OTHER_ARGUMENTS, TransformerPass

PIPELINE, PUBLISHED = "QwenImage21Pipeline", QWEN_IMAGE_21.vae.shape
VAE = AutoencoderKLQwenImage21
# What a block is called with.
ARGUMENTS = {
    *("hidden_states", "modulation", "rotary_emb", "attention_mask", "target_token_mask"),
    *("layer_cache", "kv_cache_mode", "cache_write_slice", "segments", "key_valid"),
}


class PrefixedTransformerPass(PrefixedStream, TransformerPass):
    """One call, whose blocks read diffusers' cache. The first step, which fills it, is diffusers'
    own.
    """

    streams, shared = ("hidden_states", "modulation"), ("rotary_emb", "attention_mask")

    @property
    def prefixes(self) -> Sequence[Prefix] | None:
        # diffusers' cache stays where it is until the pipeline ends.
        layers = getattr(self._given.get("kv_cache"), "layer_caches", ())
        return [Prefix(*layer.get()) for layer in layers] or None

    def fallback(self) -> Verdict | None:
        if self._given.get("kv_cache") is None:
            return Verdict("diffusers runs without its prefix cache")
        return super().fallback()

    def find_prefix(
        self, block: torch.nn.Module, positional: tuple, arguments: dict[str, Any]
    ) -> Prefix | Verdict | None:
        if arguments.get("kv_cache_mode") == "extract":  # diffusers fills the cache
            return None
        prefix = self.prefix_of(arguments)
        if positional or prefix is None or arguments.keys() - ARGUMENTS:
            return OTHER_ARGUMENTS
        return prefix

    def prefix_of(self, arguments: dict[str, Any]) -> Prefix | None:
        layer = arguments.get("layer_cache")
        if layer is None or layer.k is None or arguments.get("kv_cache_mode") != "cached":
            return None
        return Prefix(*layer.get())

    def new_step(self, tokens: Tokens, image: torch.Tensor, *shared: Any) -> Step:
        turns, mask = shared[0].unsqueeze(0), self.attention_mask(shared[1], image)
        return Step(tokens, Rotary(turns.real.contiguous(), turns.imag.contiguous()), mask)

    def parts_of(self, embedding: torch.Tensor) -> Sequence[torch.Tensor]:
        # The last row is for timestep 0.
        scale1, gate1, scale2, gate2 = embedding[:-1].chunk(4, -1)
        return scale1, gate1.tanh(), scale2, gate2.tanh()


PASSES = {}
if code is not None:
    PrefixedTransformerPass.block_class = code.QwenImage21TransformerBlock
    PrefixedTransformerPass.processors = (
        code.QwenImage21AttnProcessor,
        code.QwenImage21FlexAttnProcessor,
    )
    PASSES[code.QwenImage21Transformer2DModel] = PrefixedTransformerPass


def parts() -> PipelineParts:
    """Lists the classes of its pipeline, as a `PipelineParts`."""
    from diffusers import QwenImage21Pipeline, QwenImage21Transformer2DModel
    from transformers import Qwen3VLForConditionalGeneration

    return PipelineParts(
        pipeline=QwenImage21Pipeline,
        models={"transformer": QwenImage21Transformer2DModel, "vae": VAE},
        text_encoder=Qwen3VLForConditionalGeneration,
        words="processor",
        load_words=load_processor,
        arguments={},
        member=MEMBER,
    )


def vae_shape(config: Any) -> VaeShape | None:
    """Reads the sizes of a VAE's config; None of other layers than Qwen-Image-2.1's."""
    other = config.attn_scales or config.num_res_blocks != 2 or config.patch_size
    if other or not config.is_residual or tuple(config.dim_mult) != PUBLISHED.widths:
        return None
    return replace(
        PUBLISHED,
        padded_frames=1,
        dim=config.decoder_base_dim or config.base_dim,
        encoder_dim=config.base_dim,
        latent_channels=config.z_dim,
        image_channels=config.out_channels,
    )


def denormalized(latents: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    return latents * std + mean


def up_layers(block: Any) -> list[Layer]:
    if block.avg_shortcut is None:
        return [*block.resnets, *([block.upsampler] if block.upsampler else ())]
    # Of the frames that it makes of one, the last is the image.
    return [stage((*block.resnets, block.upsampler), partial(block.avg_shortcut, first_chunk=True))]
