"""The bundled micro model as a field of velocities, and the judge of what it paints."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad, pixel_shuffle, pixel_unshuffle

from ...loaders.source import bundled_micro_folder
from ...micro.judge import adherence
from ...micro.scene import Scene, sample_prompts
from .run import Found

SIDE = 256
CHANNELS, LATENT = 16, 32
TOKENS = (LATENT // 2) ** 2
NEGATIVE = " "
# What attention on a card wants the number of tokens to be divisible by.
TEXT_STEP = 16
DECODED_AT_ONCE, JUDGED_AT_ONCE = 50, 20


def noise(seeds: Sequence[int], device: torch.device) -> torch.Tensor:
    """[N, 16, 32, 32], of each seed what diffusers draws on a CPU."""
    draws = [
        torch.randn(CHANNELS, LATENT, LATENT, generator=torch.Generator().manual_seed(seed))
        for seed in seeds
    ]
    return torch.stack(draws).to(device)


class Micro:
    """The model in fp32 on one device, with its text encoder and VAE."""

    def __init__(self, device: torch.device) -> None:
        from diffusers import QwenImagePipeline

        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self.device = device
        pipeline = QwenImagePipeline.from_pretrained(
            bundled_micro_folder(), local_files_only=True, dtype=torch.float32
        )
        self.pipeline: Any = pipeline.to(device)
        self.transformer = self.pipeline.transformer.eval()
        self.hidden: dict[str, torch.Tensor] = {}
        blocks = self.transformer.transformer_blocks
        self._keep_image(blocks[0], "first", before=True)
        self._keep_image(blocks[len(blocks) // 2], "middle", before=True)
        self._keep_image(blocks[len(blocks) // 2], "after middle")
        self._keep_image(blocks[-1], "last")

    def _keep_image(self, block: torch.nn.Module, name: str, before: bool = False) -> None:
        """Has the image's tokens before or after a block kept."""

        def keep_input(_block: Any, _arguments: Any, named: dict[str, Any]) -> None:
            self.hidden[name] = named["hidden_states"]

        def keep_output(_block: Any, _arguments: Any, output: tuple[torch.Tensor, ...]) -> None:
            self.hidden[name] = output[1]

        if before:
            block.register_forward_pre_hook(keep_input, with_kwargs=True)
        else:
            block.register_forward_hook(keep_output)

    def encode(self, prompts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Text [N, tokens, width] and which tokens are text, bool [N, tokens]."""
        text, mask = self.pipeline.encode_prompt(list(prompts), device=self.device)
        if mask is None:
            mask = torch.ones(text.shape[:2], device=self.device)
        return text, mask.bool()

    def decode(self, x: torch.Tensor) -> np.ndarray:
        """Images uint8 [N, 256, 256, 3] of latents."""
        config = self.pipeline.vae.config
        mean, deviation = (
            torch.tensor(values, device=self.device).view(1, -1, 1, 1)
            for values in (config.latents_mean, config.latents_std)
        )
        images = [
            self.pipeline.vae.decode((part * deviation + mean)[:, :, None]).sample[:, :, 0]
            for part in x.split(DECODED_AT_ONCE)
        ]
        pixels = ((torch.cat(images) + 1) * 127.5).round().clamp(0, 255)
        return pixels.permute(0, 2, 3, 1).to(torch.uint8).cpu().numpy()


class Prompts:
    """The micro model with one prompt an image: a `Field`."""

    def __init__(self, micro: Micro, prompts: Sequence[str]) -> None:
        self._micro = micro
        different = sorted(set(prompts))
        text, mask = micro.encode(different)
        negative, used = micro.encode([NEGATIVE])
        tokens = -(-text.shape[1] // TEXT_STEP) * TEXT_STEP
        order = [different.index(prompt) for prompt in prompts]
        self._text, self._mask = _padded(text, tokens)[order], _padded(mask, tokens)[order]
        self._negative, self._used = _padded(negative, tokens), _padded(used, tokens)

    def compute(self, x: torch.Tensor, sigma: float, rows: torch.Tensor) -> Found:
        count, hidden = len(x), self._micro.hidden
        output = self._micro.transformer(
            hidden_states=_packed(torch.cat((x, x))),
            timestep=x.new_full((2 * count,), sigma),
            encoder_hidden_states=torch.cat(
                (self._text[rows], self._negative.expand(count, -1, -1))
            ),
            encoder_hidden_states_mask=torch.cat((self._mask[rows], self._used.expand(count, -1))),
            img_shapes=[[(1, LATENT // 2, LATENT // 2)]] * (2 * count),
            return_dict=False,
        )[0]
        found = Found(
            _branches(_unpacked(output)),
            _branches(hidden["last"] - hidden["first"]),
            hidden["after middle"][:count] - hidden["middle"][:count],
        )
        hidden.clear()
        return found

    def finish(self, x: torch.Tensor, sigma: float, residual: torch.Tensor) -> torch.Tensor:
        model = self._micro.transformer
        both = model.img_in(_packed(x))[:, None] + residual
        both = both.transpose(0, 1).flatten(0, 1)
        time = model.time_text_embed(x.new_full((len(both),), sigma), both)
        return _branches(_unpacked(model.proj_out(model.norm_out(both, time))))

    def modulated(self, x: torch.Tensor, sigma: float) -> torch.Tensor:
        model = self._micro.transformer
        block, tokens = model.transformer_blocks[0], model.img_in(_packed(x))
        time = model.time_text_embed(x.new_full((len(x),), sigma), tokens)
        shift, scale, _gate = block.img_mod(time).chunk(2, dim=-1)[0].chunk(3, dim=-1)
        return block.img_norm1(tokens) * (1 + scale[:, None]) + shift[:, None]


def _padded(text: torch.Tensor, tokens: int) -> torch.Tensor:
    after = (0, tokens - text.shape[1])
    return pad(text, (0, 0, *after) if text.ndim == 3 else after)


def _packed(x: torch.Tensor) -> torch.Tensor:
    """[N, 16, 32, 32] -> [N, 256, 64]"""
    return pixel_unshuffle(x, 2).flatten(2).transpose(1, 2)


def _unpacked(tokens: torch.Tensor) -> torch.Tensor:
    """[N, 256, 64] -> [N, 16, 32, 32]"""
    return pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (LATENT // 2, LATENT // 2)), 2)


def _branches(both: torch.Tensor) -> torch.Tensor:
    """[2 N, ...], the prompts first -> [N, 2, ...]"""
    return both.unflatten(0, (2, -1)).transpose(0, 1).contiguous()


class Jury:
    """Judges images in other processes.

    Args:
        processes: 0 for this one.
    """

    def __init__(self, processes: int) -> None:
        context = get_context("spawn")  # a fork would share the card
        self._pool = processes and ProcessPoolExecutor(
            processes, context, torch.set_num_threads, (1,)
        )

    def right(self, images: np.ndarray, scenes: Sequence[Scene]) -> float:
        """Of 100 images, how many have their shapes, colours and places right."""
        judge = self._pool.map if self._pool else map
        parts = [
            slice(first, first + JUDGED_AT_ONCE) for first in range(0, len(scenes), JUDGED_AT_ONCE)
        ]
        found = judge(_right, (images[part] for part in parts), (scenes[part] for part in parts))
        return 100 * sum(found) / len(scenes)


def _right(images: np.ndarray, scenes: Sequence[Scene]) -> int:
    return sum(adherence(*pair).score == 1 for pair in zip(images, scenes, strict=True))


def held_out(count: int) -> list[tuple[str, Scene]]:
    """The prompts that the micro model's quality is measured with."""
    return sample_prompts(count, 1)
