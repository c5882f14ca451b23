"""Fits the constants of the estimator to one half of the measured runs and tests them on the other.

    python -m qwen_l40s.bench.fit [--file planning/measured.json] [--kernels RESULTS]

The file, from bench/matrix.py, is rewritten with "constants", and with their errors on both halves
under "fit". RESULTS, from `qwen-l40s bench ops --json` on the same card, gives the memory's
bandwidth: a step's bytes and its products both grow with its tokens, so that steps alone do not
tell one rate from the other. Needs scipy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.optimize import least_squares

from ..errors import SettingError
from ..families.protocol import StepTokens
from ..families.registry import find_member
from ..machine.store import known_cards
from ..planning.bytes import step_bytes, table_bytes, weight_bytes
from ..planning.cards import Card, find_card
from ..planning.rates import CONSTANT_NAMES, MEASURED, Constants, Rates, rates_by
from ..planning.request import RunRequest, Setting
from ..planning.times import Pass, pass_times, prompt_seconds
from ..planning.vae_work import vae_seconds
from ..spec.vae import PIXELS_PER_LATENT, PUBLISHED_VAE
from .rows import Inputs

MeasuredRun = Mapping[str, Any]
FIT, TEST = "fit", "test"
TIMED = ("gemm_bf16", "gemm_fp8", "gemm_int8", "attention", "convolution")
START = dict.fromkeys(TIMED, 0.5) | {"convolution": 0.15}
# The negative prompt of bench/matrix.py, for which its guided runs take a second pass.
NEGATIVE_TOKENS = 20
OURS = " ours"
DIGITS = 5


def half(runs: Iterable[MeasuredRun], name: str, *kinds: str) -> list[MeasuredRun]:
    return [run for run in runs if run["half"] == name and run["kind"] in kinds]


def passes_of(run: MeasuredRun) -> list[Pass]:
    family = find_member(run["family"])
    inputs = Inputs(run["width"], run["height"], references=run["references"])
    texts = [run["text_tokens"]]
    if run["cfg"] == "two passes":
        texts.append(NEGATIVE_TOKENS)
    tokens = (StepTokens(text, inputs.stream_tokens, items=run["batch"]) for text in texts)
    return [Pass(family.transformer, each) for each in tokens]


def seconds_of(run: MeasuredRun, rates: Rates) -> float:
    """Predicts what a run takes: a step, an image through the VAE, or a prompt."""
    if run["kind"] == "sampling":
        return sum(pass_times(work, run["precision"], rates).seconds for work in passes_of(run))
    if run["kind"] == "text":
        vision = run.get("references", 0) * find_member("qwen-image-edit-2511").vision_tokens
        return prompt_seconds(
            run["text_tokens"], rates, precision=run["precision"], vision_tokens=vision
        )
    latent = run["height"] // PIXELS_PER_LATENT, run["width"] // PIXELS_PER_LATENT
    return run["batch"] * vae_seconds(run["kind"], PUBLISHED_VAE, latent, run["tiles"], rates)


def measured_seconds(run: MeasuredRun) -> float:
    return run["step_ms" if run["kind"] == "sampling" else "ms"] / 1e3


def request_of(run: MeasuredRun) -> RunRequest:
    """Makes the request of a sampling run, whose `text_tokens` hold those of references."""
    vision = run["references"] * find_member(run["family"]).vision_tokens
    return RunRequest(
        family=run["family"],
        width=run["width"],
        height=run["height"],
        batch=run["batch"],
        references=run["references"],
        text_tokens=run["text_tokens"] - vision,
        cfg=run["cfg"],
        steps=run["steps"],
    )


def counted_bytes(run: MeasuredRun) -> int:
    """Counts the activation memory of a sampling run, without its workspace."""
    request = request_of(run)
    setting = Setting(run["precision"], run["modulation"])
    return step_bytes(request, setting).most + table_bytes(request)


def counted_weights(run: MeasuredRun) -> int:
    """Counts the bytes of the transformer that stay on the card."""
    found = weight_bytes(find_member(run["family"]).transformer, run["precision"])
    return found.total - (found.modulation if run["modulation"] == "off card" else 0)


def kernel_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"task": row["name"].removesuffix(OURS), "size": row["size"], "gb_s": row["gbs"]}
        for row in results["rows"]
        if row["name"].endswith(OURS) and row.get("gbs")
    ]


def fit(found: Mapping[str, Any], card: Card) -> dict[str, float]:
    """Finds the constants from the fit half and "kernels": least squares of relative errors.

    Raises:
        SettingError: a kind of run is not in the fit half.
    """
    runs = found["runs"]
    timed = half(runs, FIT, "sampling", "decode", "encode")
    sampled = half(runs, FIT, "sampling")
    missing = {"bf16", "fp8", "int8"} - {run["precision"] for run in sampled}
    if missing or len(timed) == len(sampled) or not found.get("kernels"):
        lacks = f"steps in {', '.join(sorted(missing))}" if missing else "VAE or kernels"
        raise SettingError(f"the half to fit on has no {lacks}: measure the whole matrix.")
    # Kernels follow one another, so that their times add up.
    mean = statistics.harmonic_mean([row["gb_s"] for row in found["kernels"]])
    bandwidth = mean * 1e9 / card.bandwidth

    def errors(values: Iterable[float]) -> list[float]:
        shares = dict(zip(TIMED, values, strict=True))
        rates = rates_by(Constants(**shares, bandwidth=bandwidth, workspace=0, context=0), card)
        return [seconds_of(run, rates) / measured_seconds(run) - 1 for run in timed]

    solved = least_squares(errors, [START[name] for name in TIMED], bounds=(0.01, 1), xtol=1e-12)
    constants = dict(zip(TIMED, solved.x, strict=True)) | {"bandwidth": bandwidth}
    constants |= {"workspace": _workspace(sampled), "context": _context(sampled)}
    return {name: _rounded(constants[name]) for name in CONSTANT_NAMES}


def _workspace(runs: list[MeasuredRun]) -> float:
    """Finds what leaves the least relative errors of peaks less weights; never negative."""
    pairs = [(run["allocated_bytes"] - run["weights_bytes"], counted_bytes(run)) for run in runs]
    over = sum((allocated - counted) / allocated**2 for allocated, counted in pairs)
    return max(0.0, over / sum(1 / allocated**2 for allocated, _ in pairs))


def _context(runs: list[MeasuredRun]) -> float:
    return statistics.median(run["card_bytes"] - run["reserved_bytes"] for run in runs)


def errors_of(found: Mapping[str, Any], constants: Mapping[str, float], card: Card) -> dict:
    """Returns {half: {"step", "decode", "encode", "text": errors of times, worst and mean;
    "activations": of peaks less weights, with the worst in bytes; "weights": of weights}}.
    """
    rates = rates_by(Constants(**constants), card)

    def times(run: MeasuredRun) -> float:
        return seconds_of(run, rates) / measured_seconds(run) - 1

    def activations(run: MeasuredRun) -> float:
        allocated = run["allocated_bytes"] - run["weights_bytes"]
        return (counted_bytes(run) + constants["workspace"]) / allocated - 1

    def weights(run: MeasuredRun) -> float:
        return counted_weights(run) / run["weights_bytes"] - 1

    result: dict[str, dict[str, float]] = {}
    for name in (FIT, TEST):
        sampled = half(found["runs"], name, "sampling")
        entry = _worst_and_mean("step", times, sampled)
        for kind in ("decode", "encode", "text"):
            entry |= _worst_and_mean(kind, times, half(found["runs"], name, kind))
        entry |= _worst_and_mean("activations", activations, sampled)
        entry |= _worst_and_mean("weights", weights, sampled)
        result[name] = {"steps": len(sampled), **entry}
    return result


def _worst_and_mean(
    name: str, error: Callable[[MeasuredRun], float], runs: list[MeasuredRun]
) -> dict[str, float]:
    sizes = [abs(error(run)) for run in runs]
    if not sizes:
        return {}
    return {
        f"{name}_worst": _rounded(max(sizes)),
        f"{name}_mean": _rounded(statistics.fmean(sizes)),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--file", type=Path, default=MEASURED)
    parser.add_argument("--kernels", type=Path, help="what `bench ops --json` has written")
    args = parser.parse_args(arguments)
    found = json.loads(args.file.read_text(encoding="utf-8"))
    card = find_card(found["conditions"]["card"], known_cards())
    if args.kernels:
        results = json.loads(args.kernels.read_text(encoding="utf-8"))
        found["kernels"] = kernel_rows(results)
    try:
        found["constants"] = fit(found, card)
    except SettingError as error:
        print(error, file=sys.stderr)
        return 2
    found["fit"] = errors_of(found, found["constants"], card)
    order = ("conditions", "constants", "fit", "kernels", "runs")
    whole = {name: found[name] for name in order} | found
    args.file.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: whole[name] for name in ("constants", "fit")}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
