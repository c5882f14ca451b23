"""Measures what `audit` reports: layers, images, and what to keep in bf16."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UnavailableError
from ..hosts.diffusers.settings import GenerateSettings
from ..measure.keep import LayerCost, kind_of, propose_keep, summed_error
from .contact_sheet import write_sheet
from .generate import make
from .output import ImageTarget

if TYPE_CHECKING:
    from PIL import Image

    from ..hosts.diffusers.load import LoadedPipeline
    from ..loaders.source import Source
    from ..measure.layer_errors import LayerError

Progress = Callable[[int, int], None]


def audit_layers(source: Source, args: argparse.Namespace) -> tuple[dict, list[LayerError]]:
    """Reads the weights one by one; returns the head of the report, and the layers."""
    from ..machine.device import choose_device
    from ..measure.layer_errors import file_errors

    device = choose_device(args.device)
    layers = file_errors(
        source, args.precision, args.keep, device=device, progress=_progress("layer")
    )
    return _head(source.path, device, "Gaussian", args), layers


def audit_images(
    model: Path, runs: Sequence[GenerateSettings], args: argparse.Namespace
) -> tuple[dict, list[LayerError]]:
    """Paints every run twice; returns the report but for the layers, and the layers.

    Raises:
        UnavailableError: the folder does not fit into memory in bf16.
    """
    from ..hosts.diffusers.load import load_pipeline
    from ..hosts.diffusers.quantized import quantize_transformer
    from ..measure import layer_errors

    try:
        pipeline = load_pipeline(model, precision="bf16", device=args.device)
    except UnavailableError as error:
        raise UnavailableError(
            f"{str(error).rstrip('.')}; `audit --layers-only` needs one weight at a time."
        ) from error
    transformer = pipeline.transformer
    with layer_errors.measured_layers(transformer, args.precision, args.keep) as sums:
        with layer_errors.recorded_probes(transformer) as probes:
            exact = _paint(pipeline, runs[:1], "bf16")
        exact += _paint(pipeline, runs[1:], "bf16")
    together = layer_errors.effects(
        transformer, probes, args.precision, args.keep, _progress("effect of layer")
    )
    alone, all_layers = together or (None, None)
    layers = layer_errors.sampled_errors(transformer, sums, args.precision, alone)
    quantize_transformer(transformer, args.precision, args.keep)
    found = _paint(pipeline, runs, args.precision)
    report = _head(model, pipeline.device, "sampled", args)
    settings = {name: value for name, value in vars(runs[0]).items() if name != "prompt"}
    report |= {"settings": settings, "effect_of_all": _short(all_layers)}
    report |= _compare(runs, exact, found, args)
    return report, layers


def _head(model: Path, device: str, activations: str, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from ..optimizations.w8a8 import tensor_core_product

    return {
        "model": str(model),
        "precision": args.precision,
        "kept": list(args.keep),
        "device": device,
        "torch": torch.__version__,
        "products": str(tensor_core_product(args.precision, torch.device(device))),
        "activations": activations,
    }


def _paint(
    pipeline: LoadedPipeline, runs: Sequence[GenerateSettings], name: str
) -> list[Image.Image]:
    progress = _progress(f"{name} image")
    images = []
    for run in runs:
        images += make(pipeline, run, progress=False)[0].images
        if progress is not None:
            progress(len(images), len(runs))
    return images


def _compare(
    runs: Sequence[GenerateSettings],
    exact: Sequence[Image.Image],
    found: Sequence[Image.Image],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Measures the pairs of images, and writes them where `--output` says."""
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
            "lpips": None if distance is None else round(distance(*pair), 4),
        }
        if path is not None:
            captions = ["bf16", f"{args.precision}, PSNR {decibels:.1f} dB"]
            write_sheet(path, [plain, lossy], captions, title=run.prompt)
            entry["image"] = str(path)
        entries.append(entry)
    return {"images": entries, "lpips_by": lpips}


def summarize(layers: Sequence[LayerError], target: float) -> dict[str, Any]:
    """Layers worst first, the same by kind, and what to keep."""
    by = "effect" if layers[0].effect is not None else "error"
    costs = [LayerCost(layer.layer, getattr(layer, by), layer.bytes) for layer in layers]
    total = summed_error(cost.error for cost in costs)
    keep = propose_keep(costs, target * total)
    kinds: dict[str, list[LayerError]] = {}
    for layer in layers:
        kinds.setdefault(kind_of(layer.layer), []).append(layer)
    rows = [
        {
            "kind": kind,
            "layers": len(members),
            "error": _short(sum(layer.error for layer in members) / len(members)),
            "worst": _short(max(layer.error for layer in members)),
            "summed": _short(summed_error(getattr(layer, by) for layer in members)),
            "bytes": sum(layer.bytes for layer in members),
        }
        for kind, members in kinds.items()
    ]
    ordered = sorted(layers, key=lambda layer: -getattr(layer, by))
    return {
        "chosen_by": by,
        "layers": [{name: _short(x) for name, x in asdict(layer).items()} for layer in ordered],
        "kinds": sorted(rows, key=lambda row: -row["summed"]),
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
