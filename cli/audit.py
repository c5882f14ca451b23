"""`qwen-l40s audit MODEL`: what fp8 or int8 loses on your own checkpoint and prompts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, SettingError
from ..hosts.diffusers.settings import Settings
from ..planning.memory import QUANTIZED
from .audit_run import audit_images, audit_layers, summarize
from .audit_table import print_report
from .generate import MAKING, PACKAGES, parse_size
from .images import check_writable
from .packages import require_packages

if TYPE_CHECKING:
    from ..loaders.source import Source

MICRO_SIDE, USUAL_SIDE = 256, 1328
MICRO_PROMPTS = 4
INDEX = "model_index.json"


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    parser = subparsers.add_parser(
        "audit",
        parents=[common],
        help="measure what fp8 or int8 loses on your checkpoint and prompts",
        description="Paints your prompts in bf16 and in fp8 or int8 from the same noise, and says "
        "how far the images are apart, what each layer loses, and which layers to keep in bf16. "
        "Activations are rounded as a card's tensor cores need it, on a CPU too.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a Qwen-Image diffusers folder in bf16, default: the bundled micro model; with "
        "--layers-only also a transformer file",
    )
    parser.add_argument("--precision", default="fp8", help="fp8 or int8, default fp8")
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="may stand several times"
    )
    parser.add_argument("--prompts", metavar="FILE", help="a text file with a prompt on each line")
    parser.add_argument("--steps", type=int, default=20, help="default: 20")
    parser.add_argument("--size", type=parse_size, metavar="WxH", help="pixels, default 1328x1328")
    parser.add_argument("--cfg", type=float, default=4.0, help="guidance, default 4")
    parser.add_argument("--seed", type=int, default=0, help="of every image, default 0")
    parser.add_argument(
        "--keep",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATTERN",
        help="layers that stay in bf16, as in `qwen-l40s quantize`",
    )
    parser.add_argument(
        "--target",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="to which share of the summed error the proposed layers bring it, default 0.5",
    )
    parser.add_argument(
        "--layers-only",
        action="store_true",
        help="read one weight at a time and paint nothing: errors on Gaussian activations",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument(
        "--output", metavar="DIR", help="write the images there, side by side, as PNG"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the tables"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    _check_arguments(args)
    runs = [] if args.layers_only else _settings(args)
    if args.output is not None:
        check_writable(Path(args.output))
    require_packages(MAKING, PACKAGES)
    model = _model(args)
    source = _checked_source(model, args.keep)
    if args.layers_only:
        report, layers = audit_layers(source, args)
    else:
        report, layers = audit_images(model, runs, args)
    report |= summarize(layers, args.target)
    if args.json:
        print(json.dumps(report))
    else:
        print_report(report)
        print(json.dumps(report))
    return 0


def _check_arguments(args: argparse.Namespace) -> None:
    if args.precision not in QUANTIZED:
        what = (
            "is what the others are compared with"
            if args.precision == "bf16"
            else "is not a quantized format"
        )
        raise SettingError(f"precision {args.precision!r} {what}: audit {' or '.join(QUANTIZED)}.")
    if not 0 < args.target < 1:
        raise SettingError(
            f"--target must lie between 0 and 1, got {args.target!r}: it is the share of the "
            "error that may be left."
        )
    if args.layers_only and (args.prompt or args.prompts or args.output):
        raise SettingError(
            "--layers-only paints nothing: leave out --prompt, --prompts and --output, or leave "
            "out --layers-only."
        )


def _settings(args: argparse.Namespace) -> list[Settings]:
    """One for each prompt, checked before anything is loaded."""
    prompts = [*args.prompt, *(_read_prompts(Path(args.prompts)) if args.prompts else ())]
    if not prompts and args.model is None:
        from ..tools.micro.grammar import gallery_prompts

        prompts = gallery_prompts(MICRO_PROMPTS)
    if not prompts:
        raise SettingError(
            "there is no prompt: what a format loses depends on what is painted, so name yours "
            "with --prompt TEXT or --prompts FILE, or use --layers-only."
        )
    side = MICRO_SIDE if args.model is None else USUAL_SIDE
    width, height = args.size or (side, side)
    return [
        Settings(
            prompt=prompt,
            width=width,
            height=height,
            steps=args.steps,
            cfg=args.cfg,
            seed=args.seed,
        )
        for prompt in prompts
    ]


def _read_prompts(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise SettingError(
            f"--prompts {path} cannot be read ({reason}): name a text file in UTF-8 with a prompt "
            "on each line."
        ) from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise SettingError(f"--prompts {path} holds no prompt: write one on each line.")
    return prompts


def _model(args: argparse.Namespace) -> Path:
    from ..loaders.bundled import bundled_micro_folder

    model = bundled_micro_folder() if args.model is None else Path(args.model)
    if not args.layers_only and model.exists() and not (model / INDEX).is_file():
        raise SettingError(
            f"{model} is not a whole diffusers folder (there is no {INDEX} in it), and images need "
            "text encoder and VAE too: name the folder, or add --layers-only."
        )
    return model


def _checked_source(model: Path, keep: Sequence[str]) -> Source:
    """The transformer, from headers alone: complete, not quantized, and with layers to audit."""
    from ..hosts.diffusers.quantized import chosen_layers
    from ..loaders.source import open_source
    from ..loaders.transformer_tensors import check_complete

    source = open_source(model, "transformer")
    formats = source.part.quantization.formats
    if formats:
        found = ", ".join(f"{form} in {count} layers" for form, count in formats.items())
        raise CheckpointError(
            f"{source.path} is quantized already ({found}), and there is nothing left to compare "
            "it with: audit the bf16 file or folder that it was made from."
        )
    check_complete(source)
    chosen_layers((name.removesuffix(".weight") for name in source.tensors), keep)
    return source
