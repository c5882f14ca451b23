"""Measures how well the bundled micro model follows prompts of pairs that training never showed.

    make micro-quality                      200 prompts, about 4 minutes on two CPU cores
    python -m qwen_l40s.tools.micro.quality --precision fp8
    python -m qwen_l40s.tools.micro.quality --attention int8

Ends with one JSON line; exits with 1 when the bar is missed: colours and position right in 95 % of
the images, the shape in 90 %. fp8, int8 and an attention that is named are compared with bf16 from
the same noise, too: no share may fall by more than 2 points, and the line has the PSNR. Their
activations are rounded as tensor cores need it, on a CPU too: hosts/diffusers/quantized.py says
why.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
from PIL import Image

from ...hosts.diffusers.load import LoadedPipeline, load_pipeline
from ...hosts.diffusers.patch import optimize
from ...hosts.diffusers.quantized import quantize_transformer
from ...hosts.diffusers.sample import generate
from ...loaders.source import MICRO_SIDE, bundled_micro_folder
from ...measure.fidelity import psnr
from ...micro.judge import adherence
from ...micro.scene import HELD_OUT_PAIRS, Scene, sample_prompts
from ...spec.formats import QUANTIZED

COLOURS_AND_POSITION_BAR, SHAPE_BAR = 0.95, 0.90
LARGEST_DROP = 0.02  # of a share, from bf16 to fp8 or int8
STEPS, CFG = 20, 4.0
Prompts = Sequence[tuple[str, Scene]]


def paint(pipeline: LoadedPipeline, prompts: Prompts) -> list[Image.Image]:
    """Paints an image of each prompt; image i comes from noise seed i."""
    return [
        generate(
            pipeline,
            prompt,
            width=MICRO_SIDE,
            height=MICRO_SIDE,
            steps=STEPS,
            cfg=CFG,
            seed=index,
            progress=False,
        ).images[0]
        for index, (prompt, _) in enumerate(prompts)
    ]


def judge(images: Sequence[Image.Image], prompts: Prompts) -> dict[str, float]:
    """Returns the shares of images in which each check, and all of them, hold.

    Lists images that are not fully right on stderr.
    """
    results = []
    for index, (image, (prompt, scene)) in enumerate(zip(images, prompts, strict=True)):
        results.append(adherence(image, scene))
        if results[-1].score < 1:
            print(f"{index}: {prompt!r}: {results[-1].as_dict()}", file=sys.stderr)
    checks = {
        "colours_and_position": [it.colours and it.position for it in results],
        "shape": [it.shape for it in results],
        "all": [it.score == 1 for it in results],
        "size": [it.size for it in results],
    }
    return {name: round(sum(held) / len(held), 4) for name, held in checks.items()}


def psnr_summary(
    images: Sequence[Image.Image], exact: Sequence[Image.Image]
) -> dict[str, float | None]:
    """Returns mean and least PSNR in dB of the pairs that differ; None where all are equal."""
    pairs = zip(images, exact, strict=True)
    values = [psnr(np.asarray(found), np.asarray(plain)) for found, plain in pairs]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return {"mean": None, "least": None}
    return {"mean": round(mean(finite), 2), "least": round(min(finite), 2)}


def compare(
    pipeline: LoadedPipeline, prompts: Prompts, precision: str, attention: str | None = None
) -> dict[str, object]:
    """Paints in bf16 with diffusers' own attention, changes the transformer in place, and paints
    the same again.

    Args:
        precision: Into which the transformer is quantized; bf16 leaves it as it is.
        attention: Of the optimized transformer; None leaves diffusers' own code.

    Returns:
        The shares after the change, those in bf16 under `bf16`, and `psnr`.
    """
    exact = paint(pipeline, prompts)
    print("bf16:", file=sys.stderr)
    plain = judge(exact, prompts)
    if precision in QUANTIZED:
        quantize_transformer(pipeline.transformer, precision)
    if attention is not None:
        optimized = optimize(pipeline.transformer, attention=attention)
        pipeline = replace(pipeline, optimized=optimized)
    images = paint(pipeline, prompts)
    print(f"{precision}, attention {attention or 'of diffusers'}:", file=sys.stderr)
    return {**judge(images, prompts), "bf16": plain, "psnr": psnr_summary(images, exact)}


def passes(quality: dict) -> bool:
    """Checks the bar, and that nothing falls too far below bf16 where that was measured."""
    plain = quality.get("bf16", {})
    return (
        quality["colours_and_position"] >= COLOURS_AND_POSITION_BAR
        and quality["shape"] >= SHAPE_BAR
        and all(round(share - quality[name], 4) <= LARGEST_DROP for name, share in plain.items())
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=bundled_micro_folder(), metavar="DIR")
    parser.add_argument("--count", type=int, default=200, help="prompts, default 200")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts; noise i has seed i")
    parser.add_argument("--precision", default="auto", help="auto, bf16, fp32, fp8 or int8")
    parser.add_argument("--attention", help="of the optimized transformer, compared with bf16")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    prompts = sample_prompts(args.count, args.seed, HELD_OUT_PAIRS)
    lossy = args.precision in QUANTIZED
    compared = lossy or args.attention is not None
    precision = "bf16" if compared else args.precision
    pipeline = load_pipeline(args.model, precision=precision, device=args.device)
    if compared:
        quality = compare(pipeline, prompts, args.precision, args.attention)
    else:
        quality = judge(paint(pipeline, prompts), prompts)
    passed = passes(quality)
    about = {
        "count": args.count,
        "seed": args.seed,
        "device": pipeline.device,
        "precision": args.precision if lossy else pipeline.precision.name,
        "attention": args.attention,
    }
    print(json.dumps({**quality, **about, "passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
