"""Measures what the estimator predicts on one card, and fits its constants to one half of the runs.

    python -m qwen_l40s.bench.fit --models FOLDER --file FILE --kernels RESULTS
    python -m qwen_l40s.bench.fit [--file planning/measured.json] [--kernels RESULTS]

The first runs in the Python that runs ComfyUI, on a card. FOLDER gets random weights of the
published sizes, 58 GB, unless they are there. Each model is loaded by this package's loader and
optimized by its node; then real sampling runs (euler, simple) of every case, decoding and encoding
whole and in tiles, and prompts. A run whose steps differ by more than a quarter is done again. FILE
is rewritten after each run, which says for which half it is: the constants are fitted to one, and
tested on the other.

Both end with "constants" in FILE, and their errors on both halves under "fit". RESULTS, from
`qwen-l40s bench ops --json` on the same card, gives the memory's bandwidth: a step's bytes and its
products both grow with its tokens, so that steps alone do not tell one rate from the other. Needs
scipy.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import sys
import time
import timeit
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import least_squares
from torch.utils.benchmark import timer  # which waits for the card

from ..errors import SettingError
from ..families.parts import QWEN25_VL
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
from .command import conditions, import_comfyui
from .measure import Fields, RowWriter, used_bytes
from .prompt import PROMPT
from .rows import PUBLISHED, Inputs

MeasuredRun = Mapping[str, Any]
FIT, TEST = "fit", "test"
TIMED = ("gemm_bf16", "gemm_fp8", "gemm_int8", "attention", "convolution")
START = dict.fromkeys(TIMED, 0.5) | {"convolution": 0.15}
# The negative prompt, for which guided runs take a second pass.
NEGATIVE_TOKENS = 20
OURS = " ours"
DIGITS = 5
FILES, TEXT_WIDTH = PUBLISHED[0], 3584
PRECISIONS = ("bf16", "int8", "fp8")
OFF_CARD, ON_CARD = PLACES = ("off card", "on card")
SIZES = ((1024, 1024), (1664, 928), (1328, 1328), (2048, 2048))
# (size, batch, references) of the runs with the modulation off the card; a step with it on the card
# is the same, so that few are run there; and few take two forward passes a step.
RUNS = tuple(itertools.product(SIZES, (1, 2), (0, 1, 3)))
RUNS_ON_CARD = ((1024, 1024), 1, 0), ((1328, 1328), 2, 1), ((2048, 2048), 1, 3)
GUIDED = ((1328, 1328), 1, 0), ((1024, 1024), 1, 3)
TEXT_TOKENS, LONG_TEXT, VISION_TOKENS = 200, 800, 196
TILES = (1, 4)
SEED = 7  # which run is in which half must not follow from its place in the list
Add = Callable[[Fields], None]
CARD = torch.device("cuda")
STEPS, STEPS_OF_LARGE = 5, 3
LARGE = 16_000  # tokens of one item
WARM_UP, REPEATS = 2, 5
SPREAD = 1.25
CFG = 4.0
# Steps in the first seconds after a load took a seventh longer where the CPU is the limit.
WARM_SECONDS = 10


# --- what is measured


def cases(precision: str, place: str) -> list[Fields]:
    """Lists the sampling runs of one model, in the form of the file, the fewest tokens first."""
    runs = [(run, "off", TEXT_TOKENS) for run in (RUNS_ON_CARD if place == ON_CARD else RUNS)]
    if place == OFF_CARD:
        runs += [(run, "two passes", TEXT_TOKENS) for run in GUIDED]
        runs.append((((1328, 1328), 1, 0), "off", LONG_TEXT))
    found = [
        {
            "precision": precision,
            "modulation": place,
            "family": "qwen-image-edit-2511" if references else "qwen-image",
            "width": width,
            "height": height,
            "batch": batch,
            "references": references,
            "text_tokens": text + references * VISION_TOKENS,
            "cfg": cfg,
        }
        for ((width, height), batch, references), cfg, text in runs
    ]
    return sorted(found, key=tokens_of)


def tokens_of(case: Fields) -> int:
    """Counts those of one item, image and references."""
    return case["width"] // 16 * (case["height"] // 16) + case["references"] * 4096


def halves() -> Iterator[str]:
    """Draws for which half each run is, as many for one as for the other."""
    draw = random.Random(SEED)
    while True:
        yield from draw.sample((FIT, TEST), 2)


def start_run() -> int:
    """Forgets peaks and unused blocks; returns what tensors hold."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def measured(call: Callable[[], Any], used: Callable[[], int]) -> Fields:
    """Measures the memory of one call; reserved blocks stay, so that the driver shows the most."""
    weights_bytes = start_run()
    call()
    return {
        "weights_bytes": weights_bytes,
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "card_bytes": used(),
    }


