"""`qwen-l40s demo`: the bundled micro model generates a prompt, and the image is checked."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from ..families.registry import micro_folders
from ..files import print_text
from ..hosts.diffusers.settings import GenerateSettings
from ..loaders.source import MICRO, MICRO_SIDE, MICRO_STEPS, bundled_micro_folder
from ..micro.scene import gallery_prompts, parse_prompt
from .generate import (
    MAKING,
    PACKAGES,
    add_prompt,
    add_run_arguments,
    load,
    make,
    print_report,
    run_facts,
    write_images,
)
from .output import ImageTarget, check_png, require_packages, write_sheet

if TYPE_CHECKING:
    from PIL import Image

    from ..hosts.diffusers.load import LoadedPipeline

PROMPT = "a small red star at the top left on a blue background"
GALLERY = 12
CFG = 4.0  # both micro models are judged at it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Makes a 256x256 image with the bundled micro model and compares it with the prompt. The "
        "model knows one or two objects with size, colour, shape and place, on a background."
    )
    parser.epilog = f"default prompt: {PROMPT}"
    add_prompt(parser, required=False)
    parser.add_argument(
        "--family",
        choices=micro_folders(),
        default=MICRO,
        help="the micro Qwen-Image (default) or the micro Qwen-Image-2.1",
    )
    add_run_arguments(parser, output_help="default: the next free demo_00001.png here")
    parser.add_argument(
        "--grid", metavar="FILE", help=f"also write a .png contact sheet of {GALLERY} prompts"
    )


def run(args: argparse.Namespace) -> int:
    settings = GenerateSettings(
        prompt=PROMPT if args.prompt is None else args.prompt,
        width=MICRO_SIDE,
        height=MICRO_SIDE,
        steps=MICRO_STEPS if args.steps is None else args.steps,
        cfg=CFG if args.cfg is None else args.cfg,
        seed=args.seed,
        cache=args.cache,
    )
    target = ImageTarget(args.output, stem="demo")
    if args.grid:
        check_png("--grid", args.grid)
    folder = bundled_micro_folder(args.family)
    if not folder.is_dir():
        raise CheckpointError(
            f"The micro model of {args.family} is missing in this copy of the package: choose "
            "another --family, or install the package again.",
            folder,
        )
    instead = ", or `make demo` there"
    require_packages(MAKING, (*PACKAGES, "scipy", "tqdm"), instead=instead)
    pipeline, load_seconds = load(folder, args)
    result, seconds = make(pipeline, settings)
    adherence = _adherence(result.images[0], settings.prompt)
    [path] = write_images(target, pipeline, result)
    report = {
        "prompt": settings.prompt,
        "image": str(path),
        **({"grid": args.grid} if args.grid else {}),
        "seconds": seconds,
        "load_seconds": load_seconds,
        **run_facts(pipeline, result),
        "adherence": adherence,
    }
    if args.grid:
        _write_gallery(Path(args.grid), pipeline, settings)
    more = "" if adherence is None else f"; {adherence['score']:.0%} of the prompt is in the image"
    if not args.json:
        print_text(f"prompt: {settings.prompt}")
    print_report(report, as_json=args.json, more=more)
    return 0


def _adherence(image: Image.Image, prompt: str) -> dict[str, Any] | None:
    """Judges the image; returns None for a prompt outside the grammar."""
    from ..micro.judge import adherence

    scene = parse_prompt(prompt)
    return adherence(image, scene).as_dict() if scene else None


def _write_gallery(path: Path, pipeline: LoadedPipeline, settings: GenerateSettings) -> None:
    from tqdm import tqdm

    prompts = gallery_prompts(GALLERY, settings.seed)
    images = []
    for prompt in tqdm(prompts, desc="contact sheet", unit="image"):
        result, _ = make(pipeline, replace(settings, prompt=prompt), progress=False)
        images += result.images
    write_sheet(path, images, prompts)
