"""How training runs the transformer of each family: diffusers' own forward, in few kernels.

Both replace diffusers' rotary embedding for the whole process by the same rotation in real
arithmetic, since the compiler does not fuse complex numbers: train in a process of its own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from diffusers.models.transformers import transformer_qwenimage, transformer_qwenimage21


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
    """Qwen-Image to 2512: text and image in streams of their own, modulated in each block."""

    @staticmethod
    def zero_at_start(transformer: torch.nn.Module) -> list[torch.nn.Linear]:
        """Names the layers that start at zero, as adaLN-zero has it."""
        blocks = transformer.transformer_blocks
        modulations = [layer for b in blocks for layer in (b.img_mod[1], b.txt_mod[1])]
        return [transformer.norm_out.linear, transformer.proj_out, *modulations]

    @staticmethod
    def real_rotation(transformer: torch.nn.Module) -> None:
        stock = transformer.pos_embed.forward

        def real(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            return tuple(torch.view_as_real(freqs) for freqs in stock(*args, **kwargs))

        transformer.pos_embed.forward = real
        transformer_qwenimage.apply_rotary_emb_qwen = rotate

    @staticmethod
    def hidden_states(
        language_model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        return language_model(input_ids=ids, attention_mask=mask).last_hidden_state

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
    """Qwen-Image-2.1: one sequence of text and image, one modulation for all blocks.

    A batch has prompts of many lengths, padded behind. Each image stands where its own text ends,
    as in a pipeline of one prompt.
    """

    @staticmethod
    def zero_at_start(transformer: torch.nn.Module) -> list[torch.nn.Linear]:
        return [transformer.norm_out.linear, transformer.proj_out, transformer.modulation[1]]

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
    def hidden_states(
        language_model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Before the last norm, which the pipeline takes out too.

        Padding stands behind and attention is causal: no mask is needed.
        """
        handle = language_model.norm.register_forward_hook(lambda _, args, __: args[0])
        try:
            return language_model(input_ids=ids).last_hidden_state
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
