"""Trains a micro model on a CUDA GPU and writes it as a diffusers folder.

    python -m qwen_l40s.tools.micro.train --folder out/micro --seconds 500
    python -m qwen_l40s.tools.micro.train --folder out/micro --seconds 200 --stages decoder

The first makes a new model; the second goes on from the weights that the folder holds. `vae` moves
the latents, so the transformer starts anew after it; `decoder` leaves the latents alone. The folder
is written after each stage, and during one every `--save-every` seconds: what a time limit ends is
whole. `--family 2.1` names the family of a new folder.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from ...micro.scene import SEEN_PAIRS, sample_prompts
from .model import FAMILIES, INDEX, QWEN_IMAGE, MicroModel, build, load
from .painter import encode_scenes, paint
from .transformer import prepare_for_training, trained_weights, transformer_loss
from .vae import fit_statistics, image_convolutions, initialize, to_images, vae_loss

logger = logging.getLogger(__name__)

# The stages in their order, and the share of the time that each gets.
STAGES = {"vae": 0.22, "transformer": 0.68, "decoder": 0.1}
LEARNING_RATES = {"vae": 1.5e-3, "transformer": 2e-3, "decoder": 1.5e-3}
BATCHES = {"vae": 64, "transformer": 384, "decoder": 64}
WARM_UP = 0.025  # of a stage
LOG_SECONDS = 10.0


class Muon(torch.optim.Optimizer):
    """Computes torch.optim.Muon's step with AdamW's rate (arXiv:2502.16982), a shape at a time.

    torch takes one matrix after another: 98 of them are thousands of small kernels.
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
            for shape in {weight.shape for weight in learning}:
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
    """About the nearest orthogonal matrices of (N, rows, columns): Newton and Schulz in bf16."""
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(
            x, torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445
        )
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
    name: str,
    loss: Callable[[float], torch.Tensor],
    optimizers: list[torch.optim.Optimizer],
    done_before: Iterable[float],
    save: Callable[[], None],
    save_every: float,
) -> None:
    """Trains in place and ends with the exponential moving average of the weights.

    Args:
        loss: of a step, by how much is done.
        optimizers: with their largest rates, which fall to 0 as a cosine after the warm-up.
        done_before: see `progress`.
        save: called every `save_every` seconds, with the averages in place of the weights.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    weights = [weight for group in groups for weight in group["params"]]
    average, rates = [weight.detach().clone() for weight in weights], [g["lr"] for g in groups]
    start = logged = saved = time.monotonic()
    total, count = torch.zeros((), device=weights[0].device), 0
    for step, done in enumerate(done_before):
        value = loss(done)
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
            logger.info("%s step %d: loss %.4f, %.0f s", name, step + 1, mean, now - start)
            total, count, logged = torch.zeros_like(total), 0, time.monotonic()
        if now - saved > save_every:
            current = [weight.detach().clone() for weight in weights]
            _assign(weights, average)
            save()
            _assign(weights, current)
            saved = time.monotonic()
    _assign(weights, average)
    logger.info("%s ends after %d steps, %.0f s", name, step + 1, time.monotonic() - start)


@torch.no_grad()
def _assign(weights: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    torch._foreach_copy_(weights, values)


def train(
    model: MicroModel, stage: str, args: argparse.Namespace, *, until: float, fresh: bool
) -> None:
    """Runs a stage, in place, and saves.

    Args:
        until: when it ends (time.monotonic), unless `--steps` says when.
        fresh: whether the transformer starts from nothing.
    """
    device, rate = torch.device(args.device), LEARNING_RATES[stage]
    generator = torch.Generator(device).manual_seed(args.seed)
    batch = args.batch or BATCHES[stage]
    vae = model.vae.to(device)
    if stage == "transformer":
        model.transformer.to(device).train()
        model.text_encoder.to(device).train()
        prepare_for_training(model, fresh=fresh, compile_blocks=args.compile)
        loss = transformer_loss(model, args.scenes, batch, generator)
        matrices, rest = trained_weights(model)
        adam = torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
        optimizers = [Muon(matrices, rate), adam]
    else:
        alone = {"decoder_only": True, "latent_noise": model.family.latent_noise}
        loss = vae_loss(
            vae, batch, generator, crop=args.crop, **alone if stage == "decoder" else {}
        )
        parts = (vae.decoder, vae.post_quant_conv) if stage == "decoder" else (vae,)
        weights = [weight for part in parts for weight in part.parameters()]
        optimizers = [
            torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.99), weight_decay=1e-4, fused=True)
        ]
    done = progress(until - time.monotonic(), args.steps)
    save = functools.partial(model.save, args.folder)
    with image_convolutions():
        fit(stage, loss, optimizers, done, save, args.save_every)
        if stage == "vae":
            scenes = encode_scenes(
                [scene for _, scene in sample_prompts(16 * batch, args.seed, SEEN_PAIRS)]
            )
            fit_statistics(vae, to_images(vae, paint(scenes, generator=generator)))
    save()
    logger.info("saved %s", args.folder)


def main() -> None:
    start = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--family", choices=FAMILIES, default=QWEN_IMAGE.name)
    parser.add_argument(
        "--folder", type=Path, required=True, help="the diffusers folder to go on from and to write"
    )
    parser.add_argument("--seconds", type=float, default=500, help="for all stages together")
    parser.add_argument("--steps", type=int, help="of each stage, whatever time they take")
    parser.add_argument("--batch", type=int, help="images a step (default: 64, transformer: 384)")
    parser.add_argument("--crop", type=int, default=128, help="side of most images of a VAE stage")
    parser.add_argument(
        "--scenes", type=int, default=150_000, help="painted scenes to train the transformer on"
    )
    parser.add_argument("--save-every", type=float, default=60, metavar="SECONDS")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_float32_matmul_precision("high")
    exists = (args.folder / INDEX).exists()
    model = load(args.folder) if exists else build(args.seed, FAMILIES[args.family])
    if model.family.name != args.family:
        parser.error(
            f"{args.folder} holds a {model.family.name}: give --family {model.family.name}."
        )
    if not exists:
        initialize(model.vae)
    stages = [stage for stage in STAGES if stage in args.stages]
    fresh = not exists or "vae" in stages  # whose latents the transformer does not know
    if fresh:
        untrained = build(args.seed, model.family)
        model.transformer, model.text_encoder = untrained.transformer, untrained.text_encoder
    until = start
    for stage in stages:
        until += args.seconds * STAGES[stage] / sum(STAGES[each] for each in stages)
        train(model, stage, args, until=until, fresh=fresh)


if __name__ == "__main__":
    main()
