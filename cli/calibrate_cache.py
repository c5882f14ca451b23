"""`qwen-l40s calibrate-cache`: fits the adaptive step cache's curve on a checkpoint."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..errors import SettingError, plain_write_errors
from ..hosts.diffusers.settings import GenerateSettings
from ..machine.store import CURVES, cache_folder, with_curve
from .generate import PACKAGES, add_load_arguments, load, parse_size, side_of
from .output import require_packages, write_whole

FITTING = "fitting a curve"
# A curve that tells less of what it was not fitted on says little about which steps are cheap.
USEFUL = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Fits the curve by which the step cache's adaptive method chooses steps, on your "
        "checkpoint in one precision, for one number of steps, and stores it in the cache folder. "
        "Paints ten prompts or more without a cache. The last line of output is one JSON object."
    )
    parser.add_argument("model", metavar="MODEL", help="a Qwen-Image diffusers folder")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="10 prompts or more, one a line; default: 10 of varied kind",
    )
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="default: 50")
    parser.add_argument(
        "--size", type=parse_size, metavar="WxH", help="pixels; default: as of `generate`"
    )
    parser.add_argument(
        "--cfg", type=float, metavar="SCALE", help="guidance; default: as of `generate`"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    add_load_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0."""
    side = side_of(args.model)
    width, height = args.size or (side, side)
    settings = GenerateSettings(
        prompt="", width=width, height=height, steps=args.steps, cfg=args.cfg, seed=args.seed
    )
    require_packages(FITTING, (*PACKAGES, "tqdm"))
    from tqdm import tqdm

    from ..measure.step_cache import PROMPTS, calibrate_curve, check_calibration

    prompts = PROMPTS if args.prompts is None else _lines(args.prompts)
    check_calibration(settings.steps, prompts)
    pipeline, _ = load(args.model, args)
    with tqdm(total=len(prompts), desc="calibrate-cache", unit="prompt") as bar:
        checkpoint, found = calibrate_curve(
            pipeline, settings, prompts, lambda done: bar.update(done - bar.n)
        )
    folder = cache_folder()
    with plain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / CURVES
    write_whole(path, with_curve(folder, checkpoint, found.curve).encode())
    print(
        f"R2 is {found.r2:.3f} on the {found.fitted} prompts of the fit and "
        f"{found.held_out_r2:.3f} on the {found.held_out} others."
    )
    if not found.held_out_r2 >= USEFUL:
        print(
            f"Below {USEFUL:g} the curve says little about the checkpoint: use the method schedule."
        )
    curve = found.curve
    report = {
        "file": str(path),
        "checkpoint": checkpoint,
        "precision": curve.precision,
        "steps": curve.steps,
        "size": [width, height],
        "prompts": len(prompts),
        "r2": round(found.r2, 4),
        "held_out_r2": round(found.held_out_r2, 4),
        "coefficients": list(curve.coefficients),
        "range": [curve.least, curve.most],
    }
    print(json.dumps(report))
    return 0


def _lines(path: Path) -> list[str]:
    """The prompts of a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SettingError(f"The prompts must be text in UTF-8 ({path}).") from error
    return [line.strip() for line in text.splitlines() if line.strip()]
