"""From a prompt to its file in a real ComfyUI server, stock nodes beside ours, part by part.

`bench image --models FOLDER` gives each row a fresh server in each of `TURNS`, one at a time: its
first prompt, prompts of the same text, and a new text. Up to `FEW` steps run without CFG, as with
Lightning LoRAs; more with it, and ours with the step cache `CACHE`.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import count, cycle, islice, product
from pathlib import Path

from ..machine.comfyui import find_comfyui
from . import memory
from .inputs import Inputs
from .memory_record import phases_of
from .rows import BASELINE, BenchSetup, Row, RowSink
from .server import ComfyUIServer, ComfyUIServerError
from .timing import quantile

TURNS, FEW, CACHE = 3, 10, "balanced"
SECONDS = 600  # a guard against what hangs


def run_prompts(setup: BenchSetup, models: Path, take: RowSink) -> None:
    """Measures stock ComfyUI in bf16 and our rows.

    Args:
        models: a folder that gets random models of the published sizes, unless they are there. On
            a CPU the bundled model takes their place, which stock ComfyUI cannot load.

    Raises:
        ComfyUIServerError: a server or a prompt failed.
    """
    rows = [row for row in setup.rows if row.variant == "ours"]
    if setup.device.type == "cuda":
        import torch

        from .comfyui import write_models

        write_models(models)
        torch.cuda.empty_cache()
        rows = [row for row in setup.rows if row in rows or row.name == BASELINE]
    found = {key: defaultdict(list) for key in product(rows, setup.inputs)}
    repeats = setup.repeats.repeats
    turns = min(TURNS, repeats)
    for turn, row in product(range(turns), rows):
        for inputs, times in _prompts(setup, row, models, (repeats + turn) // turns):
            for name, ms in times.items():
                found[row, inputs][name].append(ms)
    for (row, inputs), times in found.items():
        ends = {f"ms_p{end}": quantile(times["ms"], end / 100) for end in (10, 90)}
        medians = {name: quantile(values, 0.5) for name, values in times.items()}
        # With an error, here one that is not measured, a row has its share of stock's time.
        take(row.name, inputs, {**medians, **ends, "rel_error": None, "samples_ms": times["ms"]})


def _prompts(
    setup: BenchSetup, row: Row, models: Path, repeats: int
) -> Iterator[tuple[Inputs, dict[str, float]]]:
    """Yields milliseconds of prompts in a fresh server, and of their parts."""
    on_card, seeds = setup.device.type == "cuda", count(1)
    with tempfile.TemporaryDirectory() as folder:
        links = {f"custom_nodes/{memory.PROBE}": Path(__file__).with_name(memory.PROBE)}
        for name, target in (links | ({"models": models.resolve()} if on_card else {})).items():
            Path(folder, name).parent.mkdir(exist_ok=True)
            Path(folder, name).symlink_to(target, target_is_directory=True)
        more = () if on_card else ("--cpu",)
        with ComfyUIServer(find_comfyui(), sys.executable, Path(folder), *more) as server:
            known = server.get_json("/object_info")

            def run(inputs: Inputs, words: int = 0) -> dict[str, float]:
                graph = _graph(setup, row, inputs, next(seeds), words)
                return _run(server, memory.fill(graph, known))

            for number, inputs in enumerate(setup.inputs):
                first = run(inputs)
                if not number:
                    yield inputs, {"first_ms": first["ms"]}
                for _ in range(setup.repeats.warmup):
                    run(inputs)
                for _ in range(repeats):
                    yield inputs, run(inputs)
                yield inputs, {"encode_ms": run(inputs, number + 1)["encode_ms"]}


def _run(server: ComfyUIServer, graph: memory.ApiGraph) -> dict[str, float]:
    server.post_json("/l40s_probe/reset", {})
    ran = memory.run_graph(server, graph, SECONDS)
    if ran.error:
        raise ComfyUIServerError(ran.error)
    nodes = server.get_json("/l40s_probe")["nodes"]
    for node in nodes:
        node["class"] = graph[node["node"]]["class_type"]
        node["seconds"] = node["end"] - node["start"]
    parts = {f"{name}_ms": 1e3 * found["seconds"] for name, found in phases_of(nodes).items()}
    at = {name: data["timestamp"] for name, data in ran.entry["status"]["messages"]}
    ms = float(at["execution_success"] - at["execution_start"])
    return {"ms": ms, **parts, "rest_ms": ms - sum(parts.values())}


def _graph(setup: BenchSetup, row: Row, inputs: Inputs, seed: int, shift: int) -> memory.ApiGraph:
    ours, steps = row.name != BASELINE, setup.steps
    names = (memory.TRANSFORMER, memory.TEXT_ENCODER, memory.VAE)
    settings = memory.GraphSettings(
        *(names if setup.device.type == "cuda" else ()),
        steps=steps,
        cfg=1.0 if steps <= FEW else 4.0,
        modulation="auto",
    )
    words = " ".join(islice(cycle(memory.PROMPTS[0].split()), shift, shift + inputs.text))
    case = memory.MemoryCase("ours" if ours else "stock", row.precision, "images")
    graph = memory.graph_of(case, settings, memory.Image("", inputs.width, seed, words))
    del graph["check"]
    graph["latent"]["inputs"] |= {"height": inputs.height, "batch_size": inputs.batch}
    graph["save"]["class_type"] = "QwenL40S_SaveImage" if ours else "SaveImage"
    if ours and steps > FEW:
        sampled = graph["sample"]["inputs"]
        cached = {"model": sampled["model"], "cache": CACHE}
        graph["cache"] = {"class_type": "QwenL40S_StepCache", "inputs": cached}
        sampled["model"] = ["cache", 0]
    return graph
