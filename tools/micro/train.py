"""Trains a micro model on a CUDA GPU and writes it as a diffusers folder.

    python -m qwen_l40s.tools.micro.train --folder out/micro --seconds 500 [--family 2.1]

Flow matching on painted scenes, in the latents of the bundled VAE: x_sigma = (1 - sigma) x_0 +
sigma noise, and the transformer learns noise - x_0, as `FlowMatchEulerDiscreteScheduler` integrates
it. Sigmas are drawn through the scheduler's own exponential shift for this image size.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import math
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d

from ...micro.scene import SEEN_PAIRS, describe, random_scene
from .model import FAMILIES, QWEN_IMAGE, SUFFIX, MicroModel, build, half_timesteps
from .painter import encode_scenes, paint

logger = logging.getLogger(__name__)

LEARNING_RATE = 2e-3
WARM_UP = 0.025  # of the training
LOG_SECONDS = 10.0
# Negative prompts people use; each stands for 5 % of the training prompts.
UNCONDITIONAL = (" ", "")
DROPOUT = 0.1
WORDINGS = 3
# What adaLN-zero starts at zero: the last layers and the modulations.
ZERO_AT_START = re.compile(r"norm_out\.linear\.|proj_out\.|(.+_mod|modulation)\.1\.")


class Muon(torch.optim.Optimizer):
    """Computes torch.optim.Muon's step with AdamW's rate (arXiv:2502.16982), a shape at a time.

    torch takes one matrix after another: 98 of them are 2,187 operations a step, here 180.
    """

    def __init__(
        self,
        weights: Iterable[torch.Tensor],
        lr: float,
        momentum: float = 0.95,
        decay: float = 0.01,
    ) -> None:
        super().__init__(weights, {"lr": lr, "momentum": momentum, "decay": decay})
        self._shapes: dict[torch.Size, tuple[list[torch.Tensor], torch.Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        [group] = self.param_groups
        if not self._shapes:  # some, behind the last text, have no gradient
            learning = [weight for weight in group["params"] if weight.grad is not None]
            for shape in dict.fromkeys(weight.shape for weight in learning):
                same = [weight for weight in learning if weight.shape == shape]
                self._shapes[shape] = same, torch.zeros_like(torch.stack(same))
        for shape, (weights, mean) in self._shapes.items():
            gradients = torch.stack([weight.grad for weight in weights])
            mean.lerp_(gradients, 1 - group["momentum"])
            update = orthogonal(gradients.lerp(mean, group["momentum"])).float().contiguous()
            torch._foreach_mul_(weights, 1 - group["lr"] * group["decay"])
            rate = group["lr"] * 0.2 * math.sqrt(max(shape))
            torch._foreach_add_(weights, list(update.unbind()), alpha=-rate)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Finds about the nearest orthogonal matrices of (N, rows, columns): Newton-Schulz in bf16."""
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x.bmm(x.mT)
        gram = torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315)
        x = torch.baddbmm(x, gram, x, beta=3.4445)
    return x.mT if tall else x


def progress(seconds: float, steps: int | None = None) -> Iterator[float]:
    """Yields before each step how much is done, of `steps` or else of the time; at least once."""
    start = time.monotonic()
    for step in itertools.count():
        passed = (time.monotonic() - start) / max(seconds, 1e-9)
        done = step / steps if steps else min(passed, 1.0)
        if step and done >= 1:
            return
        yield done


def fit(
    loss: Callable[[], torch.Tensor],
    optimizers: list[torch.optim.Optimizer],
    done_before: Iterable[float],
) -> None:
    """Trains in place and ends with the exponential moving average of the weights.

    Args:
        optimizers: with their largest rates, which fall to 0 as a cosine after the warm-up.
        done_before: see `progress`.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    weights = [weight for group in groups for weight in group["params"]]
    average, rates = [weight.detach().clone() for weight in weights], [g["lr"] for g in groups]
    start = logged = time.monotonic()
    total, count = torch.zeros((), device=weights[0].device), 0
    for step, done in enumerate(done_before):
        value = loss()
        for weight in weights:
            weight.grad = None
        value.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for group, rate in zip(groups, rates, strict=True):
            warm = min(1.0, 0.01 + done / WARM_UP)
            group["lr"] = rate * warm * (0.5 + 0.5 * math.cos(math.pi * done))
        for optimizer in optimizers:
            optimizer.step()
        torch._foreach_lerp_(average, weights, 1 - min(0.9995, step / (step + 10)))
        total, count, now = total + value.detach(), count + 1, time.monotonic()
        if now - logged > LOG_SECONDS or step == 0:
            mean = total.item() / count  # waits for the device, so that its time is counted
            logger.info("step %d: loss %.4f, %.0f s", step + 1, mean, now - start)
            total, count, logged = torch.zeros_like(total), 0, time.monotonic()
    with torch.no_grad():
        torch._foreach_copy_(weights, average)
    logger.info("%d steps, %.0f s", step + 1, time.monotonic() - start)


def make_scenes(count: int, seed: int) -> tuple[torch.Tensor, list[str]]:
    """Draws scenes of the seen pairs: their encoding (count, 9) and, by scene, WORDINGS prompts."""
    rng = random.Random(seed)
    scenes = [random_scene(rng, SEEN_PAIRS) for _ in range(count)]
    prompts = [describe(scene, rng) for scene in scenes for _ in range(WORDINGS)]
    return encode_scenes(scenes), prompts


def padded_prompts(
    model: MicroModel, texts: list[str], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids and mask of prompts in the template, (N, length), then of the unconditional."""
    before = model.family.dropped + model.family.prefix
    texts = [before + text + SUFFIX for text in (*texts, *UNCONDITIONAL)]
    encoded = model.tokenizer(texts, padding=True, pad_to_multiple_of=8, return_tensors="pt")
    return encoded.input_ids.to(device), encoded.attention_mask.to(device)


