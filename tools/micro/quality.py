"""Measures how well the bundled micro model follows prompts of pairs that training never showed.

    make micro-quality                      200 prompts, about 4 minutes on two CPU cores
    python -m qwen_l40s.tools.micro.quality --seed 7 --pairs seen

Ends with one JSON line; exits with 1 when the bar is missed: colours and position right in 95 % of
the images, the shape in 90 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from ...hosts.diffusers.load import load_pipeline
from ...hosts.diffusers.sample import generate
from ...loaders.bundled import bundled_micro_folder
from .adherence import Adherence, adherence
from .grammar import sample_prompts
from .painter import IMAGE_SIDE
from .scene import HELD_OUT_PAIRS, SEEN_PAIRS

COLOURS_AND_POSITION_BAR, SHAPE_BAR = 0.95, 0.90
PAIRS = {"held-out": HELD_OUT_PAIRS, "seen": SEEN_PAIRS}


def summarize(results: list[Adherence]) -> dict[str, float]:
    """Shares of images in which each check, and all of them, hold."""

    def share(check: Callable[[Adherence], bool]) -> float:
        return round(sum(map(check, results)) / len(results), 4)

    return {
        "colours_and_position": share(lambda r: r.colours and r.position),
        "shape": share(lambda r: r.shape),
        "all": share(lambda r: r.score == 1),
        "size": share(lambda r: r.size),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=bundled_micro_folder(), metavar="DIR")
    parser.add_argument("--count", type=int, default=200, help="prompts, default 200")
    parser.add_argument("--pairs", choices=tuple(PAIRS), default="held-out")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts; noise i has seed i")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cfg", type=float, default=4.0)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    prompts = sample_prompts(args.count, args.seed, PAIRS[args.pairs])
    pipeline = load_pipeline(args.model, precision=args.precision, device=args.device)
    results = []
    for index, (prompt, scene) in enumerate(prompts):
        made = generate(
            pipeline,
            prompt,
            width=IMAGE_SIDE,
            height=IMAGE_SIDE,
            steps=args.steps,
            cfg=args.cfg,
            seed=index,
            progress=False,
        )
        results.append(adherence(made.images[0], scene))
        if results[-1].score < 1:
            print(f"{index}: {prompt!r}: {results[-1].as_dict()}", file=sys.stderr)
    quality = summarize(results)
    passed = (
        quality["colours_and_position"] >= COLOURS_AND_POSITION_BAR
        and quality["shape"] >= SHAPE_BAR
    )
    run = {"pairs": args.pairs, "count": args.count, "steps": args.steps, "cfg": args.cfg}
    where = {"device": pipeline.device, "precision": pipeline.precision.name}
    print(json.dumps({**quality, **run, **where, "seed": args.seed, "passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
