"""An audit's report as tables for people."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

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
