"""Trains the micro transformer and text encoder together: flow matching on painted scenes.

x_sigma = (1 - sigma) x_0 + sigma noise, and the transformer learns noise - x_0, as
`FlowMatchEulerDiscreteScheduler` integrates it. Sigmas are drawn through the scheduler's own
exponential shift for this image size. Needs torch 2.9 or newer for its Muon.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from itertools import cycle

import torch
import torch.nn.functional as F

from ...micro.scene import SEEN_PAIRS, describe, random_scene
from .model import MicroModel
from .painter import encode_scenes, paint
from .tokenizer import SUFFIX
from .train_vae import encode, image_convolutions, to_images

logger = logging.getLogger(__name__)

# Negative prompts people use; each stands for 5 % of the training prompts.
UNCONDITIONAL = (" ", "")
DROPOUT = 0.1
WORDINGS = 3


def make_scenes(count: int, seed: int) -> tuple[torch.Tensor, list[str]]:
    """Scenes of the seen pairs: their encoding (count, 9) and, scene by scene, WORDINGS prompts."""
    rng = random.Random(seed)
    scenes = [random_scene(rng, SEEN_PAIRS) for _ in range(count)]
    prompts = [describe(scene, rng) for scene in scenes for _ in range(WORDINGS)]
    return encode_scenes(scenes), prompts


class PaddedPrompts:
    """Prompts in the template, on the device, padded to one length: `ids`, `mask` (N, length)."""

    def __init__(self, model: MicroModel, texts: list[str], device: torch.device) -> None:
        before = model.family.dropped + model.family.prefix
        texts = [before + text + SUFFIX for text in (*texts, *UNCONDITIONAL)]
        encoded = model.tokenizer(texts, padding=True, pad_to_multiple_of=8, return_tensors="pt")
        self.ids, self.mask = encoded.input_ids.to(device), encoded.attention_mask.to(device)
        self.conditional = len(texts) - len(UNCONDITIONAL)

    def draw(
        self, scenes: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One wording for each scene index, some replaced by an unconditional prompt."""

        def rand(high: int) -> torch.Tensor:
            return torch.randint(high, scenes.shape, device=scenes.device, generator=generator)

        rows = scenes * WORDINGS + rand(WORDINGS)
        drop = torch.rand(scenes.shape, device=scenes.device, generator=generator) < DROPOUT
        rows = torch.where(drop, self.conditional + rand(len(UNCONDITIONAL)), rows)
        return self.ids[rows], self.mask[rows]


