"""The micro models: parts of the configs in their bundled folders, with weights to train, and how
training runs the transformer of each family: diffusers' own forward, in few kernels.

The real classes at the smallest dims that both hosts accept.

1.x: ComfyUI fixes the text encoder's head_dim at 128 and finds it by 512 key rows; transformers
wants hidden = heads x 128; so the text encoder has 4 heads, 4 key-value heads and a hidden size of
512. The VAE keeps the real compression, channels and latent statistics: ComfyUI's Wan 2.1 latent
format holds those as constants.

2.1: ComfyUI reads the transformer's dims from its shapes, but fixes the RoPE axes at 16 + 56 + 56,
so that a head has 128 channels. The text encoder's heads have 128 too, with the rotation of 24 + 20
+ 20. Of the VAE it fixes the multipliers, the 64 latent channels and their statistics.

`real_rotation` replaces diffusers' rotary embedding for the whole process by the same rotation in
real arithmetic, since the compiler does not fuse complex numbers: train in a process of its own.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, ModelMixin
from diffusers.models.transformers import transformer_qwenimage, transformer_qwenimage21
from transformers import PreTrainedModel, Qwen2Tokenizer

from ...hosts.diffusers.load import load_pipeline
from ...loaders.source import TEMPLATE_PREFIX, bundled_micro_folder

TRAINED = ("transformer", "text_encoder")
USER = "<|im_start|>user\n"
SYSTEM_21 = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"


def rotate(x: torch.Tensor, freqs: torch.Tensor, use_real: bool = False) -> torch.Tensor:
    """Rotates the pairs of the last dim.

    Args:
        x: (B, N, heads, D).
        freqs: cosine and sine, (N, D / 2, 2), or (B, N, D / 2, 2) where samples differ.
    """
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = freqs.unsqueeze(-3).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).type_as(x)


@contextlib.contextmanager
def half_timesteps(transformer: torch.nn.Module) -> Iterator[None]:
    """Embeds timesteps as a bf16 run does: rounded, with rounded frequencies."""
    time = transformer.time_text_embed.time_proj
    stock, exact = time.forward, dict(time.named_buffers())
    time.forward = lambda t: stock(t.bfloat16()).float()
    for name, frequencies in exact.items():
        setattr(time, name, frequencies.bfloat16().float())
    try:
        yield
    finally:
        time.forward = stock
        for name, frequencies in exact.items():
            setattr(time, name, frequencies)


class DualStream:
    """Runs Qwen-Image to 2512: text and image in streams of their own, modulated in each block."""

    @staticmethod
    def real_rotation(transformer: torch.nn.Module) -> None:
        stock = transformer.pos_embed.forward

        def real(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            return tuple(torch.view_as_real(freqs) for freqs in stock(*args, **kwargs))

        transformer.pos_embed.forward = real
        transformer_qwenimage.apply_rotary_emb_qwen = rotate

    @staticmethod
    def hidden_states(language_model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Returns the last; padding stands behind and attention is causal: no mask is needed."""
        return language_model(input_ids=ids, use_cache=False).last_hidden_state

    @staticmethod
    def velocity(
        transformer: torch.nn.Module,
        noisy: torch.Tensor,
        sigma: torch.Tensor,
        features: torch.Tensor,
        mask: torch.Tensor,
        **more: torch.Tensor,
    ) -> torch.Tensor:
        side = math.isqrt(noisy.shape[1])
        return transformer(
            hidden_states=noisy,
            encoder_hidden_states=features,
            encoder_hidden_states_mask=mask,
            timestep=sigma,
            img_shapes=[[(1, side, side)]] * len(noisy),
            return_dict=False,
            **more,
        )[0]


