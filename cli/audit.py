"""`qwen-l40s audit MODEL`: what fp8 or int8 loses on your own checkpoint and prompts."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import fill, shorten
from typing import TYPE_CHECKING, Any

from ..charts.figures import file_size, table
from ..errors import SettingError
from ..files import check_writable, print_text
from ..hosts.diffusers.settings import GenerateSettings
from ..loaders.source import MICRO_SIDE, bundled_micro_folder, open_source
from ..micro.scene import gallery_prompts
from .generate import MAKING, PACKAGES, make, side_of
from .output import ImageTarget, parse_size, require_packages, write_sheet
from .quantize import add_keep

if TYPE_CHECKING:
    from ..measure.fidelity import LayerError

Report = dict[str, Any]
Images = list[Any]
MICRO_PROMPTS = 4
LEFT = 0.5  # of the summed error, once the proposed layers are in bf16
SHOWN_LAYERS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Makes images of your prompts in bf16 and in fp8 or int8, from the same noise. Reports how "
        "much they differ, the error of each layer, and which layers to keep in bf16."
    )
    add: Any = parser.add_argument
    one = {"type": int, "metavar": "N"}
    folders = "a Qwen-Image diffusers folder in bf16; default: the bundled micro model"
    add("model", nargs="?", metavar="MODEL", help=folders)
    add("--precision", default="fp8", metavar="NAME", help="fp8 (default) or int8")
    repeat = {"action": "append", "default": [], "metavar": "TEXT"}
    add("--prompt", **repeat, help="a prompt; repeat it for more")
    add("--prompts", metavar="FILE", help="a text file, one prompt on each line")
    add("--steps", **one, default=20, help="default: 20")
    add("--size", type=parse_size, metavar="WxH", help="pixels; default: as `generate`")
    add("--cfg", type=float, metavar="SCALE", help="guidance; default: as of `generate`")
    add("--seed", **one, default=0, help="seed of every image; default: 0")
    add_keep(parser, "as in `qwen-l40s quantize`")
    add("--device", default="auto", metavar="NAME", help="auto (default), cpu, cuda or cuda:N")
    add("--output", metavar="DIR", help="a folder for the pairs of images, as PNG")
    add("--json", action="store_true", help="print one JSON object, not tables")


def run(args: argparse.Namespace) -> int:
    runs = _settings(args)
    if args.output is not None:
        check_writable(Path(args.output))
    require_packages(MAKING, PACKAGES)
    report = audit(runs, args)
    if not args.json:
        print_text("\n".join(audit_lines(report)))
    print(json.dumps(report))
    return 0


def _settings(args: argparse.Namespace) -> list[GenerateSettings]:
    prompts = [*args.prompt, *(_read_prompts(Path(args.prompts)) if args.prompts else ())]
    if not prompts and args.model is None:
        prompts = gallery_prompts(MICRO_PROMPTS)
    if not prompts:
        raise SettingError("there is no prompt: give --prompt TEXT or --prompts FILE.")
    side = MICRO_SIDE if args.model is None else side_of(args.model)
    how = dict(zip(("width", "height"), args.size or (side, side), strict=True))
    how |= {"steps": args.steps, "cfg": args.cfg, "seed": args.seed}
    return [GenerateSettings(prompt=prompt, **how) for prompt in prompts]


def _read_prompts(path: Path) -> list[str]:
    try:
        prompts = [*filter(None, map(str.strip, path.read_text(encoding="utf-8").splitlines()))]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "not UTF-8")
        said = f"--prompts cannot be read ({reason}): name a text file in UTF-8, a prompt a line."
        raise SettingError(said, path) from error
    if not prompts:
        raise SettingError("--prompts names a file without a prompt: write one on each line.", path)
    return prompts


def audit(runs: Sequence[GenerateSettings], args: argparse.Namespace) -> Report:
    """Makes every run's image twice; headers are checked before, and whether layers are left."""
    import torch
    from tqdm import tqdm

    from ..hosts.diffusers import quantized
    from ..hosts.diffusers.load import load_pipeline
    from ..hosts.diffusers.sample import settled
    from ..loaders.quantized_file import check_precision
    from ..measure.fidelity import measured_layers

    check_precision(args.precision)
    model = bundled_micro_folder() if args.model is None else Path(args.model)
    names = open_source(model, "transformer").tensors
    quantized.chosen_layers((name.removesuffix(".weight") for name in names), args.keep)
    pipeline = load_pipeline(model, precision="bf16", device=args.device)
    runs = [settled(run, pipeline) for run in runs]

    def images(name: str) -> Images:
        shown = tqdm(runs, f"audit: {name}", disable=None)
        return [make(pipeline, run, progress=False)[0].images[0] for run in shown]

    with measured_layers(pipeline.transformer, args.precision, args.keep) as layers:
        exact = images("bf16")
    quantized.quantize_transformer(pipeline.transformer, args.precision, args.keep)
    product = quantized.tensor_core_product(args.precision, torch.device(pipeline.device))
    return {
        "model": str(model),
        "precision": args.precision,
        "kept": list(args.keep),
        "device": pipeline.device,
        "torch": torch.__version__,
        "products": str(product),
        "settings": {name: value for name, value in vars(runs[0]).items() if name != "prompt"},
        **_compare(runs, exact, images(args.precision), args),
        **_summarize(layers),
    }


