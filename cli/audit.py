"""`qwen-l40s audit MODEL`: what fp8 or int8 loses on your own checkpoint and prompts."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..charts.figures import file_size
from ..errors import CheckpointError, SettingError, UnavailableError
from ..files import check_writable, print_text
from ..hosts.diffusers.settings import GenerateSettings
from ..loaders.source import MICRO_SIDE
from ..spec.formats import QUANTIZED
from .generate import MAKING, PACKAGES, make, side_of
from .output import ImageTarget, parse_size, require_packages, write_sheet
from .quantize import add_keep

if TYPE_CHECKING:
    from PIL import Image

    from ..loaders.source import Source
    from ..measure.fidelity import LayerError

Progress = Callable[[int, int], None]

MICRO_PROMPTS = 4
SHOWN_LAYERS, WIDTH = 20, 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Makes images of your prompts in bf16 and in fp8 or int8, from the same noise. Reports how "
        "much they differ, the error of each layer, and which layers to keep in bf16."
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a Qwen-Image diffusers folder in bf16, or with --layers-only a transformer file; "
        "default: the bundled micro model",
    )
    parser.add_argument("--precision", default="fp8", metavar="NAME", help="fp8 (default) or int8")
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="a prompt; repeat it for more"
    )
    parser.add_argument("--prompts", metavar="FILE", help="a text file, one prompt on each line")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="default: 20")
    parser.add_argument(
        "--size", type=parse_size, metavar="WxH", help="pixels; default: as `generate`"
    )
    parser.add_argument(
        "--cfg", type=float, metavar="SCALE", help="guidance; default: as of `generate`"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of every image; default: 0"
    )
    add_keep(parser, "as in `qwen-l40s quantize`")
    parser.add_argument(
        "--target",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="the share of the summed error that may remain once the proposed layers are in bf16; "
        "default: 0.5",
    )
    parser.add_argument(
        "--layers-only",
        action="store_true",
        help="make no images: measure one weight at a time, with Gaussian activations",
    )
    parser.add_argument(
        "--device", default="auto", metavar="NAME", help="auto (default), cpu, cuda or cuda:N"
    )
    parser.add_argument("--output", metavar="DIR", help="a folder for the pairs of images, as PNG")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not tables")


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
        print_text(audit_text(report))
        print(json.dumps(report))
    return 0


def _check_arguments(args: argparse.Namespace) -> None:
    if args.precision not in QUANTIZED:
        what = "is the reference" if args.precision == "bf16" else "is not a quantized format"
        raise SettingError(f"precision {args.precision!r} {what}: choose {' or '.join(QUANTIZED)}.")
    if not 0 < args.target < 1:
        raise SettingError(
            f"--target is {args.target!r}, but must be between 0 and 1: it is the share of the "
            "error that may remain."
        )
    if args.layers_only and (args.prompt or args.prompts or args.output):
        raise SettingError(
            "--layers-only makes no images: leave it out, or leave out --prompt, --prompts and "
            "--output."
        )


def _settings(args: argparse.Namespace) -> list[GenerateSettings]:
    prompts = [*args.prompt, *(_read_prompts(Path(args.prompts)) if args.prompts else ())]
    if not prompts and args.model is None:
        from ..micro.scene import gallery_prompts

        prompts = gallery_prompts(MICRO_PROMPTS)
    if not prompts:
        raise SettingError(
            "there is no prompt, but the loss depends on it: give --prompt TEXT or --prompts "
            "FILE, or use --layers-only."
        )
    side = MICRO_SIDE if args.model is None else side_of(args.model)
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
            f"--prompts cannot be read ({reason}): name a UTF-8 text file with a prompt on each "
            "line.",
            path,
        ) from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise SettingError("--prompts names a file without a prompt: write one on each line.", path)
    return prompts


def _model(args: argparse.Namespace) -> Path:
    from ..loaders.source import PIPELINE_INDEX, bundled_micro_folder

    model = bundled_micro_folder() if args.model is None else Path(args.model)
    if not args.layers_only and model.exists() and not (model / PIPELINE_INDEX).is_file():
        raise SettingError(
            f"{PIPELINE_INDEX} is missing, but images also need the text encoder and the VAE: "
            "name the whole diffusers folder, or add --layers-only.",
            model,
        )
    return model


def _checked_source(model: Path, keep: Sequence[str]) -> Source:
    """Reads headers alone: the transformer is complete, not quantized, and has layers to audit."""
    from ..hosts.diffusers.quantized import chosen_layers
    from ..loaders.source import check_complete, open_source

    source = open_source(model, "transformer")
    formats = source.part.quantization.formats
    if formats:
        found = ", ".join(f"{form} in {count} layers" for form, count in formats.items())
        raise CheckpointError(
            f"this is already quantized ({found}): audit the original bf16 file or folder.",
            source.path,
        )
    check_complete(source)
    chosen_layers((name.removesuffix(".weight") for name in source.tensors), keep)
    return source


# What is measured: layers, images, and what to keep in bf16.


def audit_layers(source: Source, args: argparse.Namespace) -> tuple[dict, list[LayerError]]:
    """Reads the weights one by one; returns the head of the report, and the layers."""
    from ..machine.device import choose_device
    from ..measure.fidelity import file_errors

    device, show = choose_device(args.device), _progress("layer")
    layers = file_errors(source, args.precision, args.keep, device=device, progress=show)
    return _head(source.path, device, "Gaussian", args), layers


def audit_images(
    model: Path, runs: Sequence[GenerateSettings], args: argparse.Namespace
) -> tuple[dict, list[LayerError]]:
    """Makes every run's image twice; returns the report but for the layers, and the layers.

    Raises:
        UnavailableError: the folder does not fit into memory in bf16.
    """
    from ..hosts.diffusers.load import load_pipeline
    from ..hosts.diffusers.quantized import quantize_transformer
    from ..hosts.diffusers.sample import settled
    from ..measure.fidelity import measured_layers

    try:
        pipeline = load_pipeline(model, precision="bf16", device=args.device)
    except UnavailableError as error:
        raise UnavailableError(
            f"{str(error).rstrip('.')}; `audit --layers-only` needs memory for one weight at a "
            "time."
        ) from error
    runs = [settled(run, pipeline) for run in runs]

    def images(name: str) -> Iterator[Image.Image]:
        show = _progress(f"{name} image")
        for done, run in enumerate(runs, 1):
            yield from make(pipeline, run, progress=False)[0].images
            if show is not None:
                show(done, len(runs))

    with measured_layers(pipeline.transformer, args.precision, args.keep) as layers:
        exact = list(images("bf16"))
    quantize_transformer(pipeline.transformer, args.precision, args.keep)
    found = list(images(args.precision))
    report = _head(model, pipeline.device, "sampled", args)
    report["settings"] = {name: value for name, value in vars(runs[0]).items() if name != "prompt"}
    return report | _compare(runs, exact, found, args), layers


def _head(model: Path, device: str, activations: str, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from ..hosts.diffusers.quantized import tensor_core_product

    return {
        "model": str(model),
        "precision": args.precision,
        "kept": list(args.keep),
        "device": device,
        "torch": torch.__version__,
        "products": str(tensor_core_product(args.precision, torch.device(device))),
        "activations": activations,
    }


def _compare(
    runs: Sequence[GenerateSettings],
    exact: Sequence[Image.Image],
    found: Sequence[Image.Image],
    args: argparse.Namespace,
) -> dict[str, Any]:
    import numpy as np

    from ..measure.fidelity import load_lpips, psnr

    distance, lpips = load_lpips()
    target = ImageTarget(args.output, stem="audit") if args.output is not None else None
    paths = target.paths(len(runs)) if target else [None] * len(runs)
    entries = []
    for run, plain, lossy, path in zip(runs, exact, found, paths, strict=True):
        pair = np.asarray(lossy), np.asarray(plain)
        decibels = psnr(*pair)
        entry = {
            "prompt": run.prompt,
            # JSON has no infinity, which equal images have.
            "psnr": None if decibels == float("inf") else round(decibels, 2),
            "lpips": distance and round(distance(*pair), 4),
        }
        if path is not None:
            captions = ["bf16", f"{args.precision}, PSNR {decibels:.1f} dB"]
            write_sheet(path, [plain, lossy], captions)
            entry["image"] = str(path)
        entries.append(entry)
    return {"images": entries, "lpips_by": lpips}


def summarize(layers: Sequence[LayerError], target: float) -> dict[str, Any]:
    """Sorts the layers, worst first, and proposes which of them to keep."""
    from ..measure.fidelity import propose_keep, summed_error

    total = summed_error(layer.error for layer in layers)
    keep = propose_keep(layers, target * total)
    ordered = sorted(layers, key=lambda layer: -layer.error)
    return {
        "layers": [{name: _short(x) for name, x in asdict(layer).items()} for layer in ordered],
        "summed_error": _short(total),
        "bytes_of_all": sum(layer.bytes for layer in layers),
        "keep": {**asdict(keep), "target": target, "error": _short(keep.error)},
    }


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _progress(what: str) -> Progress | None:
    def show(done: int, total: int) -> None:
        end = "\n" if done == total else ""
        print(f"\raudit: {what} {done} of {total}", end=end, file=sys.stderr, flush=True)

    return show if sys.stderr.isatty() else None


def audit_text(report: Mapping[str, Any]) -> str:
    layers, keep = report["layers"], report["keep"]
    lines = [
        f"{report['model']}: {report['precision']} against bf16 on {report['device']}",
        f"products   {report['products']}",
    ]
    if report["activations"] == "Gaussian":
        lines.append(
            "activations are Gaussian, so outliers of real activations are missing: name the"
        )
        lines.append("diffusers folder and prompts to measure with real activations")
    if "images" in report:
        how = report["settings"]
        size = f"{how['width']}x{how['height']}, {how['steps']} steps, guidance {how['cfg']:g}"
        lines.append(f"sampled    {size}, seed {how['seed']}\n\n PSNR dB   LPIPS  prompt")
        for image in report["images"]:
            decibels = "   equal" if image["psnr"] is None else f"{image['psnr']:8.2f}"
            lpips = f"{'-':>8}" if image["lpips"] is None else f"{image['lpips']:8.4f}"
            prompt = textwrap.shorten(image["prompt"], WIDTH - 18, placeholder="...")
            lines.append(f"{decibels}{lpips}  {prompt}")
        missing = report["images"][0]["lpips"] is None
        lines.append(f"LPIPS {'was' if missing else 'by'} {report['lpips_by']}")
    lines.append(f"\n{'worst layers':44}{'error':>9}{'outlier':>9}{'in bf16':>12}")
    for layer in layers[:SHOWN_LAYERS]:
        outlier = f"{'-':>9}" if layer["outlier"] is None else f"{layer['outlier']:9.1f}"
        errors = f"{layer['error']:9.4f}{outlier}"
        lines.append(f"{layer['layer']:44}{errors}{file_size(layer['bytes']):>12}")
    if len(layers) > SHOWN_LAYERS:
        lines.append(f"... and {len(layers) - SHOWN_LAYERS} more in the JSON")
    share = keep["bytes"] / report["bytes_of_all"]
    patterns = " ".join(f"'{pattern}'" for pattern in keep["patterns"])
    wrapped = textwrap.wrap(f"--keep {patterns}", WIDTH - 2, break_long_words=False)
    return "\n".join(
        [
            *lines,
            f"{'all':44}{report['summed_error']:9.4f}{file_size(report['bytes_of_all']):>21}",
            "error: of a layer's output, summed in squares; outlier: its largest activation, in",
            "root mean squares",
            f"\nto bring the summed error from {report['summed_error']:.4f} to "
            f"{keep['error']:.4f}, keep {len(keep['layers'])} of {len(layers)} layers",
            f"in bf16, which takes {file_size(keep['bytes'])} more ({share:.0%} of all layers in "
            "bf16):",
            *(f"  {line}" for line in wrapped),
        ]
    )