class SingleStream:
    """Runs Qwen-Image-2.1: one sequence of text and image, one modulation for all blocks.

    A batch has prompts of many lengths, padded behind. Each image stands where its own text ends,
    as in a pipeline of one prompt.
    """

    @staticmethod
    def real_rotation(transformer: torch.nn.Module) -> None:
        table = transformer.pos_embed

        def real(shapes: list, image: torch.Tensor, device: torch.device) -> torch.Tensor:
            [(_, height, width)] = shapes
            ends = table.text_lengths[:, None]
            text = torch.arange(image.numel() - height * width, device=device)
            down = torch.arange(height, device=device).sub(height - height // 2)
            right = torch.arange(width, device=device).sub(width - width // 2)
            places = (torch.zeros_like(image[-height * width :], dtype=torch.long) + ends,)
            places += (down.repeat_interleave(width), right.repeat(height))
            rows = [
                torch.cat([axis.expand(len(ends), -1) for axis in (text, place)], 1)
                for place in places
            ]
            table.freqs = [freqs.to(device) for freqs in table.freqs]
            freqs = torch.cat([f[row] for f, row in zip(table.freqs, rows, strict=True)], -1)
            return torch.view_as_real(freqs)

        table.forward = real
        transformer_qwenimage21.apply_rotary_emb_qwen = rotate

    @staticmethod
    def hidden_states(language_model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Returns those before the last norm, which the pipeline takes out too."""
        handle = language_model.norm.register_forward_hook(lambda _, args, __: args[0])
        try:
            return DualStream.hidden_states(language_model, ids)
        finally:
            handle.remove()

    @staticmethod
    def velocity(
        transformer: torch.nn.Module,
        noisy: torch.Tensor,
        sigma: torch.Tensor,
        features: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        tokens = noisy.shape[1]
        # One slot of the text encoder stands for 2 x 2 tokens.
        slots = torch.cat([torch.zeros_like(mask), mask.new_ones(len(mask), tokens // 4)], 1)
        transformer.pos_embed.text_lengths = mask.sum(1)
        given = transformer, noisy, sigma, features, mask
        return DualStream.velocity(*given, img_mask=slots)[:, -tokens:]


@dataclass(frozen=True)
class Family:
    """Describes one kind of micro model.

    Attributes:
        name: of `registry.micro_folders`.
        stream: how training runs the transformer.
        dropped: the start of a prompt in its template, which is cut off after encoding.
        prefix: what of the template follows up to the prompt.
    """

    name: str
    stream: type[DualStream] | type[SingleStream]
    dropped: str
    prefix: str

    @property
    def folder(self) -> Path:
        return bundled_micro_folder(self.name)


QWEN_IMAGE = Family("1.x", DualStream, TEMPLATE_PREFIX, "")
QWEN_IMAGE_21 = Family("2.1", SingleStream, SYSTEM_21, USER)
FAMILIES = {family.name: family for family in (QWEN_IMAGE, QWEN_IMAGE_21)}


@dataclass
class MicroModel:
    """Holds the parts of a pipeline that training reads or changes; the VAE is the bundled one."""

    family: Family
    pipeline: type[DiffusionPipeline]
    transformer: ModelMixin
    text_encoder: PreTrainedModel
    vae: ModelMixin
    tokenizer: Qwen2Tokenizer
    scheduler: FlowMatchEulerDiscreteScheduler

    def save(self, folder: Path) -> None:
        """Makes bf16 of what is trained and writes it, and all else as in the bundled folder."""
        ignore = shutil.ignore_patterns("*.md")
        shutil.copytree(self.family.folder, folder, ignore=ignore, dirs_exist_ok=True)
        for name in TRAINED:
            getattr(self, name).bfloat16().save_pretrained(folder / name)


def build(seed: int = 0, family: Family = QWEN_IMAGE) -> MicroModel:
    """Builds a model in fp32 on the CPU, untrained but for its VAE, the same for the same seed."""
    bundled = load_pipeline(family.folder, device="cpu", precision="fp32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = type(bundled.transformer).from_config(bundled.transformer.config)
        text_encoder = type(bundled.text_encoder)(bundled.text_encoder.config)
    return MicroModel(
        family,
        bundled.family.pipeline,
        transformer,
        text_encoder,
        bundled.vae.requires_grad_(False),
        getattr(bundled.words, "tokenizer", bundled.words),
        bundled.scheduler,
    )
