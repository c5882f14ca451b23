"""`qwen-l40s generate`: a prompt to images, with any Qwen-Image diffusers folder."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from ..families.protocol import Family
from ..families.qwen_image import TEXT_TO_IMAGE
from ..families.registry import (
    FAMILIES,
    find_member,
    find_schedule,
    micro_folders,
    pipeline_family,
    schedule_names,
)
from ..files import print_text, write_whole
from ..hosts.diffusers.settings import GenerateSettings
from ..loaders.checkpoint import read_index
from ..loaders.header import read_object
from ..loaders.source import MICRO_ADVICE, MICRO_SIDE, MICRO_STEPS, bundled_micro_folder
from ..planning.step_cache import CHOICES, OFF
from ..version import __version__
from .output import ImageTarget, check_png, parse_size, png_bytes, require_packages, write_sheet

if TYPE_CHECKING:
    from ..hosts.diffusers.load import LoadedPipeline
    from ..hosts.diffusers.sample import Generation

MAKING = "making images"
PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "PIL", "psutil")

NEWEST = find_member("qwen-image-2.1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Makes images with a Qwen-Image diffusers folder, and says where they are."
    add_prompt(parser, required=True)
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="a Qwen-Image diffusers folder"
    )
    parser.add_argument("--negative-prompt", default=" ", metavar="TEXT", help="default: one space")
    parser.add_argument(
        "--size",
        type=parse_size,
        metavar="WxH",
        help=f"pixels; default: {TEXT_TO_IMAGE.side}x{TEXT_TO_IMAGE.side}, with Qwen-Image-2.1 "
        f"{NEWEST.side}x{NEWEST.side}, with a bundled model "
        f"{MICRO_SIDE}x{MICRO_SIDE}",
    )
    parser.add_argument(
        "--width", type=int, metavar="PIXELS", help="instead of the width of --size"
    )
    parser.add_argument(
        "--height", type=int, metavar="PIXELS", help="instead of the height of --size"
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=1,
        metavar="N",
        help="number of images, with seed, seed + 1, ...",
    )
    parser.add_argument(
        "--schedule",
        metavar="NAME",
        help=f"of the sigmas: {', '.join(schedule_names())}; few-step ones are for models trained "
        "for them, and set steps and cfg; default: the folder's own",
    )
    add_run_arguments(parser, output_help="default: the next free image_00001.png here")
    parser.add_argument("--grid", metavar="FILE", help="also write a .png contact sheet")


def add_prompt(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Adds the prompt, as an argument of its own or as an option."""
    group = parser.add_mutually_exclusive_group(required=required)
    group.add_argument(
        "prompt",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="PROMPT",
        help="the image in words, in quotes",
    )
    group.add_argument("--prompt", metavar="TEXT", help="the same, as an option")