@torch.no_grad()
def encode_dataset(
    model: MicroModel, codes: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Paints and encodes scenes on the generator's device.

    Returns:
        Packed normalized latents (N, 256, 64), bf16.
    """
    packed = []
    with image_convolutions(), torch.autocast(generator.device.type, torch.bfloat16):
        for chunk in codes.split(256):
            images = to_images(model.vae, paint(chunk, generator=generator))
            latents = encode(model.vae, images)[0].to(torch.bfloat16)
            side = latents.shape[-1]
            packed.append(
                model.family.pipeline._pack_latents(
                    latents[:, :, 0], *latents.shape[:2], side, side
                )
            )
    return torch.cat(packed)


def text_features(
    model: MicroModel, ids: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the pipeline's encode_prompt gives: hidden states after the prefix, and their mask."""
    language_model = model.text_encoder.model.language_model
    hidden = model.family.stream.hidden_states(language_model, ids, mask)
    start = len(model.tokenizer(model.family.dropped).input_ids)
    return hidden[:, start:].float(), mask[:, start:].bool()


def prepare_for_training(model: MicroModel, *, fresh: bool, compile_blocks: bool) -> None:
    """Starts as adaLN-zero when fresh; runs the blocks in bf16 autocast, compiled where asked.

    The residual stream stays fp32. Patches diffusers' rotary embedding for the whole process, so
    train in a process of its own.
    """
    transformer, stream = model.transformer, model.family.stream
    if fresh:
        for layer in stream.zero_at_start(transformer):
            for weight in layer.parameters():
                torch.nn.init.zeros_(weight)
    stream.real_rotation(transformer)
    if compile_blocks:
        transformer.compile_repeated_blocks(fullgraph=True)
    device = transformer.device.type
    for block in transformer.transformer_blocks:
        block.forward = torch.autocast(device, torch.bfloat16)(block.forward)
    # Every second step embeds timesteps as a bf16 run does: rounded, with rounded frequencies. So
    # the model works in both precisions.
    stream.mix_timestep_precision(transformer, cycle((0, 1)))


def train_transformer(
    model: MicroModel,
    *,
    steps: int,
    batch: int,
    scenes: int,
    seed: int,
    device: torch.device,
    learning_rate: float,
    save: Callable[[MicroModel], None],
    save_every: int,
) -> None:
    """Trains in place; ends with (and saves) the exponential moving average of the weights.

    Args:
        steps: optimizer steps, 300 of warm-up, then a cosine to 0.
        scenes: painted scenes in the data set, each with WORDINGS prompts.
        save: called with the model holding the averaged weights, every `save_every` steps and at
            the end.
    """
    generator = torch.Generator(device).manual_seed(seed)
    codes, texts = make_scenes(scenes, seed)
    prompts = PaddedPrompts(model, texts, device)
    model.vae.to(device)
    start = time.monotonic()
    latents = encode_dataset(model, codes, generator)
    logger.info(
        "encoded %d scenes in %.0f s, text length %d",
        scenes,
        time.monotonic() - start,
        prompts.ids.shape[1],
    )
    weights = [
        *model.transformer.parameters(),
        *model.text_encoder.model.language_model.parameters(),
    ]
    average = [w.detach().clone() for w in weights]
    optimizers = _optimizers(model, weights, learning_rate)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: _rate(step, steps)) for o in optimizers
    ]
    shift = math.exp(model.scheduler.config.base_shift)
    losses, start = torch.zeros((), device=device), time.monotonic()
    for step in range(steps):
        rows = torch.randint(scenes, (batch,), device=device, generator=generator)
        loss = _loss(model, latents[rows].float(), prompts.draw(rows, generator), shift, generator)
        for weight in weights:
            weight.grad = None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for part in (*optimizers, *schedules):
            part.step()
        losses += loss.detach()
        torch._foreach_lerp_(average, weights, 1 - min(0.9995, step / (step + 10)))
        if (step + 1) % 250 == 0:
            logger.info(
                "step %d: loss %.4f, %.0f s",
                step + 1,
                losses.item() / 250,
                time.monotonic() - start,
            )
            losses.zero_()
        if (step + 1) % save_every == 0 or step + 1 == steps:
            current = [w.detach().clone() for w in weights]
            _assign(weights, average)
            save(model)
            if step + 1 < steps:
                _assign(weights, current)


def _loss(
    model: MicroModel,
    clean: torch.Tensor,
    prompt: tuple[torch.Tensor, torch.Tensor],
    shift: float,
    generator: torch.Generator,
) -> torch.Tensor:
    device, batch = clean.device, len(clean)
    noise = torch.randn(clean.shape, device=device, generator=generator)
    # Stratified over the batch: the loss differs far more between sigmas than between scenes.
    uniform = (
        torch.arange(batch, device=device) + torch.rand(batch, device=device, generator=generator)
    ) / batch
    sigma = shift * uniform / (1 + (shift - 1) * uniform)
    noisy = torch.lerp(clean, noise, sigma[:, None, None])
    with torch.autocast(device.type, torch.bfloat16):
        features, mask = text_features(model, *prompt)
    predicted = model.family.stream.velocity(model.transformer, noisy, sigma, features, mask)
    return F.mse_loss(predicted.float(), noise - clean)


def _optimizers(
    model: MicroModel, weights: list[torch.Tensor], rate: float
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the rest.

    On an H200, 1000 steps of batch 512 reach a loss of 0.143 so, and 0.198 with AdamW alone.
    """
    layers = (model.transformer.transformer_blocks, model.text_encoder.model.language_model.layers)
    matrices = {w for part in layers for w in part.parameters() if w.ndim == 2}
    rest = [w for w in weights if w not in matrices]
    return [
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True),
        # The rate is matched to AdamW's (arXiv:2502.16982).
        torch.optim.Muon(
            [w for w in weights if w in matrices],
            lr=rate,
            weight_decay=0.01,
            adjust_lr_fn="match_rms_adamw",
        ),
    ]


def _rate(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / 300) * (0.5 + 0.5 * math.cos(math.pi * step / steps))


@torch.no_grad()
def _assign(weights: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)
