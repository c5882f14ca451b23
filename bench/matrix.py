"""Measures what the estimator predicts: weights, peaks and times of many settings on one card.

    python -m qwen_l40s.bench.matrix --models FOLDER --json FILE [--kinds vae,text,sampling]
        [--seconds 500] [--precisions bf16,fp8] [--few]

Runs in the Python that runs ComfyUI. FOLDER gets random weights of the published sizes, 58 GB,
unless they are there. Each model is loaded by this package's loader and optimized by its node; then
real sampling runs (euler, simple) of every case, decoding and encoding whole and in tiles, and
prompts. A run whose steps differ by more than a quarter is done again. FILE is rewritten after each
run, in the form of planning/measured.json; a file that is there is continued. Each run says for
which half it is: the estimator is fitted to one and tested on the other.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .command import import_comfyui
from .memory import PROMPTS, TEXT_ENCODER, TEXT_WIDTH, TRANSFORMER
from .memory_record import DriverCard

PRECISIONS = ("bf16", "int8", "fp8")
SIZES = ((1024, 1024), (1664, 928), (1328, 1328), (2048, 2048))
REFERENCES = (0, 1, 3)
BATCHES = (1, 2)
PLACES = ("off card", "on card")
# With the modulation on the card a step is the same; only these are run there.
ON_CARD = ((1024, 1024), 1, 0), ((1328, 1328), 2, 1), ((2048, 2048), 1, 3)
# Two forward passes a step.
GUIDED = ((1328, 1328), 1, 0), ((1024, 1024), 1, 3)
TEXT_TOKENS, VISION_TOKENS = 200, 196
LONG_TEXT = 800
TILES = (1, 4)
# Drawn once; which run is in which half must not follow from its place in the list.
SEED = 7
CARD = torch.device("cuda")
STEPS, STEPS_OF_LARGE = 5, 3
LARGE = 16_000  # tokens of one item
WARM_UP, REPEATS = 2, 5
SPREAD = 1.25
NEGATIVE_TOKENS = 20
CFG = 4.0
REFERENCE_LATENT = 128
NEW_MODEL_SECONDS = 30
# Steps in the first seconds after a load took a seventh longer where the processor is the limit.
WARM_SECONDS = 10
KINDS = ("vae", "text", "sampling")


class MatrixCase(NamedTuple):
    """One sampling run.

    Attributes:
        modulation: "off card" or "on card".
        text: tokens of the prompt, with those of the references.
        guided: whether there are two passes a step, of prompts of different lengths.
    """

    precision: str
    modulation: str
    size: tuple[int, int]
    batch: int
    references: int
    text: int
    guided: bool = False

    @property
    def tokens(self) -> int:
        """Of one item, image and references."""
        width, height = self.size
        return width // 16 * (height // 16) + self.references * 4096

    @property
    def plain(self) -> bool:
        """Whether it is one image of at most one reference, the modulation off the card."""
        return self.modulation == "off card" and self.batch == 1 and self.references < 2

    @property
    def family(self) -> str:
        return "qwen-image-edit-2511" if self.references else "qwen-image"


def models() -> Iterator[tuple[str, str, list[MatrixCase]]]:
    """(precision, place of the modulation, its runs), the fewest tokens first."""
    for precision, place in itertools.product(PRECISIONS, PLACES):
        yield precision, place, sorted(_cases(precision, place), key=lambda case: case.tokens)


def _cases(precision: str, place: str) -> Iterator[MatrixCase]:
    chosen = ON_CARD if place == "on card" else itertools.product(SIZES, BATCHES, REFERENCES)
    for size, batch, references in chosen:
        text = TEXT_TOKENS + references * VISION_TOKENS
        yield MatrixCase(precision, place, size, batch, references, text)
    if place == "off card":
        for size, batch, references in GUIDED:
            text = TEXT_TOKENS + references * VISION_TOKENS
            yield MatrixCase(precision, place, size, batch, references, text, guided=True)
        yield MatrixCase(precision, place, (1328, 1328), 1, 0, LONG_TEXT)


def halves(count: int) -> list[str]:
    """ "fit" or "test" for each of so many runs, as many of one as of the other."""
    names = ["fit", "test"] * (count // 2 + 1)
    names = names[:count]
    random.Random(SEED).shuffle(names)
    return names


class RunFile:
    """The runs so far, in a file."""

    def __init__(self, path: Path, conditions: dict[str, Any]) -> None:
        self._path, self._conditions = path, conditions
        self.runs: list[dict[str, Any]] = []
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if before["conditions"]["card"] != conditions["card"]:
                raise SystemExit(f"{path} was measured on {before['conditions']['card']}")
            self.runs = before["runs"]

    def add(self, **fields: Any) -> None:
        self.runs.append({"id": len(self.runs) + 1, **fields})
        print(json.dumps(self.runs[-1]), flush=True)
        self.save()

    def has(self, case: MatrixCase) -> bool:
        """Whether a sampling run was measured before."""
        asked = settings(case)
        return any(asked.items() <= run.items() for run in self.runs if run["kind"] == "sampling")

    def save(self) -> None:
        kinds: dict[str, list[dict[str, Any]]] = {}
        for run in self.runs:
            kinds.setdefault(run["kind"], []).append(run)
        for runs in kinds.values():
            for run, half in zip(runs, halves(len(runs)), strict=True):
                run["half"] = half
        found = {"conditions": self._conditions, "runs": self.runs}
        self._path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


class UsedBytes:
    """What the driver says is in use, beyond what was before this process used the card."""

    def __init__(self) -> None:
        self.driver = DriverCard()  # asked before CUDA is
        self._before = self.driver.used()

    def __call__(self) -> int:
        return self.driver.used() - self._before


def settings(case: MatrixCase) -> dict[str, Any]:
    """What a case asks for, as the file has it."""
    return {
        "precision": case.precision,
        "modulation": case.modulation,
        "family": case.family,
        "width": case.size[0],
        "height": case.size[1],
        "batch": case.batch,
        "references": case.references,
        "text_tokens": case.text,
        "cfg": "two passes" if case.guided else "off",
    }


def start_run() -> int:
    """Forgets peaks and unused blocks; returns what tensors hold."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peaks(used: UsedBytes) -> dict[str, int]:
    """Since `start_run`: reserved blocks are not given back, so that the driver shows the most."""
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "card_bytes": used(),
    }


