"""What the step cache's watch reads of ComfyUI's samplers and schedulers, and what skipping costs.

    python -m qwen_l40s.bench.step_cache.samplers OUT.json

Runs in the Python that runs ComfyUI, on the processor, with the micro model. Rows that OUT holds
are kept. A reading is |x - (x_prev + ds v_prev)| / |ds v_prev|. The cached runs are those of a
cache whose watch reads and never stops.
"""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ...cli.output import write_whole
from ...optimizations.step_cache import MOST_ASTRAY, SAME_SIGMA, CachedRun
from ...step_cache import cache_settings
from ..command import import_comfyui

MICRO = Path(__file__).resolve().parents[2] / "models" / "micro"
PROMPT = "a large green circle at the bottom right on a white background"
LATENT = (1, 16, 1, 32, 32)
CFG, SEED, STEPS, MORE_STEPS = 4.0, 3, 20, 50
PRESET = "balanced"
# On a processor they are the samplers without it.
SAME = "_gpu"
# How many steps of a scheduler other than "simple" are watched; the velocity changes most there.
EARLY = 8
# A sampler that is once so far from the model's direction adds noise.
NOISE = 10
DIGITS = 3

Row = dict[str, Any]
CASE = ("sampler", "scheduler", "steps")


class RefusedError(Exception):
    """The cache goes off for another reason than a reading."""


class EnoughError(Exception):
    """A run has been watched for long enough."""


class Watched(CachedRun):
    """Keeps what the watch reads, and never stops for it."""

    last: Watched
    skips: bool
    watched_steps: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        Watched.last = self
        if self._reason:
            raise RefusedError(self._reason)

    def stop(self, reason: str) -> None:
        """Ends the run, which has nothing more to tell."""
        if not self._ended:
            raise RefusedError(reason)
        super().stop(reason)

    def _astray(self) -> bool:
        if len(self._watched) > self.watched_steps:
            raise EnoughError
        later = self._watched[-1]
        wanted = self._sigmas[later.step]
        if not abs(later.read()[1] - wanted) <= SAME_SIGMA * max(wanted, SAME_SIGMA):
            raise RefusedError("the sampler calls the model at other sigmas than the schedule's")
        return False

    def _skips(self, step: int, x: torch.Tensor) -> bool:
        return self.skips and super()._skips(step, x)

    def readings(self) -> list[float]:
        """Of each step but the first."""
        return [_rounded(max(0.0, later.read()[0])) for later in self._watched[1:]]


class Bench:
    """The micro model with a cache that watches."""

    def __init__(self) -> None:
        from ...hosts.comfyui.load.text_encoder import load_text_encoder
        from ...hosts.comfyui.load.transformer import load_model
        from ...hosts.comfyui.sample import step_cache

        step_cache.CachedRun = Watched
        self._model = load_model(MICRO)[0]
        clip = load_text_encoder(MICRO)[0]
        self._positive = clip.encode_from_tokens_scheduled(clip.tokenize(PROMPT))
        self._negative = clip.encode_from_tokens_scheduled(clip.tokenize(" "))
        self._cached = step_cache.cache_steps(self._model, cache_settings(PRESET))

    @lru_cache(maxsize=4)  # noqa: B019, one bench in a process
    def sample(
        self, sampler: str, scheduler: str, steps: int, skips: bool
    ) -> tuple[torch.Tensor, Watched]:
        """(the final latent, its run)."""
        import comfy.sample

        Watched.skips = skips
        noise = torch.randn(LATENT, generator=torch.Generator().manual_seed(SEED))
        latent = comfy.sample.sample(
            *(self._cached, noise, steps, CFG, sampler, scheduler),
            *(self._positive, self._negative, torch.zeros_like(noise)),
            disable_pbar=True,
            seed=SEED,
        )
        return self._model.model.process_latent_in(latent), Watched.last

    def row(self, sampler: str, scheduler: str, steps: int) -> Row:
        """What the watch reads; of whole runs that add no noise the errors, too."""
        row: Row = dict(zip(CASE, (sampler, scheduler, steps), strict=True))
        whole_run = scheduler == "simple" or sampler == "euler"
        Watched.watched_steps = steps if whole_run else EARLY
        try:
            whole, run = self.sample(sampler, scheduler, steps, False)
        except RefusedError as refused:
            return row | {"refused": str(refused)}
        except EnoughError:
            return row | {"readings": Watched.last.readings()}
        row["readings"] = run.readings()
        if max(row["readings"]) < NOISE:
            latent, run = self.sample(sampler, scheduler, steps, True)
            row["skipped"] = run.figures.skipped
            row["readings_cached"] = run.readings()
            row["error"] = _difference(latent, whole)
            fewer, _ = self.sample(sampler, scheduler, run.figures.computed, False)
            row["error_of_fewer_steps"] = _difference(fewer, whole)
        return row


def _short(reading: float) -> str:
    return f"{reading:.0f}" if reading >= 10 else f"{reading:.2g}"


def _difference(found: torch.Tensor, known: torch.Tensor) -> float:
    return _rounded(float((found - known).norm() / known.norm()))


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def main(path: Path) -> None:
    """Writes the rows that the file lacks, each as soon as it is measured."""
    version = import_comfyui(cpu=True)
    from comfy.samplers import SAMPLER_NAMES, SCHEDULER_NAMES

    about = {
        "model": "micro, fp32, on a processor",
        "comfyui": version,
        "size": f"{LATENT[-1] * 8}x{LATENT[-2] * 8}",
        "cfg": CFG,
        "preset": PRESET,
    }
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    known = {tuple(row[name] for name in CASE) for row in rows}
    cases = [(name, STEPS) for name in SCHEDULER_NAMES] + [("simple", MORE_STEPS)]
    bench = Bench()
    for scheduler, steps in cases:
        names = (
            SAMPLER_NAMES
            if steps == STEPS
            else [name for name in SAMPLER_NAMES if works(name, rows)]
        )
        for sampler in names:
            if SAME not in sampler and (sampler, scheduler, steps) not in known:
                with torch.inference_mode():
                    rows.append(bench.row(sampler, scheduler, steps))
                write_whole(path, _text(about, rows))


def works(sampler: str, rows: list[Row]) -> bool:
    """Whether the watch lets the cache work, by the row of 20 steps of "simple"."""
    cases = {tuple(row[name] for name in CASE): row for row in rows}
    readings = cases.get((sampler, "simple", STEPS), {}).get("readings")
    return readings is not None and max(readings) <= MOST_ASTRAY


def table(rows: list[Row]) -> list[str]:
    """The rows of docs/step_cache.md: what is read of each sampler, and its errors."""
    lines = []
    for sampler in dict.fromkeys(row["sampler"] for row in rows if "readings" in row):
        found = [row for row in rows if row["sampler"] == sampler and "readings" in row]
        largest = {row["scheduler"]: max(row["readings"]) for row in found if row["steps"] == STEPS}
        simple = largest.pop("simple")
        spread = f"{_short(min(largest.values()))} to {_short(max(largest.values()))}"
        does = "works" if works(sampler, rows) else "steps aside"
        cells = [f"`{sampler}`", does, _short(simple), spread]
        for steps in (STEPS, MORE_STEPS):
            errors = [
                f"{row['error']:.2g} / {row['error_of_fewer_steps']:.2g}"
                for row in found
                if (row["scheduler"], row["steps"]) == ("simple", steps) and "error" in row
            ]
            cells += errors or [""]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _text(about: Row, rows: list[Row]) -> bytes:
    """JSON with a line for each row."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    return f'{json.dumps(about)[:-1]}, "rows": [\n{lines}\n]}}\n'.encode()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