def median_ms(call: Callable[[], Any]) -> Fields:
    seconds = timeit.repeat(call, timer=timer, repeat=REPEATS, number=1)
    return {"ms": 1e3 * statistics.median(seconds)}


def sample(patcher: Any, case: Fields, used: Callable[[], int]) -> Fields:
    """Runs one sampling: peaks of all of it, and the steps behind the first."""
    import comfy.sample

    from ..hosts.comfyui.sample.modulation import ModelModulation

    latents = torch.randn(case["batch"], 16, 1, case["height"] // 8, case["width"] // 8)
    extra: Fields = {}
    if references := case["references"]:
        extra["reference_latents"] = [*torch.randn(references, 1, 16, 1, 128, 128)]
        extra["reference_latents_method"] = "index_timestep_zero"
    positive = [[torch.randn(1, case["text_tokens"], TEXT_WIDTH), extra]]
    negative = [[torch.randn(1, NEGATIVE_TOKENS, TEXT_WIDTH), dict(extra)]]
    steps = STEPS_OF_LARGE if tokens_of(case) > LARGE else STEPS
    cfg = 1.0 if case["cfg"] == "off" else CFG
    ModelModulation.of(patcher.model).table.drop()
    moments: list[float] = []

    def note(*_: Any) -> None:
        torch.cuda.synchronize()
        moments.append(time.perf_counter())

    given = patcher, latents, steps, cfg, "euler", "simple", positive, negative
    about = {"callback": note, "disable_pbar": True, "seed": 0}
    run = partial(comfy.sample.sample, *given, torch.zeros_like(latents), **about)
    found = measured(run, used)
    samples = [(end - begin) * 1e3 for begin, end in pairwise(moments)]
    return found | {"steps": steps, "step_ms": statistics.median(samples), "samples_ms": samples}


@torch.inference_mode()  # as execution.py runs every prompt
def measure_sampling(folder: Path, add: Add, used: Callable[[], int]) -> None:
    import comfy.model_management

    from ..hosts.comfyui.load.transformer import load_model
    from ..hosts.comfyui.sample.optimize import OptimizeSettings, optimize, report_of

    for precision, place in itertools.product(PRECISIONS, PLACES):
        wanted = cases(precision, place)
        file = folder / "diffusion_models" / FILES.transformer
        patcher, _ = load_model(file, precision, (), place)
        optimized = optimize(patcher, OptimizeSettings())
        comfy.model_management.load_models_gpu([optimized])
        warm_until = time.perf_counter() + WARM_SECONDS
        while time.perf_counter() < warm_until:
            sample(optimized, wanted[0], used)
        for case in wanted:
            found = sample(optimized, case, used)
            again = 0
            while max(found["samples_ms"]) > SPREAD * min(found["samples_ms"]) and again < REPEATS:
                found, again = sample(optimized, case, used), again + 1
            add({"kind": "sampling", **case, **found, "repeated": again})
        print(report_of(optimized), flush=True)
        comfy.model_management.unload_all_models()
        del patcher, optimized
        start_run()


@torch.inference_mode()
def measure_vae(add: Add, used: Callable[[], int]) -> None:
    import comfy.model_management

    from ..hosts.comfyui.decode import decode as planned_vae
    from .forward import random_vae

    vae = random_vae(CARD)
    comfy.model_management.load_models_gpu([vae.patcher])
    for direction, (width, height), tiles in itertools.product(("decode", "encode"), SIZES, TILES):
        about = {"kind": direction, "width": width, "height": height, "batch": 1, "tiles": tiles}
        given = torch.rand(1, height, width, 3)
        if direction == "decode":
            given = torch.randn(1, 16, 1, height // 8, width // 8)
        call = partial(getattr(planned_vae, direction), vae, given, tiles)
        for _ in range(WARM_UP):
            call()
        add(about | measured(call, used) | median_ms(call))
    comfy.model_management.unload_all_models()


@torch.inference_mode()
def measure_text(folder: Path, add: Add, used: Callable[[], int]) -> None:
    """Encodes prompts, alone and with reference images as Edit-2509 and 2511 hand them over."""
    import comfy.model_management
    import comfy.sd

    from ..hosts.comfyui.load.text_encoder import load_text_encoder

    for precision in ("bf16", "fp8"):
        file = folder / "text_encoders" / FILES.text_encoder
        clip, _ = load_text_encoder(file, precision, "auto")
        comfy.model_management.load_models_gpu([clip.patcher])
        for references in (0, 1, 3):
            images = [torch.rand(1, 384, 384, 3) for _ in range(references)]
            marks = "<|vision_start|><|image_pad|><|vision_end|>" * references
            tokens = clip.tokenize(marks + PROMPT, images=images)
            # Not the loader's own, which remembers.
            call = partial(comfy.sd.CLIP.encode_from_tokens, clip, tokens)
            about = {"kind": "text", "precision": precision, "references": references}
            about["text_tokens"] = call().shape[1]
            add(about | measured(call, used) | median_ms(call))
        comfy.model_management.unload_all_models()
        del clip, call
        start_run()


def measure(folder: Path, file: Path) -> None:
    """Writes a model of the published sizes into a folder, unless it is there, and measures it."""
    driver = used_bytes()
    before = driver()  # asked before CUDA is

    def used() -> int:
        return driver() - before

    comfyui = import_comfyui(cpu=False, keep_on_card=False)
    torch.zeros(1, device=CARD)
    torch.manual_seed(0)
    about = {
        **conditions(torch.device("cuda", 0), comfyui),
        "weights": "random, of the published sizes",
        "sampler": "euler, simple; median of the steps behind the first",
    }
    from .forward import write_models

    write_models(folder, FILES)
    writer = RowWriter(about, file, "runs")
    names: defaultdict[Any, Any] = defaultdict(halves)

    def add(run: Fields) -> None:
        writer.add({"id": len(writer.rows) + 1, **run, "half": next(names[run["kind"]])})

    measure_vae(add, used)
    measure_text(folder, add, used)
    measure_sampling(folder, add, used)


# --- what is fitted


def half(runs: Iterable[MeasuredRun], name: str, *kinds: str) -> list[MeasuredRun]:
    return [run for run in runs if run["half"] == name and run["kind"] in kinds]


def seconds_of(run: MeasuredRun, rates: Rates) -> float:
    """Predicts what a run takes: a step, an image through the VAE, or a prompt."""
    if run["kind"] == "sampling":
        inputs = Inputs(run["width"], run["height"], references=run["references"])
        texts = run["text_tokens"], *([NEGATIVE_TOKENS] if run["cfg"] == "two passes" else ())
        tokens = (StepTokens(text, inputs.stream_tokens, items=run["batch"]) for text in texts)
        works = (Pass(find_member(run["family"]).transformer, each) for each in tokens)
        return sum(pass_times(work, run["precision"], rates).seconds for work in works)
    if run["kind"] == "text":
        vision = run.get("references", 0) * find_member("qwen-image-edit-2511").vision_tokens
        tokens = run["text_tokens"] + QWEN25_VL.template
        return prompt_seconds(tokens, rates, precision=run["precision"], vision_tokens=vision)
    latent = run["height"] // PIXELS_PER_LATENT, run["width"] // PIXELS_PER_LATENT
    return run["batch"] * vae_seconds(run["kind"], PUBLISHED_VAE, latent, run["tiles"], rates)


def measured_seconds(run: MeasuredRun) -> float:
    return run["step_ms" if run["kind"] == "sampling" else "ms"] / 1e3


def counted_bytes(run: MeasuredRun) -> int:
    named = ("family", "width", "height", "batch", "references", "cfg", "steps")
    vision = run["references"] * find_member(run["family"]).vision_tokens
    about = {name: run[name] for name in named}
    request = RunRequest(**about, text_tokens=run["text_tokens"] - vision)
    setting = Setting(run["precision"], run["modulation"])
    return step_bytes(request, setting).most + table_bytes(request)


def counted_weights(run: MeasuredRun) -> int:
    found = weight_bytes(find_member(run["family"]).transformer, run["precision"])
    return found.total - (found.modulation if run["modulation"] == "off card" else 0)


def kernel_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"task": row["name"].removesuffix(OURS), "size": row["size"], "gb_s": row["gbs"]}
        for row in results["rows"]
        if row["name"].endswith(OURS) and row.get("gbs")
    ]


def fit(found: Mapping[str, Any], card: Card) -> dict[str, float]:
    """Finds the constants from the fit half and "kernels": least squares of relative errors."""
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

    kinds = {"step": ("sampling", times), "activations": ("sampling", activations)}
    kinds |= {"weights": ("sampling", weights)}
    kinds |= {kind: (kind, times) for kind in ("decode", "encode", "text")}
    result: dict[str, dict[str, float]] = {}
    for name in (FIT, TEST):
        entry = result[name] = {"steps": len(half(found["runs"], name, "sampling"))}
        for what, (kind, error) in kinds.items():
            if sizes := [abs(error(run)) for run in half(found["runs"], name, kind)]:
                entry[f"{what}_worst"] = _rounded(max(sizes))
                entry[f"{what}_mean"] = _rounded(statistics.fmean(sizes))
    return result


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--file", type=Path, default=MEASURED)
    parser.add_argument("--models", type=Path, help="measure first, with models in this folder")
    parser.add_argument("--kernels", type=Path, help="what `bench ops --json` has written")
    args = parser.parse_args(arguments)
    if args.models:
        measure(args.models, args.file)
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
