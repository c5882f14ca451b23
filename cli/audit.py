"""`qwen-l40s audit MODEL`: what fp8 or int8 loses on your own checkpoint and prompts."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, SettingError
from ..hosts.diffusers.settings import GenerateSettings
from ..spec import QUANTIZED
from .audit_run import audit_images, audit_layers, summarize
from .generate import MAKING, PACKAGES, parse_size
from .output import check_writable, require_packages

if TYPE_CHECKING:
    from ..loaders.source import Source

MICRO_SIDE, USUAL_SIDE = 256, 1328
MICRO_PROMPTS = 4
INDEX = "model_index.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Paints your prompts in bf16 and in fp8 or int8 from the same noise, and says "
        "how far the images are apart, what each layer loses, and which layers to keep in bf16. "
        "Activations are rounded as a card's tensor cores need it, on a CPU too."
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


def _settings(args: argparse.Namespace) -> list[GenerateSettings]:
    """One for each prompt, checked before anything is loaded."""
    prompts = [*args.prompt, *(_read_prompts(Path(args.prompts)) if args.prompts else ())]
    if not prompts and args.model is None:
        from ..micro.scene import gallery_prompts

        prompts = gallery_prompts(MICRO_PROMPTS)
    if not prompts:
        raise SettingError(
            "there is no prompt: what a format loses depends on what is painted, so name yours "
            "with --prompt TEXT or --prompts FILE, or use --layers-only."
        )
    side = MICRO_SIDE if args.model is None else USUAL_SIDE
    width, height = args.size or (side, side)
    return [
        GenerateSettings(
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
    from ..loaders.source import bundled_micro_folder

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
    from ..loaders.convert import check_complete
    from ..loaders.source import open_source

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


# An audit's report as tables for people.

SHOWN_LAYERS = 20
WIDTH = 100


def print_report(report: Mapping[str, Any]) -> None:
    """Prints what `audit` found, as its JSON has it."""
    print(f"{report['model']}: {report['precision']} against bf16 on {report['device']}")
    print(f"products   {report['products']}")
    if report["activations"] == "Gaussian":
        print("activations are Gaussian, so that outliers of the real ones do not show: give the")
        print("diffusers folder and prompts to measure with them")
    if "images" in report:
        _print_images(report)
    _print_kinds(report)
    _print_layers(report)
    _print_keep(report)


def _print_images(report: Mapping[str, Any]) -> None:
    settings = report["settings"]
    print(
        f"sampled    {settings['width']}x{settings['height']}, {settings['steps']} steps, guidance "
        f"{settings['cfg']:g}, seed {settings['seed']}"
    )
    print(f"\n{'PSNR dB':>8}{'LPIPS':>8}  prompt")
    for image in report["images"]:
        print(f"{_cell(image['psnr'], '8.2f', 'equal')}{_cell(image['lpips'], '8.4f')}", end="  ")
        print(textwrap.shorten(_plain(image["prompt"]), WIDTH - 18, placeholder="..."))
    print(f"LPIPS {'by' if report['images'][0]['lpips'] is not None else 'was'} ", end="")
    print(report["lpips_by"])


def _print_kinds(report: Mapping[str, Any]) -> None:
    effect = report["chosen_by"] == "effect"
    print(f"\n{'layers of all blocks':28}{'error':>9}{'worst':>9}", end="")
    print(f"{'effect' if effect else 'summed':>9}{'in bf16':>12}")
    for row in report["kinds"]:
        print(f"{row['kind']:24}{row['layers']:4}{row['error']:9.4f}{row['worst']:9.4f}", end="")
        print(f"{row['summed']:9.4f}{_bytes(row['bytes']):>12}")
    total = f"{report['summed_error']:.4f}"
    print(f"{'all':46}{total:>9}{_bytes(report['bytes_of_all']):>12}")
    if effect:
        print("error: of a layer's output; effect: of the noise prediction when one layer alone is")
        print(f"quantized, summed in squares; with all at once it is {report['effect_of_all']:.4f}")
    elif "images" in report:
        print("the effect on the noise prediction was not measured: it needs memory for two fp32")
        print("transformers")


def _print_layers(report: Mapping[str, Any]) -> None:
    layers: Sequence[Mapping[str, Any]] = report["layers"]
    print(f"\n{'worst layers':44}{'error':>9}{'weight':>9}{'effect':>9}{'in bf16':>12}")
    for layer in layers[:SHOWN_LAYERS]:
        print(f"{layer['layer']:44}{layer['error']:9.4f}{layer['weight_error']:9.4f}", end="")
        print(f"{_cell(layer['effect'], '9.4f')}{_bytes(layer['bytes']):>12}")
    if len(layers) > SHOWN_LAYERS:
        print(f"... and {len(layers) - SHOWN_LAYERS} more in the JSON")


def _print_keep(report: Mapping[str, Any]) -> None:
    keep = report["keep"]
    share = keep["bytes"] / report["bytes_of_all"]
    print(f"\nto bring the summed {report['chosen_by']} from {report['summed_error']:.4f} ", end="")
    print(f"to {keep['error']:.4f}, keep {len(keep['layers'])} of {len(report['layers'])} layers")
    print(f"in bf16, which takes {_bytes(keep['bytes'])} more ({share:.0%} of what all take):")
    patterns = " ".join(f"'{pattern}'" for pattern in keep["patterns"])
    for line in textwrap.wrap(f"--keep {patterns}", WIDTH, break_long_words=False):
        print(f"  {line}")


def _cell(value: float | None, form: str, missing: str = "-") -> str:
    width = int(form.partition(".")[0])
    return f"{missing:>{width}}" if value is None else f"{value:{form}}"


def _plain(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]


def _bytes(count: int) -> str:
    for unit, suffix in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.2f} {suffix}"
    return f"{count} B"
