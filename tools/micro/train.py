"""Trains a bundled micro model on a CUDA GPU and writes it as a diffusers folder.

    python -m qwen_l40s.tools.micro.train vae         --folder models/micro
    python -m qwen_l40s.tools.micro.train decoder     --folder models/micro
    python -m qwen_l40s.tools.micro.train transformer --folder models/micro --fresh

`--family 2.1` names the family of a new folder, and models/micro_21 where there is no --folder.

Each stage reads what the folder holds and goes on from those weights; where there is no folder it
starts from the seed. The order matters: `vae` moves the latents, `decoder` does not, and the
transformer learns the latents that it finds (`--fresh` forgets what it had learned of others).
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch

from ...loaders.source import bundled_micro_folder
from .families import FAMILIES, QWEN_IMAGE
from .model import INDEX, MicroModel, build, load
from .train_transformer import prepare_for_training, train_transformer
from .train_vae import initialize, train_vae


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("vae", "decoder", "transformer"))
    parser.add_argument("--family", choices=FAMILIES, default=QWEN_IMAGE.name)
    parser.add_argument(
        "--folder",
        type=Path,
        help="the diffusers folder to go on from and to write; default: the family's in models/",
    )
    parser.add_argument(
        "--steps", type=int, help="optimizer steps (default: 4000, transformer: 12000)"
    )
    parser.add_argument("--batch", type=int, help="images a step (default: 64, transformer: 384)")
    parser.add_argument("--crop", type=int, default=128, help="side of most images of a VAE stage")
    parser.add_argument(
        "--latent-noise", type=float, default=0.0, help="on the decoder's latents, at most"
    )
    parser.add_argument(
        "--scenes", type=int, default=200_000, help="painted scenes to train the transformer on"
    )
    parser.add_argument(
        "--learning-rate", type=float, default=2e-3, help="of the transformer, after warm-up"
    )
    parser.add_argument(
        "--save-every", type=int, default=2000, help="steps between checkpoints of the transformer"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="start the transformer from the seed, keep the VAE"
    )
    parser.add_argument(
        "--no-compile", action="store_true", help="do not compile the transformer's blocks"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    family = FAMILIES[args.family]
    folder = args.folder or bundled_micro_folder(family.name)
    exists = (folder / INDEX).exists()
    model = load(folder) if exists else build(args.seed, family)
    if model.family is not family:
        parser.error(f"{folder} holds a {model.family.name}: give --family {model.family.name}.")
    if args.stage != "transformer":
        if not exists:
            initialize(model.vae)
        train_vae(
            model.vae,
            steps=args.steps or 4000,
            batch=args.batch or 64,
            seed=args.seed,
            device=device,
            decoder_only=args.stage == "decoder",
            crop=args.crop,
            latent_noise=args.latent_noise,
        )
        save(model, folder)
        return
    fresh = args.fresh or not exists
    if fresh:
        untrained = build(args.seed, family)
        model.transformer, model.text_encoder = untrained.transformer, untrained.text_encoder
    model.transformer.to(device).train()
    model.text_encoder.to(device).train()
    prepare_for_training(model, fresh=fresh, compile_blocks=not args.no_compile)
    train_transformer(
        model,
        steps=args.steps or 12_000,
        batch=args.batch or 384,
        scenes=args.scenes,
        seed=args.seed,
        device=device,
        learning_rate=args.learning_rate,
        save=lambda trained: save(trained, folder),
        save_every=args.save_every,
    )


def save(model: MicroModel, folder: Path) -> None:
    model.save(folder)
    logging.getLogger(__name__).info("saved %s", folder)


if __name__ == "__main__":
    main()