def draw_prompts(count: int, scenes: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draws a row of prompts for each scene: one of its wordings, or an unconditional one."""

    def rand(high: int) -> torch.Tensor:
        return torch.randint(high, scenes.shape, device=scenes.device, generator=generator)

    dropped = torch.rand(scenes.shape, device=scenes.device, generator=generator) < DROPOUT
    unconditional = count - 1 - rand(len(UNCONDITIONAL))
    return torch.where(dropped, unconditional, scenes * WORDINGS + rand(WORDINGS))


def image_convolution(conv: QwenImageCausalConv3d, x: torch.Tensor) -> torch.Tensor:
    """Runs a causal 3-D convolution as the 2-D convolution that it is for one frame."""
    padding = (conv._padding[2], conv._padding[0])
    return F.conv2d(x[:, :, 0], conv.weight[:, :, -1], conv.bias, conv.stride[1:], padding)[
        :, :, None
    ]


@torch.no_grad()
def encode_dataset(
    model: MicroModel, codes: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Paints and encodes scenes on the generator's device.

    Returns:
        Packed normalized latents (N, 256, 64), bf16.
    """
    vae, packed, pack = model.vae, [], model.pipeline._pack_latents
    # Mean and deviation that both hosts assume, each (1, z, 1, 1, 1).
    both = torch.tensor([vae.config.latents_mean, vae.config.latents_std], device=generator.device)
    mean, std = both.view(2, 1, -1, 1, 1, 1)
    for conv in vae.modules():
        if isinstance(conv, QwenImageCausalConv3d):
            conv.forward = partial(image_convolution, conv)
    with torch.autocast(generator.device.type, torch.bfloat16):
        for chunk in codes.split(256):
            images = paint(chunk, generator=generator) / 127.5 - 1
            channels = vae.encoder.conv_in.in_channels - 3  # a fourth one is opaque
            opaque = images.new_ones(1).expand(len(images), channels, *images.shape[2:])
            moments = vae.quant_conv(vae.encoder(torch.cat([images, opaque], 1)[:, :, None]))
            latents = ((moments.float().chunk(2, dim=1)[0] - mean) / std).bfloat16()
            side = latents.shape[-1]
            packed.append(pack(latents[:, :, 0], *latents.shape[:2], side, side))
    return torch.cat(packed)


def text_features(
    model: MicroModel, ids: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what encode_prompt gives: hidden states after the prefix, and their mask."""
    language_model = model.text_encoder.model.language_model
    hidden = model.family.stream.hidden_states(language_model, ids)
    start = len(model.tokenizer(model.family.dropped).input_ids)
    return hidden[:, start:].float(), mask[:, start:].bool()


def prepare_for_training(model: MicroModel, *, compile_blocks: bool) -> None:
    """Starts as adaLN-zero; runs the blocks in bf16 autocast, compiled where asked.

    The residual stream stays fp32. Patches diffusers' rotary embedding for the whole process, so
    train in a process of its own.
    """
    transformer = model.transformer
    for name, weight in transformer.named_parameters():
        if ZERO_AT_START.match(name):
            torch.nn.init.zeros_(weight)
    model.family.stream.real_rotation(transformer)
    if compile_blocks:
        transformer.compile_repeated_blocks(fullgraph=True)
        for layer in model.text_encoder.model.language_model.layers:
            layer.compile()
    device = transformer.device.type
    for block in transformer.transformer_blocks:
        block.forward = torch.autocast(device, torch.bfloat16)(block.forward)


def trained_weights(model: MicroModel) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Separates the matrices of the blocks, for Muon, from the rest."""
    language_model = model.text_encoder.model.language_model
    layers = (*model.transformer.transformer_blocks, *language_model.layers)
    matrices = {weight: None for part in layers for weight in part.parameters() if weight.ndim == 2}
    weights = (*model.transformer.parameters(), *language_model.parameters())
    return list(matrices), [weight for weight in weights if weight not in matrices]


def transformer_loss(
    model: MicroModel, scenes: int, batch: int, generator: torch.Generator
) -> Callable[[], torch.Tensor]:
    """Returns the loss of a step; paints, describes and encodes the scenes first.

    Every second step embeds timesteps as a bf16 run does, so that the model works in both
    precisions.
    """
    codes, texts = make_scenes(scenes, generator.initial_seed())
    ids, mask = padded_prompts(model, texts, generator.device)
    latents, odd = encode_dataset(model, codes, generator), cycle((False, True))

    def loss() -> torch.Tensor:
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
    """Returns the mean squared error of the velocity of latents (B, 256, 64) at all sigmas."""
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


def main() -> None:
    start = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=FAMILIES, default=QWEN_IMAGE.name)
    parser.add_argument("--folder", type=Path, required=True, help="to write")
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--steps", type=int, help="whatever time they take")
    parser.add_argument("--batch", type=int, default=384, help="images a step")
    parser.add_argument("--scenes", type=int, default=150_000, help="painted scenes")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_float32_matmul_precision("high")
    model = build(args.seed, FAMILIES[args.family])
    for part in (model.transformer.train(), model.text_encoder.train(), model.vae):
        part.to(args.device)
    prepare_for_training(model, compile_blocks=args.compile)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    loss = transformer_loss(model, args.scenes, args.batch, generator)
    matrices, rest = trained_weights(model)
    adam = torch.optim.AdamW(
        rest, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    left = args.seconds - (time.monotonic() - start)
    fit(loss, [Muon(matrices, LEARNING_RATE), adam], progress(left, args.steps))
    model.save(args.folder)
    logger.info("saved %s", args.folder)


if __name__ == "__main__":
    main()
