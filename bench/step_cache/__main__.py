"""Compares rules for skipping steps, at equal numbers of computed steps, on the micro model.

    python -m qwen_l40s.bench.step_cache --output FILE [--limit 540] [--prompts 200] [--seeds 3]
        [--steps 50 20] [--presets faithful balanced fast] [--only RULE ...] [--device cpu]
    python -m qwen_l40s.bench.step_cache --table FILE

Paints held-out prompts with CFG 4 in fp32, by Euler steps on the model's own schedule, without a
cache and with each rule. The error is the relative L2 distance of the final latent from that of the
same seed without a cache. Adherence is the share of images whose shapes, colours and places are
right. Thresholds, ratios and polynomials come from prompts of pairs that training showed. FILE is
rewritten after each rule; --table prints it as Markdown.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import mean, quantiles
from typing import Any, NamedTuple

import numpy as np
import torch

from ...cli.output import write_whole
from ...machine.device import choose_device
from ...micro.scene import Scene
from ...optimizations.step_cache import MOST_MISSED, CacheFigures
from ...step_cache import PRESETS, computed_steps, plan_steps, usual_sigmas
from .calibration import Calibrated, Make, magcache
from .field import TOKENS, Jury, Micro, Prompts, held_out, noise
from .rules import HeldResidual, MeanCache, Ours, TaylorSeer, taylorseer_steps
from .run import CFG, Field, Rule, Sampled, sample


class Batch(NamedTuple):
    """Images that are painted at once."""

    field: Field
    noise: torch.Tensor
    scenes: list[Scene]


def batches(micro: Micro, prompts: int, seeds: int, most: int) -> list[Batch]:
    """Image i of seed s has the noise seed s * prompts + i."""
    wanted = held_out(prompts) * seeds
    return [
        Batch(
            Prompts(micro, [prompt for prompt, _ in wanted[first : first + most]]),
            noise(range(first, min(first + most, len(wanted))), micro.device),
            [scene for _, scene in wanted[first : first + most]],
        )
        for first in range(0, len(wanted), most)
    ]


class Wanted(NamedTuple):
    """How a row is measured.

    Attributes:
        sigmas: Of the run.
        make: The rule.
        set_by: Its threshold or the like, for the results.
    """

    sigmas: list[float]
    make: Make
    set_by: dict[str, float] | None = None


OURS = "ours"
OTHER_COUNT = 0.5  # steps
GAINS = {"ours, gain 0": 0.0, "ours, gain 0.75": 0.75, "ours, gain 1": 1.0}
RULES = (
    *(OURS, *GAINS, "fewer steps", "residual held", "EasyCache", "LazyCache"),
    *("MagCache", "TeaCache", "TaylorSeer 1", "TaylorSeer 2", "TaylorSeer 1, our steps"),
    *("TaylorSeer 2, our steps", "AdaCache", "MeanCache"),
)


def wanted_row(name: str, steps: int, preset: str, calibrated: Calibrated) -> Wanted | None:
    """A rule that computes as many steps as a preset; None where it has no form for that."""
    sigmas, settings = usual_sigmas(steps, TOKENS), PRESETS[preset]
    plan = plan_steps(sigmas, settings)
    if name in (OURS, *GAINS):
        chosen = replace(settings, gain=GAINS.get(name, settings.gain))
        return Wanted(sigmas, partial(Ours, settings=chosen))
    if name == "fewer steps":
        return Wanted(usual_sigmas(plan.computed, TOKENS), Rule)
    ours = {step for step, skips in enumerate(plan.skipped) if skips}
    if name == "residual held":
        return Wanted(sigmas, partial(HeldResidual, skipped=ours))
    if name == "MagCache":
        skipped, set_by = magcache(calibrated.of(sigmas).ratios, plan.computed)
        return Wanted(sigmas, partial(HeldResidual, skipped=skipped), set_by)
    if name.startswith("TaylorSeer"):
        skipped = ours if name.endswith("our steps") else taylorseer_steps(steps, plan.computed)
        order = 1 if name.startswith("TaylorSeer 1") else 2
        return Wanted(sigmas, partial(TaylorSeer, skipped=skipped, order=order))
    if name == "MeanCache":
        fits = steps == MeanCache.STEPS and preset == "balanced"
        return Wanted(sigmas, MeanCache) if fits else None
    make, threshold = calibrated.gated(name, sigmas, plan.computed)
    return Wanted(sigmas, make, {"threshold": threshold})


class Results:
    """The JSON file, rewritten after each row."""

    def __init__(self, path: Path, conditions: dict[str, Any]) -> None:
        self._path, self._conditions = path, conditions
        self.rows: list[dict[str, Any]] = []

    def take(self, row: dict[str, Any]) -> None:
        """Adds a row, and prints it."""
        self.rows.append(row)
        print(", ".join(f"{name} {_short(value)}" for name, value in row.items()), flush=True)
        write_whole(self._path, json.dumps(self._rounded(), indent=1).encode() + b"\n")

    def _rounded(self) -> dict[str, Any]:
        rows = [{name: _short(value) for name, value in row.items()} for row in self.rows]
        return {"conditions": self._conditions, "rows": rows}


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


class Comparison:
    """Paints all images with one rule after another, and compares them with those of no cache."""

    def __init__(self, painted: list[Batch], micro: Micro, jury: Jury) -> None:
        self._batches, self._micro, self._jury = painted, micro, jury
        self._exact: dict[int, list[torch.Tensor]] = {}  # latents of each batch, by steps
        self._right: dict[int, float] = {}

    def uncached(self, steps: int) -> dict[str, Any]:
        """The row of a number of steps that others are compared with."""
        begin = time.perf_counter()
        found = self._sample(usual_sigmas(steps, TOKENS), Rule)
        self._exact[steps] = [batch.x for batch in found]
        self._right[steps] = self._judge(found)
        seconds = time.perf_counter() - begin
        return {"rule": "none", "steps": steps, "right": self._right[steps], "seconds": seconds}

    def row(self, steps: int, wanted: Wanted) -> dict[str, Any]:
        """What a rule does to the images of a number of steps."""
        begin = time.perf_counter()
        found = self._sample(wanted.sigmas, wanted.make)
        errors = [
            ((batch.x - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)).cpu()
            for batch, exact in zip(found, self._exact[steps], strict=True)
        ]
        error = torch.cat(errors)
        worst = error.sort(descending=True).values[: math.ceil(len(error) / 10)]
        right = self._judge(found)
        figures = [
            f for batch in found if isinstance(batch.rule, Ours) for f in batch.rule.figures()
        ]
        return {
            "computed": torch.cat([batch.computed for batch in found]).mean().item(),
            **(wanted.set_by or {}),
            "mean": error.mean().item(),
            "worst_decile": worst.mean().item(),
            "most": worst[0].item(),
            "right": right,
            "change": right - self._right[steps],
            **(_estimates(figures, error.tolist()) if figures else {}),
            "seconds": time.perf_counter() - begin,
        }

    def _sample(self, sigmas: Sequence[float], make: Make) -> list[Sampled]:
        return [sample(batch.field, sigmas, batch.noise, make) for batch in self._batches]

    def _judge(self, found: Sequence[Sampled]) -> float:
        images = [self._micro.decode(batch.x) for batch in found]
        scenes = [scene for batch in self._batches for scene in batch.scenes]
        return self._jury.right(np.concatenate(images), scenes)


def _estimates(figures: Sequence[CacheFigures], errors: Sequence[float]) -> dict[str, Any]:
    """What our cache says of each image's run, beside its true error."""
    missed = [miss for each in figures for miss in each.missed]
    pairs = [(f.distance, e) for f, e in zip(figures, errors, strict=True) if f.distance]
    estimates, errors = zip(*pairs, strict=True)
    ratios = [estimate / error for estimate, error in pairs]
    tenths = quantiles(ratios, n=10)
    return {
        "missed": mean(missed),
        "missed_most": max(missed),
        "missed_too_much": sum(miss > MOST_MISSED for miss in missed) / len(missed),
        "refused": mean(each.refused for each in figures),
        "estimate": mean(estimates),
        "estimate_by_error": {"p10": tenths[0], "median": tenths[4], "p90": tenths[8]},
        "rank_correlation": float(np.corrcoef(_ranks(estimates), _ranks(errors))[0, 1]),
    }


