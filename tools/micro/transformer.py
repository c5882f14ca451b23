"""The micro transformer's and text encoder's part of training: flow matching on painted scenes.

x_sigma = (1 - sigma) x_0 + sigma noise, and the transformer learns noise - x_0, as
`FlowMatchEulerDiscreteScheduler` integrates it. Sigmas are drawn through the scheduler's own
exponential shift for this image size.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable
from itertools import cycle

import torch
import torch.nn.functional as F

from ...micro.scene import SEEN_PAIRS, describe, random_scene
from .model import SUFFIX, MicroModel
from .painter import encode_scenes, paint
from .streams import half_timesteps
from .vae import encode, image_convolutions, to_images

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


def padded_prompts(
    model: MicroModel, texts: list[str], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of prompts in the template, (N, length), then of the unconditional ones."""
    before = model.family.dropped + model.family.prefix
    texts = [before + text + SUFFIX for text in (*texts, *UNCONDITIONAL)]
    encoded = model.tokenizer(texts, padding=True, pad_to_multiple_of=8, return_tensors="pt")
    return encoded.input_ids.to(device), encoded.attention_mask.to(device)


def draw_prompts(count: int, scenes: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A row of `count` prompts for each scene: one of its wordings, or an unconditional one."""

    def rand(high: int) -> torch.Tensor:
        return torch.randint(high, scenes.shape, device=scenes.device, generator=generator)

    dropped = torch.rand(scenes.shape, device=scenes.device, generator=generator) < DROPOUT
    unconditional = count - 1 - rand(len(UNCONDITIONAL))
    return torch.where(dropped, unconditional, scenes * WORDINGS + rand(WORDINGS))


@torch.no_grad()
def encode_dataset(
    model: MicroModel, codes: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Paints and encodes scenes on the generator's device.

    Returns:
        Packed normalized latents (N, 256, 64), bf16.
    """
    packed, pack = [], model.family.pipeline._pack_latents
    with image_convolutions(), torch.autocast(generator.device.type, torch.bfloat16):
        for chunk in codes.split(256):
            images = to_images(model.vae, paint(chunk, generator=generator))
            latents = encode(model.vae, images)[0].to(torch.bfloat16)
            side = latents.shape[-1]
            packed.append(pack(latents[:, :, 0], *latents.shape[:2], side, side))
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


def trained_weights(model: MicroModel) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The matrices of the blocks, for Muon, and the rest."""
    language_model = model.text_encoder.model.language_model
    layers = (*model.transformer.transformer_blocks, *language_model.layers)
    matrices = {weight: None for part in layers for weight in part.parameters() if weight.ndim == 2}
    weights = (*model.transformer.parameters(), *language_model.parameters())
    return list(matrices), [weight for weight in weights if weight not in matrices]


def transformer_loss(
    model: MicroModel, scenes: int, batch: int, generator: torch.Generator
) -> Callable[[float], torch.Tensor]:
    """The loss of a step; paints, describes and encodes the scenes first.

    Every second step embeds timesteps as a bf16 run does, so that the model works in both
    precisions.
    """
    codes, texts = make_scenes(scenes, generator.initial_seed())
    ids, mask = padded_prompts(model, texts, generator.device)
    latents, odd = encode_dataset(model, codes, generator), cycle((False, True))

    def loss(done: float) -> torch.Tensor:
        rows = torch.randint(scenes, (batch,), device=generator.device, generator=generator)
        prompts = draw_prompts(len(ids), rows, generator)
        half = half_timesteps(model.transformer) if next(odd) else contextlib.nullcontext()
        with half:
            given = latents[rows].float(), (ids[prompts], mask[prompts])
            return flow_loss(model, *given, generator)

    return loss


def flow_loss(
    model: MicroModel,
    clean: torch.Tensor,
    prompt: tuple[torch.Tensor, torch.Tensor],
    generator: torch.Generator,
) -> torch.Tensor:
    """The mean squared error of the velocity of latents (B, 256, 64) at sigmas of all sizes."""
    device, batch = clean.device, len(clean)
    noise = torch.randn(clean.shape, device=device, generator=generator)
    # Stratified over the batch: the loss differs far more between sigmas than between scenes.
    places = torch.arange(batch, device=device)
    uniform = (places + torch.rand(batch, device=device, generator=generator)) / batch
    shift = math.exp(model.scheduler.config.base_shift)
    sigma = shift * uniform / (1 + (shift - 1) * uniform)
    noisy = torch.lerp(clean, noise, sigma[:, None, None])
    with torch.autocast(device.type, torch.bfloat16):
        features, mask = text_features(model, *prompt)
    predicted = model.family.stream.velocity(model.transformer, noisy, sigma, features, mask)
    return F.mse_loss(predicted.float(), noise - clean)
