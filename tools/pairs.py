"""Makes one seed with stock ComfyUI's code and with each way of this package, side by side.

    python -m qwen_l40s.tools.pairs --prompt TEXT --seed 1 --output pairs.png
    python -m qwen_l40s.tools.pairs --micro --output docs/images/pairs.png

posts the template text_to_image_cached to a ComfyUI server, five times. "stock" is the same graph
with everything off, which is stock ComfyUI's image, bit for bit. Below each of the others stands
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
from PIL import Image

from ..cli.output import write_sheet
from ..client import Fleet
from ..measure.fidelity import psnr

GRAPH = Path(__file__).resolve().parents[1] / "workflows" / "api" / "text_to_image_cached.json"
OFF: dict[str, dict[str, Any]] = {
    "optimize": {"attention": "comfyui", "fused_blocks": False},
    "decode": {"fused": False},
}
# {what stands below an image: (precision, step cache, inputs of nodes)}
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
SIDE = 512  # of an image at most


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


def caption(way: str, image: Image.Image, exact: Image.Image) -> str:
    if image is exact:
        return way
    decibels = psnr(np.asarray(image), np.asarray(exact))
    return f"{way}: {'the same' if decibels == math.inf else f'{decibels:.1f} dB'}"


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
    exact = pictures["stock, bf16"]
    captions = [caption(way, image, exact) for way, image in pictures.items()]
    width, height = (round(side * SIDE / max(exact.size)) for side in exact.size)
    size = min(exact.size, (width, height))
    smaller = [image.resize(size, Image.Resampling.LANCZOS) for image in pictures.values()]
    write_sheet(options.output, smaller, captions, columns=len(smaller))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