def _ranks(values: Sequence[float]) -> np.ndarray:
    return np.argsort(np.argsort(values))


def compare(args: argparse.Namespace) -> None:
    """Measures all rows that fit into the time."""
    begin = time.perf_counter()
    device = torch.device(choose_device(args.device))
    on_card = device.type == "cuda"
    jury = Jury(max(1, (os.cpu_count() or 1) - 1) if on_card else 0)
    micro = Micro(device)
    most = args.batch or (600 if on_card else 25)
    painted = batches(micro, args.prompts, args.seeds, most)
    calibrated = Calibrated(micro, args.calibration)
    conditions = {
        "card": torch.cuda.get_device_name(device) if on_card else "cpu",
        "torch": torch.__version__,
        "diffusers": version("diffusers"),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "prompts": args.prompts,
        "seeds": args.seeds,
        "cfg": CFG,
        "sampler": "euler, the model's schedule",
        "calibration_prompts": args.calibration,
    }
    results = Results(args.output, conditions)
    comparison = Comparison(painted, micro, jury)
    for steps in args.steps:
        results.take(comparison.uncached(steps))
        for preset in args.presets:
            for name in args.only:
                if time.perf_counter() - begin > args.limit:
                    print(f"stopped: {args.limit:g} s are over")
                    return
                wanted = wanted_row(name, steps, preset, calibrated)
                if wanted is not None:
                    about = {"rule": name, "steps": steps, "preset": preset}
                    about["planned"] = computed_steps(steps, preset)
                    results.take({**about, **comparison.row(steps, wanted)})