def _compare(runs: Sequence[GenerateSettings], exact: Images, found: Images, args: Any) -> Report:
    import numpy as np

    from ..measure.fidelity import load_lpips, psnr

    distance, lpips = load_lpips()
    paths: Sequence[Path | None] = [None] * len(runs)
    if args.output is not None:
        paths = ImageTarget(args.output, stem="audit").paths(len(runs))
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


def _summarize(layers: Sequence[LayerError]) -> Report:
    """Sorts the layers, worst first, and proposes which of them to keep."""
    from ..measure.fidelity import keep_patterns, propose_keep

    def summed(some: Iterable[LayerError]) -> float:
        return math.hypot(*(layer.error for layer in some))

    kept = propose_keep(layers, LEFT * summed(layers))
    names = [layer.layer for layer in kept]
    report = {
        "layers": [layer._asdict() for layer in sorted(layers, key=lambda layer: -layer.error)],
        "summed_error": summed(layers),
        "bytes_of_all": sum(layer.bytes for layer in layers),
        "keep": {
            "layers": names,
            "patterns": keep_patterns(names, [layer.layer for layer in layers]),
            "bytes": sum(layer.bytes for layer in kept),
            "error": summed(layer for layer in layers if layer not in kept),
        },
    }
    return json.loads(json.dumps(report), parse_float=lambda text: float(f"{float(text):.4g}"))


def audit_lines(report: Report) -> Iterator[str]:
    layers, keep, how = report["layers"], report["keep"], report["settings"]
    yield f"{report['model']}: {report['precision']} against bf16 on {report['device']}"
    yield f"products   {report['products']}"
    size = f"{how['width']}x{how['height']}, {how['steps']} steps, guidance {how['cfg']:g}"
    yield f"sampled    {size}, seed {how['seed']}\n"
    rows: list[tuple[str, ...]] = [("PSNR dB", "LPIPS", "prompt")]
    for image in report["images"]:
        decibels = "equal" if image["psnr"] is None else f"{image['psnr']:.2f}"
        lpips = "-" if image["lpips"] is None else f"{image['lpips']:.4f}"
        rows.append((decibels, lpips, shorten(image["prompt"], 80, placeholder="...")))
    yield from table(rows, (0, 1))
    yield f"LPIPS {'by' if 'not' not in report['lpips_by'] else 'was'} {report['lpips_by']}\n"
    rows = [("worst layers", "error", "outlier", "in bf16")]
    for layer in layers[:SHOWN_LAYERS]:
        figures = f"{layer['error']:.4f}", f"{layer['outlier']:.1f}", file_size(layer["bytes"])
        rows.append((layer["layer"], *figures))
    whole = f"{report['summed_error']:.4f}", "", file_size(report["bytes_of_all"])
    yield from table([*rows, (f"all {len(layers)} (see the JSON)", *whole)], (1, 2, 3))
    yield "error: of a layer's output, summed in squares; outlier: its largest activation in RMS\n"
    error, share = f"{whole[0]} to {keep['error']:.4f}", keep["bytes"] / report["bytes_of_all"]
    yield f"to bring the summed error from {error}, keep {len(keep['layers'])} of these layers"
    yield f"in bf16, which takes {file_size(keep['bytes'])} more ({share:.0%} of all in bf16):"
    yield fill(f"--keep {' '.join(map(repr, keep['patterns']))}", 100)
