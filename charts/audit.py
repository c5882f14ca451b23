"""What `audit` found, as tables for people."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .figures import file_size

SHOWN_LAYERS = 20
WIDTH = 100


def audit_text(report: Mapping[str, Any]) -> str:
    """The report of `qwen-l40s audit`, as its JSON has it."""
    lines = [
        f"{report['model']}: {report['precision']} against bf16 on {report['device']}",
        f"products   {report['products']}",
    ]
    if report["activations"] == "Gaussian":
        lines.append("activations are Gaussian, so outliers of real ones do not show: name the")
        lines.append("diffusers folder and prompts to measure with them")
    if "images" in report:
        lines += _images(report)
    return "\n".join([*lines, *_kinds(report), *_layers(report), *_keep(report)])


def _images(report: Mapping[str, Any]) -> Iterator[str]:
    settings = report["settings"]
    yield (
        f"sampled    {settings['width']}x{settings['height']}, {settings['steps']} steps, guidance "
        f"{settings['cfg']:g}, seed {settings['seed']}"
    )
    yield f"\n{'PSNR dB':>8}{'LPIPS':>8}  prompt"
    for image in report["images"]:
        measured = f"{_cell(image['psnr'], '8.2f', 'equal')}{_cell(image['lpips'], '8.4f')}"
        prompt = textwrap.shorten(image["prompt"], WIDTH - 18, placeholder="...")
        yield f"{measured}  {prompt}"
    how = "by" if report["images"][0]["lpips"] is not None else "was"
    yield f"LPIPS {how} {report['lpips_by']}"


def _kinds(report: Mapping[str, Any]) -> Iterator[str]:
    effect = report["chosen_by"] == "effect"
    summed = "effect" if effect else "summed"
    yield f"\n{'layers of all blocks':28}{'error':>9}{'worst':>9}{summed:>9}{'in bf16':>12}"
    for row in report["kinds"]:
        errors = "".join(f"{row[name]:9.4f}" for name in ("error", "worst", "summed"))
        yield f"{row['kind']:24}{row['layers']:4}{errors}{file_size(row['bytes']):>12}"
    total = f"{report['summed_error']:.4f}"
    yield f"{'all':46}{total:>9}{file_size(report['bytes_of_all']):>12}"
    if effect:
        yield "error: in a layer's output; effect: on the noise prediction when only that layer is"
        yield f"quantized, summed in squares; with all at once it is {report['effect_of_all']:.4f}"
    elif "images" in report:
        yield "the effect on the noise prediction was not measured: it needs memory for two fp32"
        yield "transformers"


def _layers(report: Mapping[str, Any]) -> Iterator[str]:
    layers: Sequence[Mapping[str, Any]] = report["layers"]
    yield f"\n{'worst layers':44}{'error':>9}{'weight':>9}{'effect':>9}{'in bf16':>12}"
    for layer in layers[:SHOWN_LAYERS]:
        errors = (
            f"{layer['error']:9.4f}{layer['weight_error']:9.4f}{_cell(layer['effect'], '9.4f')}"
        )
        yield f"{layer['layer']:44}{errors}{file_size(layer['bytes']):>12}"
    if len(layers) > SHOWN_LAYERS:
        yield f"... and {len(layers) - SHOWN_LAYERS} more in the JSON"


def _keep(report: Mapping[str, Any]) -> Iterator[str]:
    keep = report["keep"]
    share = keep["bytes"] / report["bytes_of_all"]
    yield (
        f"\nto bring the summed {report['chosen_by']} from {report['summed_error']:.4f} to "
        f"{keep['error']:.4f}, keep {len(keep['layers'])} of {len(report['layers'])} layers"
    )
    more = file_size(keep["bytes"])
    yield f"in bf16, which takes {more} more ({share:.0%} of all layers in bf16):"
    patterns = " ".join(f"'{pattern}'" for pattern in keep["patterns"])
    for line in textwrap.wrap(f"--keep {patterns}", WIDTH, break_long_words=False):
        yield f"  {line}"


def _cell(value: float | None, form: str, missing: str = "-") -> str:
    width = int(form.partition(".")[0])
    return f"{missing:>{width}}" if value is None else f"{value:{form}}"