def table(results: dict[str, Any]) -> str:
    """The results as Markdown: each rule's error, mean / worst decile, in percent.

    In brackets the computed steps, where they are others than the preset's.
    """
    rows = [row for row in results["rows"] if "preset" in row]
    columns = {(row["steps"], row["preset"]): row["planned"] for row in rows}
    head = ["rule", *(f"{n} of {steps}, `{preset}`" for (steps, preset), n in columns.items())]
    lines = [head, ["---"] * len(head)]
    for name in dict.fromkeys(row["rule"] for row in rows):
        cells = {(row["steps"], row["preset"]): _cell(row) for row in rows if row["rule"] == name}
        lines.append([name, *(cells.get(column, "") for column in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(row: dict[str, Any]) -> str:
    other = abs(row["computed"] - row["planned"]) >= OTHER_COUNT
    computed = f" ({row['computed']:.1f})" if other else ""
    return f"{100 * row['mean']:.2f} / {100 * row['worst_decile']:.2f}{computed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="the results, as JSON")
    parser.add_argument("--table", type=Path, help="print results as Markdown instead")
    parser.add_argument(
        "--limit", type=float, default=540, help="seconds after which no row starts"
    )
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--calibration", type=int, default=24, help="prompts to calibrate with")
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 20])
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--only", nargs="+", choices=RULES, default=RULES, metavar="RULE")
    parser.add_argument("--batch", type=int, help="images at once: 600 on a card, 25 on a CPU")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text(encoding="utf-8"))))
        return
    if args.output is None:
        parser.error("--output FILE is needed")
    with torch.inference_mode():
        compare(args)


if __name__ == "__main__":
    main()
