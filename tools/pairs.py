"""Paints one seed with stock ComfyUI's code and with each way of this package, side by side.

    python -m qwen_l40s.tools.pairs --prompt TEXT --seed 1 --output pairs.png
    python -m qwen_l40s.tools.pairs --micro --output docs/images/pairs.png

posts the template text_to_image_cached to a ComfyUI server, five times. "stock" is the same graph
with everything off, which is stock ComfyUI's picture, bit for bit. Below each of the others stands
its PSNR to that one.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..client import Fleet
from ..measure.fidelity import psnr

GRAPH = Path(__file__).resolve().parents[1] / "workflows" / "api" / "text_to_image_cached.json"
OFF = {"optimize": {"attention": "comfyui", "fused_blocks": False}, "decode": {"fused": False}}
# {what stands below a picture: (precision, step cache, inputs of nodes)}
WAYS: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {
    "stock, bf16": ("bf16", "off", OFF),
    "bf16": ("bf16", "off", {}),
    "int8": ("int8", "off", {}),
    "fp8": ("fp8", "off", {}),
    "bf16, cached": ("bf16", "balanced", {}),
}
MICRO = {
    "load": {"model": "micro (bundled)", "text_encoder": "automatic", "vae": "automatic"},
    "size": {"width": 256, "height": 256},
    "sample": {"steps": 20},
    "shift": {"shift": 1.0},
    "positive": {"text": "a large red star at the top left and a small blue ring at the right"},
    "negative": {"text": " "},
}
SIDE, GAP, LINE = 512, 8, 40  # of a picture at most, between two, and of the words below


def graph_of(way: str, micro: bool, prompt: str | None, seed: int) -> dict[str, Any]:
    precision, cache, inputs = WAYS[way]
    graph = json.loads(GRAPH.read_text(encoding="utf-8"))
    asked = {"load": {"precision": precision}, "cache": {"cache": cache}, "sample": {"seed": seed}}
    for changes in (MICRO if micro else {}, asked, inputs):
        for node, values in changes.items():
            graph[node]["inputs"] |= values
    if prompt is not None:
        graph["positive"]["inputs"]["text"] = prompt
    return graph


def beside(pictures: dict[str, Image.Image]) -> Image.Image:
    """Draws pictures of one size in a row, each with its name and its PSNR to the first."""
    first = next(iter(pictures.values()))
    width, height = first.size
    scale = min(1, SIDE / max(width, height))
    width, height = round(width * scale), round(height * scale)
    sheet = Image.new("RGB", (len(pictures) * (width + GAP) - GAP, height + LINE), (255, 255, 255))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    for index, (name, picture) in enumerate(pictures.items()):
        left = index * (width + GAP)
        sheet.paste(picture.resize((width, height), Image.Resampling.LANCZOS), (left, 0))
        words = name
        if picture is not first:
            decibels = psnr(np.asarray(picture), np.asarray(first))
            words += "\nthe same" if decibels == math.inf else f"\n{decibels:.1f} dB"
        draw.multiline_text((left + 4, height + 2), words, (0, 0, 0), font)
    return sheet


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m qwen_l40s.tools.pairs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--server", default="http://127.0.0.1:8188", metavar="URL")
    parser.add_argument("--prompt", help="default: the template's")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--micro", action="store_true", help="the bundled micro model")
    parser.add_argument("--output", type=Path, default=Path("pairs.png"), metavar="FILE")
    options = parser.parse_args(arguments)
    graphs = {way: graph_of(way, options.micro, options.prompt, options.seed) for way in WAYS}
    with tempfile.TemporaryDirectory() as folder, Fleet([options.server], folder) as fleet:
        jobs = {way: fleet.submit(graph) for way, graph in graphs.items()}
        pictures = {}
        for way, job in jobs.items():
            with Image.open(job.result().files[0]) as image:
                pictures[way] = image.convert("RGB")
    beside(pictures).save(options.output, optimize=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
