"""Measures how well the bundled micro model follows prompts of pairs that training never showed.

    make micro-quality ARGS="--precision fp8"    200 prompts, about 4 minutes on two CPU cores

Ends with one JSON line, and with 1 where colours and position are right in less than 95 % of the
images, or the shape in 90 %. fp8, int8 and a named `--attention` are compared with bf16 from the
same noise, too: no share may fall by more than 2 points.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from PIL import Image

from ..hosts.diffusers.load import LoadedPipeline, load_pipeline
from ..hosts.diffusers.patch import optimize
from ..hosts.diffusers.quantized import quantize_transformer
from ..hosts.diffusers.sample import generate
from ..loaders.source import MICRO_SIDE, bundled_micro_folder
from ..measure.fidelity import psnr
from ..micro.judge import adherence
from ..micro.scene import HELD_OUT_PAIRS, Scene, sample_prompts
from ..spec.formats import QUANTIZED

BARS = {"colours_and_position": 0.95, "shape": 0.90}
LARGEST_DROP = 0.02  # of a share, from bf16
HOW: dict[str, Any] = {
    "width": MICRO_SIDE,
    "height": MICRO_SIDE,
    "steps": 20,
    "cfg": 4.0,
    "progress": False,
}
Prompts = Sequence[tuple[str, Scene]]


def judged(
    pipeline: LoadedPipeline, prompts: Prompts
) -> tuple[list[Image.Image], dict[str, float]]:
    """Makes image i from noise seed i; returns the images, and the shares in which checks hold."""
    images, results = [], []
    for seed, (prompt, scene) in enumerate(prompts):
        images += generate(pipeline, prompt, seed=seed, **HOW).images
        results.append(adherence(images[-1], scene))
        if results[-1].score < 1:
            print(f"{seed}: {prompt!r}: {results[-1].as_dict()}", file=sys.stderr)
    checks = {
        "colours_and_position": [it.colours and it.position for it in results],
        "shape": [it.shape for it in results],
        "all": [it.score == 1 for it in results],
        "size": [it.size for it in results],
    }
    return images, {name: round(mean(held), 4) for name, held in checks.items()}


def compare(
    pipeline: LoadedPipeline, prompts: Prompts, precision: str, attention: str | None = None
) -> dict[str, Any]:
    """Makes the images in bf16 with diffusers' attention, changes the transformer in place, and
    makes them again; returns the shares after, those before under `bf16`, and `psnr` in dB: mean
    and least of the pairs that differ, None where all are equal.
    """
    exact, plain = judged(pipeline, prompts)
    if precision in QUANTIZED:
        quantize_transformer(pipeline.transformer, precision)
    if attention is not None:
        optimized = optimize(pipeline.transformer, attention=attention)
        pipeline = replace(pipeline, optimized=optimized)
    print(f"the above in bf16; in {precision}, attention {attention}:", file=sys.stderr)
    images, shares = judged(pipeline, prompts)
    each = (psnr(*map(np.asarray, pair)) for pair in zip(images, exact, strict=True))
    finite = list(filter(math.isfinite, each))
    values = {"mean": round(mean(finite), 2), "least": round(min(finite), 2)} if finite else None
    return {**shares, "bf16": plain, "psnr": values}


def passes(quality: Mapping[str, Any]) -> bool:
    """Checks the bar, and that nothing falls too far below bf16 where that was measured."""
    drops = (share - quality[name] for name, share in quality.get("bf16", {}).items())
    return all(quality[name] >= bar for name, bar in BARS.items()) and all(
        round(drop, 4) <= LARGEST_DROP for drop in drops
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=bundled_micro_folder(), metavar="DIR")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts; noise i has seed i")
    parser.add_argument("--count", type=int, default=200, help="prompts, default 200")
    parser.add_argument("--precision", default="auto", help="auto, bf16, fp32, fp8 or int8")
    parser.add_argument("--attention", help="of the optimized transformer, compared with bf16")
    args = parser.parse_args()
    prompts = sample_prompts(args.count, args.seed, HELD_OUT_PAIRS)
    compared = args.precision in QUANTIZED or args.attention is not None
    precision = "bf16" if compared else args.precision
    pipeline = load_pipeline(args.model, precision=precision)
    if compared:
        quality = compare(pipeline, prompts, args.precision, args.attention)
    else:
        _, quality = judged(pipeline, prompts)
    about = {"precision": pipeline.precision.name, "device": pipeline.device}
    about |= {"precision": args.precision} if args.precision in QUANTIZED else {}
    quality |= {**vars(args), "model": str(args.model), **about, "passed": passes(quality)}
    print(json.dumps(quality))
    return 0 if quality["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