def sample(patcher: Any, case: MatrixCase, used: UsedBytes) -> dict[str, Any]:
    """One sampling run: peaks of all of it, and the steps behind the first."""
    import comfy.sample

    from ..hosts.comfyui.sample.modulation import ModelModulation

    width, height = case.size
    latents = torch.randn(case.batch, 16, 1, height // 8, width // 8)
    extra: dict[str, Any] = {}
    if case.references:
        shape = 1, 16, 1, REFERENCE_LATENT, REFERENCE_LATENT
        extra["reference_latents"] = [torch.randn(shape) for _ in range(case.references)]
        extra["reference_latents_method"] = "index_timestep_zero"
    positive = [[torch.randn(1, case.text, TEXT_WIDTH), extra]]
    negative = [[torch.randn(1, NEGATIVE_TOKENS, TEXT_WIDTH), dict(extra)]]
    steps = STEPS_OF_LARGE if case.tokens > LARGE else STEPS
    ModelModulation.of(patcher.model).table.drop()
    weights_bytes = start_run()
    moments = [time.perf_counter()]

    def note(*_: Any) -> None:
        torch.cuda.synchronize()
        moments.append(time.perf_counter())

    comfy.sample.sample(
        patcher,
        latents,
        steps,
        CFG if case.guided else 1.0,
        "euler",
        "simple",
        positive,
        negative,
        torch.zeros_like(latents),
        callback=note,
        disable_pbar=True,
        seed=0,
    )
    samples = [(end - begin) * 1e3 for begin, end in pairwise(moments)]
    tables = ModelModulation.of(patcher.model).passes
    return {
        "weights_bytes": weights_bytes,
        **peaks(used),
        "steps": steps,
        "first_ms": samples[0],
        "step_ms": statistics.median(samples[1:]),
        "samples_ms": samples[1:],
        "tables_seconds": tables.seconds if tables.passes else None,
    }


@torch.inference_mode()  # as execution.py runs every prompt
def measure_sampling(
    folder: Path,
    precisions: list[str],
    few: bool,
    record: RunFile,
    used: UsedBytes,
    left: Callable[[], float],
) -> None:
    """Every case of every model that there is time for; where it is to be few, only the plain."""
    import comfy.model_management

    from ..hosts.comfyui.load.transformer import load_model
    from ..hosts.comfyui.sample.optimize import OptimizeSettings, optimize, report_of

    for precision, place, cases in models():
        cases = [case for case in cases if not record.has(case) and (case.plain or not few)]
        if precision not in precisions or not cases or left() < NEW_MODEL_SECONDS:
            continue
        begin = time.perf_counter()
        patcher, _ = load_model(folder / "diffusion_models" / TRANSFORMER, precision, (), place)
        optimized = optimize(patcher, OptimizeSettings())
        comfy.model_management.load_models_gpu([optimized])
        print(f"{precision} {place}: loaded in {time.perf_counter() - begin:.1f} s", flush=True)
        warm_until = time.perf_counter() + WARM_SECONDS
        while time.perf_counter() < warm_until:
            sample(optimized, cases[0], used)
        for case in cases:
            if left() < 0:
                break
            found = sample(optimized, case, used)
            again = 0
            while max(found["samples_ms"]) > SPREAD * min(found["samples_ms"]) and again < REPEATS:
                found, again = sample(optimized, case, used), again + 1
            record.add(kind="sampling", **settings(case), **found, repeated=again)
        print(report_of(optimized), flush=True)
        comfy.model_management.unload_all_models()
        del patcher, optimized
        start_run()


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds, the median."""
    samples = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(samples)


@torch.inference_mode()
def measure_vae(record: RunFile, used: UsedBytes) -> None:
    """Decoding and encoding, from and to host memory as the nodes do."""
    import comfy.model_management

    from ..hosts.comfyui.decode import decode as planned_vae
    from .comfyui import random_vae

    vae = random_vae(CARD, small=False)
    comfy.model_management.load_models_gpu([vae.patcher])
    for direction in ("decode", "encode"):
        for (width, height), tiles in ((size, tiles) for size in SIZES for tiles in TILES):
            if direction == "decode":
                given = torch.randn(1, 16, 1, height // 8, width // 8)
            else:
                given = torch.rand(1, height, width, 3)
            call = partial(getattr(planned_vae, direction), vae, given, tiles)
            for _ in range(WARM_UP):
                call()
            weights_bytes = start_run()
            call()
            found = peaks(used)
            record.add(
                kind=direction,
                width=width,
                height=height,
                batch=1,
                tiles=tiles,
                weights_bytes=weights_bytes,
                **found,
                ms=timed(call),
            )
    comfy.model_management.unload_all_models()


@torch.inference_mode()
def measure_text(folder: Path, record: RunFile, used: UsedBytes) -> None:
    """Encoding prompts, alone and with reference images as Edit-2509 and 2511 hand them over."""
    import comfy.model_management
    import comfy.sd

    from ..hosts.comfyui.load.text_encoder import load_text_encoder

    for precision in ("bf16", "fp8"):
        clip, _ = load_text_encoder(folder / "text_encoders" / TEXT_ENCODER, precision, "auto")
        comfy.model_management.load_models_gpu([clip.patcher])
        for references in (0, 1, 3):
            images = [torch.rand(1, 384, 384, 3) for _ in range(references)]
            marks = "<|vision_start|><|image_pad|><|vision_end|>" * references
            tokens = clip.tokenize(marks + PROMPTS[0], images=images)
            # Not the loader's own, which remembers.
            call = partial(comfy.sd.CLIP.encode_from_tokens, clip, tokens)
            call()
            weights_bytes = start_run()
            embedding = call()
            found = peaks(used)
            record.add(
                kind="text",
                precision=precision,
                references=references,
                text_tokens=embedding.shape[1],
                weights_bytes=weights_bytes,
                **found,
                ms=timed(call),
            )
        comfy.model_management.unload_all_models()
        del clip, call
        start_run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seconds", type=float, default=500, help="after which no run starts")
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--few", action="store_true", help="sampling of one image, modulation off")
    args = parser.parse_args()
    begin = time.perf_counter()
    used = UsedBytes()
    comfyui = import_comfyui(cpu=False, keep_on_card=False)
    torch.zeros(1, device=CARD)
    torch.manual_seed(0)
    properties = torch.cuda.get_device_properties(0)
    conditions = {
        "card": properties.name,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "driver": used.driver.driver(),
        "torch": torch.__version__,
        "comfyui": comfyui,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "weights": "random, of the published sizes",
        "sampler": "euler, simple; median of the steps behind the first",
        "context_bytes": used() - torch.cuda.memory_reserved(),
    }
    record = RunFile(args.json, conditions)
    kinds = args.kinds.split(",")
    from .comfyui import write_models

    write_models(args.models)
    if "vae" in kinds:
        measure_vae(record, used)
    if "text" in kinds:
        measure_text(args.models, record, used)

    def left() -> float:
        return args.seconds - (time.perf_counter() - begin)

    if "sampling" in kinds:
        precisions = args.precisions.split(",")
        measure_sampling(args.models, precisions, args.few, record, used, left)


if __name__ == "__main__":
    main()
