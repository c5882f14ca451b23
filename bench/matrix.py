"""Measures what the estimator predicts: weights, peaks and times of many settings on one card.

    python -m qwen_l40s.bench.matrix --models FOLDER --json FILE

Runs in the Python that runs ComfyUI. FOLDER gets random weights of the published sizes, 58 GB,
unless they are there. Each model is loaded by this package's loader and optimized by its node; then
real sampling runs (euler, simple) of every case, decoding and encoding whole and in tiles, and
prompts. A run whose steps differ by more than a quarter is done again. FILE is rewritten after each
run, in the form of planning/measured.json. Each run says for which half it is: the estimator is
fitted to one and tested on the other.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
import time
import timeit
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from .command import conditions, import_comfyui
from .measure import Fields, RowWriter, used_bytes
from .prompt import PROMPT
from .rows import PUBLISHED

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
FIT, TEST = "fit", "test"
SEED = 7  # which run is in which half must not follow from its place in the list
Add = Callable[[Fields], None]
CARD = torch.device("cuda")
STEPS, STEPS_OF_LARGE = 5, 3
LARGE = 16_000  # tokens of one item
WARM_UP, REPEATS = 2, 5
SPREAD = 1.25
NEGATIVE_TOKENS = 20
CFG = 4.0
# Steps in the first seconds after a load took a seventh longer where the processor is the limit.
WARM_SECONDS = 10


def cases(precision: str, place: str) -> list[Fields]:
    """Lists the sampling runs of one model, in the form of the file, the fewest tokens first."""

    def case(
        size: tuple[int, int], batch: int, references: int, *, guided: bool = False, text: int = 0
    ) -> Fields:
        return {
            "precision": precision,
            "modulation": place,
            "family": "qwen-image-edit-2511" if references else "qwen-image",
            "width": size[0],
            "height": size[1],
            "batch": batch,
            "references": references,
            "text_tokens": text or TEXT_TOKENS + references * VISION_TOKENS,
            "cfg": "two passes" if guided else "off",
        }

    if place == ON_CARD:
        found = [case(*run) for run in RUNS_ON_CARD]
    else:
        found = [case(*run) for run in RUNS]
        found += [case(*run, guided=True) for run in GUIDED]
        found.append(case((1328, 1328), 1, 0, text=LONG_TEXT))
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


def peaks(used: Callable[[], int]) -> Fields:
    """Reads those since `start_run`; reserved blocks stay, so that the driver shows the most."""
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "card_bytes": used(),
    }


def sample(patcher: Any, case: Fields, used: Callable[[], int]) -> Fields:
    """Runs one sampling: peaks of all of it, and the steps behind the first."""
    import comfy.sample

    from ..hosts.comfyui.sample.modulation import ModelModulation

    latents = torch.randn(case["batch"], 16, 1, case["height"] // 8, case["width"] // 8)
    extra: Fields = {}
    if case["references"]:
        extra["reference_latents"] = [
            torch.randn(1, 16, 1, 128, 128) for _ in range(case["references"])
        ]
        extra["reference_latents_method"] = "index_timestep_zero"
    positive = [[torch.randn(1, case["text_tokens"], TEXT_WIDTH), extra]]
    negative = [[torch.randn(1, NEGATIVE_TOKENS, TEXT_WIDTH), dict(extra)]]
    steps = STEPS_OF_LARGE if tokens_of(case) > LARGE else STEPS
    cfg = 1.0 if case["cfg"] == "off" else CFG
    ModelModulation.of(patcher.model).table.drop()
    weights_bytes = start_run()
    moments = [time.perf_counter()]

    def note(*_: Any) -> None:
        torch.cuda.synchronize()
        moments.append(time.perf_counter())

    comfy.sample.sample(
        *(patcher, latents, steps, cfg, "euler", "simple", positive, negative),
        torch.zeros_like(latents),
        callback=note,
        disable_pbar=True,
        seed=0,
    )
    samples = [(end - begin) * 1e3 for begin, end in pairwise(moments)]
    return {
        "weights_bytes": weights_bytes,
        **peaks(used),
        "steps": steps,
        "step_ms": statistics.median(samples[1:]),
        "samples_ms": samples[1:],
    }


@torch.inference_mode()  # as execution.py runs every prompt
def measure_sampling(folder: Path, add: Add, used: Callable[[], int]) -> None:
    """Measures every case of every model."""
    import comfy.model_management

    from ..hosts.comfyui.load.transformer import load_model
    from ..hosts.comfyui.sample.optimize import OptimizeSettings, optimize, report_of

    for precision, place in itertools.product(PRECISIONS, PLACES):
        wanted = cases(precision, place)
        patcher, _ = load_model(
            folder / "diffusion_models" / FILES.transformer, precision, (), place
        )
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


def measured(call: Callable[[], Any], used: Callable[[], int]) -> Fields:
    """Measures the peaks of one call, and the median of more, as a node waits for it."""
    from torch.utils.benchmark import timer  # which waits for the card

    weights_bytes = start_run()
    call()
    found = {"weights_bytes": weights_bytes, **peaks(used)}
    seconds = timeit.repeat(call, timer=timer, repeat=REPEATS, number=1)
    return found | {"ms": 1e3 * statistics.median(seconds)}


@torch.inference_mode()
def measure_vae(add: Add, used: Callable[[], int]) -> None:
    """Decodes and encodes, from and to host memory as the nodes do."""
    import comfy.model_management

    from ..hosts.comfyui.decode import decode as planned_vae
    from .comfyui import random_vae

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
        add(about | measured(call, used))
    comfy.model_management.unload_all_models()


@torch.inference_mode()
def measure_text(folder: Path, add: Add, used: Callable[[], int]) -> None:
    """Encodes prompts, alone and with reference images as Edit-2509 and 2511 hand them over."""
    import comfy.model_management
    import comfy.sd

    from ..hosts.comfyui.load.text_encoder import load_text_encoder

    for precision in ("bf16", "fp8"):
        clip, _ = load_text_encoder(
            folder / "text_encoders" / FILES.text_encoder, precision, "auto"
        )
        comfy.model_management.load_models_gpu([clip.patcher])
        for references in (0, 1, 3):
            images = [torch.rand(1, 384, 384, 3) for _ in range(references)]
            marks = "<|vision_start|><|image_pad|><|vision_end|>" * references
            tokens = clip.tokenize(marks + PROMPT, images=images)
            # Not the loader's own, which remembers.
            call = partial(comfy.sd.CLIP.encode_from_tokens, clip, tokens)
            about = {"kind": "text", "precision": precision, "references": references}
            about["text_tokens"] = call().shape[1]
            add(about | measured(call, used))
        comfy.model_management.unload_all_models()
        del clip, call
        start_run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
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
    from .comfyui import write_models

    write_models(args.models, FILES)
    writer, names = RowWriter(about, args.json, "runs"), defaultdict(halves)

    def add(run: Fields) -> None:
        writer.add({"id": len(writer.rows) + 1, **run, "half": next(names[run["kind"]])})

    measure_vae(add, used)
    measure_text(args.models, add, used)
    measure_sampling(args.models, add, used)


if __name__ == "__main__":
    main()