def add_run_arguments(parser: argparse.ArgumentParser, *, output_help: str) -> None:
    """Adds the arguments that `generate` and `demo` share."""
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"default: the model card's, {TEXT_TO_IMAGE.steps}, of Qwen-Image-2.1 "
        f"{NEWEST.steps}, of a Turbo folder its own; in `demo` {MICRO_STEPS}",
    )
    parser.add_argument(
        "--cfg",
        type=float,
        metavar="SCALE",
        help="guidance, 1 is off; default: 4, and 1 in `generate` with Qwen-Image-2.1",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument(
        "--cache",
        default=OFF,
        metavar="NAME",
        help="skip steps that can be forecast from the steps before, with small differences: "
        f"{', '.join(CHOICES)}; default: {OFF}",
    )
    parser.add_argument(
        "--precision", default="auto", metavar="NAME", help="auto (default), bf16 or fp32"
    )
    parser.add_argument(
        "--device", default="auto", metavar="NAME", help="auto (default), cpu, cuda or cuda:N"
    )
    parser.add_argument(
        "--offload",
        default="auto",
        metavar="NAME",
        help="auto (default), none or model. none: all parts stay in VRAM; model: each part "
        "stays in system RAM until its turn; auto: model if the parts do not fit together",
    )
    parser.add_argument(
        "--optimize",
        action=argparse.BooleanOptionalAction,
        help="fused blocks and the fastest exact attention, or diffusers' code; default: on if "
        "there is a GPU",
    )
    parser.add_argument(
        "--attention",
        metavar="NAME",
        help="with --optimize: auto (default), fast (8 bits too, by their error in the run), "
        "diffusers, or a backend that `qwen-l40s doctor` lists",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object with images, settings, seconds"
    )
    parser.add_argument(
        "--output",
        metavar="PATH",
        help=f"a .png file to write or replace, or a folder for numbered files; {output_help}",
    )


def run(args: argparse.Namespace) -> int:
    side = side_of(args.model)
    width, height = args.size or (side, side)
    settings = GenerateSettings(
        prompt=args.prompt,
        negative_prompt=args.negative_prompt,
        width=width if args.width is None else args.width,
        height=height if args.height is None else args.height,
        steps=args.steps,
        cfg=args.cfg,
        seed=args.seed,
        batch=args.batch,
        cache=args.cache,
        schedule=args.schedule and args.schedule.replace("-", " "),
    )
    if settings.schedule is not None and (family := _family_of(Path(args.model))):
        find_schedule(settings.schedule, family).steps(settings.steps, 1)  # before it is loaded
    target = ImageTarget(args.output)
    if args.grid:
        check_png("--grid", args.grid)
    require_packages(MAKING, PACKAGES)
    if side == MICRO_SIDE and {settings.width, settings.height} != {side}:
        print(f"qwen-l40s: {MICRO_ADVICE}", file=sys.stderr)
    pipeline, load_seconds = load(args.model, args)
    result, seconds = make(pipeline, settings)
    paths = write_images(target, pipeline, result)
    if args.grid:
        captions = [f"seed {settings.seed + i}" for i in range(settings.batch)]
        write_sheet(Path(args.grid), result.images, captions)
    report = {
        "prompt": settings.prompt,
        "image": str(paths[0]),
        "images": [str(path) for path in paths],
        **({"grid": args.grid} if args.grid else {}),
        "seconds": seconds,
        "load_seconds": load_seconds,
        **run_facts(pipeline, result),
    }
    print_report(report, as_json=args.json)
    return 0


def side_of(model: str | Path) -> int:
    """Returns the side in pixels of the images that a model is trained for."""
    folder = Path(model)
    if _is_micro(folder):
        return MICRO_SIDE
    return (_family_of(folder) or FAMILIES[0]).members[0].side


def _family_of(folder: Path) -> Family | None:
    try:
        return pipeline_family(read_index(folder)[1])
    except CheckpointError:  # the loader says what is wrong with it
        return None


def _is_micro(folder: Path) -> bool:
    """Knows a copy of it too, as in the clone from which the command was installed."""

    def config(folder: Path) -> dict[str, Any]:
        return read_object(folder / "transformer" / "config.json", "a transformer's sizes")

    try:
        return config(folder) in map(config, map(bundled_micro_folder, micro_folders()))
    except CheckpointError:  # as above; and the micro model of 2.1 need not be there
        return False


def load(folder: str | Path, args: argparse.Namespace) -> tuple[LoadedPipeline, float]:
    """Loads the folder as the arguments say; returns it and the seconds it took."""
    from ..hosts.diffusers.load import load_pipeline

    start = time.perf_counter()
    pipeline = load_pipeline(
        folder,
        precision=args.precision,
        device=args.device,
        optimized=args.optimize,
        attention=args.attention,
        offload=args.offload,
    )
    return pipeline, round(time.perf_counter() - start, 3)


def make(
    pipeline: LoadedPipeline, settings: GenerateSettings, *, progress: bool = True
) -> tuple[Generation, float]:
    """Returns the images and the seconds that sampling and decoding took."""
    from ..hosts.diffusers.sample import generate

    result = generate(pipeline, **vars(settings), progress=progress)
    return result, round(result.sample_seconds + result.decode_seconds, 3)


def write_images(target: ImageTarget, pipeline: LoadedPipeline, result: Generation) -> list[Path]:
    """Writes every image with the settings that make it again, as a batch of one, inside."""
    paths = target.paths(len(result.images))
    for i, (path, image) in enumerate(zip(paths, result.images, strict=True)):
        settings = vars(result.settings) | {"seed": result.settings.seed + i, "batch": 1}
        versions = {name: version(name) for name in ("torch", "diffusers", "transformers")}
        metadata = {
            **settings,
            **_where(pipeline, result),
            # The name alone: images are shared, and a path tells about the machine.
            "model": pipeline.folder.resolve().name,
            "versions": {"qwen_l40s": __version__, **versions},
        }
        write_whole(path, png_bytes(image, metadata))
    return paths


def print_report(report: Mapping[str, Any], *, as_json: bool, more: str = "") -> None:
    """Prints one JSON object, or a sentence with files and seconds, which `more` ends."""
    files = [*report.get("images", [report["image"]]), *filter(None, [report.get("grid")])]
    sentence = f"saved {', '.join(files)} in {report['seconds']:.1f} s{more}"
    print_text(json.dumps(report) if as_json else sentence)


def run_facts(pipeline: LoadedPipeline, result: Generation) -> Mapping[str, Any]:
    reasons = {
        "precision_reason": pipeline.precision.reason,
        "offload_reason": pipeline.offload.reason,
    }
    facts = vars(result.settings) | _where(pipeline, result) | reasons
    return {name: value for name, value in facts.items() if name != "prompt"}


def _where(pipeline: LoadedPipeline, result: Generation) -> dict[str, Any]:
    optimized, cached = pipeline.optimized, result.cached
    ran = ["diffusers' code"] if optimized is None else optimized.report().splitlines()
    facts = cached and {
        "computed": cached.computed,
        "skipped": cached.skipped,
        "missed": [round(missed, 5) for missed in cached.missed],
        "distance": None if cached.distance is None else round(cached.distance, 5),
        "seconds_saved": round(cached.seconds_saved, 3),
    }
    return {
        "model": str(pipeline.folder),
        "device": pipeline.device,
        "precision": pipeline.precision.name,
        "offload": pipeline.offload.name,
        "optimized": optimized is not None,
        # The path of every part that ran.
        "ran": ran if cached is None else [*ran, *cached.lines()],
        **({"step_cache": facts} if facts else {}),
    }
