"""From a prompt to its file in a real ComfyUI server, stock nodes beside ours, part by part.

`bench image --models FOLDER` gives each row a fresh server in each of `TURNS`, one at a time: its
first prompt, prompts of the same text, and a new text. Up to `FEW` steps run without CFG, as with
Lightning LoRAs; more with it, and ours with the step cache `CACHE`. With a card, NVML tells every
5 ms how much of it is in use: peaks are above what was in use before the first server began, so
they count its CUDA context too.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
import urllib.error
from collections import defaultdict
from collections.abc import Iterator
from itertools import count, cycle, islice, product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..errors import UnavailableError
from ..machine.comfyui import find_comfyui
from ..spec.formats import GIB
from .measure import CardReader, Fields, NvmlCard, time_fields
from .rows import BASELINE, BenchSetup, Inputs, Row
from .run import Add
from .server import ComfyUIServer, ComfyUIServerError

ApiGraph = dict[str, dict[str, Any]]
TURNS, FEW, CACHE = 3, 10, "balanced"
SECONDS, POLL_SECONDS = 600, 0.02
LONGEST = 200  # characters of a line of the log
PROBE = "probe"
# What `comfyui.write_models` writes, and what a CPU runs instead.
TRANSFORMER = "qwen_image_random_bf16.safetensors"
TEXT_ENCODER = "qwen_2.5_vl_7b_random_bf16.safetensors"
VAE = "qwen_image_vae_random_bf16.safetensors"
MICRO = "micro (bundled)"
TEXT_WIDTH = 3584
PROMPT = (
    "A lighthouse keeper in a yellow raincoat stands on wet rocks at dusk and holds a brass lamp "
    "while waves break behind him; far out a three-masted ship leans into the wind, gulls circle "
    "above the tower, and the beam of light cuts through low clouds. On the wall a painted sign "
    'reads "NORTH POINT 1871" in white letters. Oil painting, thick strokes, warm lamp light '
    "against cold blue water, fine detail in rope, stone and cloth."
)
# Lines of the server's log about weights that left the card, tiles, or a lack of memory.
TOLD = re.compile(r"unload|offload|loaded partially|tiled|out of memory|\bOOM\b", re.IGNORECASE)
# {part: the graph's nodes that it is}
PARTS = {
    "encode": ("positive", "negative"),
    "sample": ("sample",),
    "decode": ("decode",),
    "save": ("save",),
}


def run_prompts(setup: BenchSetup, add: Add) -> None:
    """Measures stock ComfyUI in bf16 and our rows.

    On a card `setup.models` gets random models of the published sizes, unless they are there. On a
    CPU the bundled model takes their place, which stock ComfyUI cannot load.
    """
    on_card = setup.device.type == "cuda"
    rows = [row for row in setup.rows if on_card or row.name != BASELINE]
    reader = held = None
    if on_card:
        from .comfyui import write_models

        write_models(setup.models)
        torch.cuda.empty_cache()
        held = hold_all_but(setup.free_gib)
        reader = CardReader(NvmlCard())
    baseline = reader.card.used() if reader else 0
    found: dict[tuple[Row, Inputs], dict[str, list[Any]]]
    found = {key: defaultdict(list) for key in product(rows, setup.inputs)}
    failed: dict[Row, str] = {}
    turns = min(TURNS, setup.repeats)
    for turn, row in product(range(turns), rows):
        if row in failed:
            continue
        try:
            repeats = (setup.repeats + turn) // turns
            for inputs, fields in _prompts(setup, row, repeats, reader, baseline):
                for name, value in fields.items():
                    if value is not None:
                        found[row, inputs][name].append(value)
        except (ComfyUIServerError, OSError) as error:
            failed[row] = " ".join(str(error).split())
    del held
    stock: dict[Inputs, float] = {}
    for (row, inputs), values in found.items():
        about: Fields = {"name": row.name, "size": inputs.size, "batch": inputs.batch}
        if row in failed:
            add(about | {"error": failed[row]})
            continue
        if row.name == BASELINE:
            stock[inputs] = median(values["ms"])
        add(about | _merged(values, stock.get(inputs)))


def hold_all_but(free_gib: float | None) -> torch.Tensor | None:
    """Memory that this process holds of a large card; UnavailableError where less is free."""
    if free_gib is None:
        return None
    torch.cuda.init()
    free = torch.cuda.mem_get_info()[0] / GIB
    if free < free_gib:
        raise UnavailableError(
            f"{free_gib:.1f} GiB are to stay free and the card has {free:.1f} GiB free: end what "
            "else runs on it, or ask for less."
        )
    return torch.empty(int((free - free_gib) * GIB), dtype=torch.uint8, device="cuda")


def _merged(values: dict[str, list[Any]], stock_ms: float | None) -> Fields:
    """Medians, and the highest peaks."""
    fields = time_fields(values.pop("ms"))
    fields |= {"x_stock": stock_ms and fields["ms"] / stock_ms}
    fields |= {"log": sorted({line for lines in values.pop("log") for line in lines})}
    for name, each in values.items():
        fields[name] = max(each) if name.endswith("peak_gib") else median(each)
    return fields


def _prompts(
    setup: BenchSetup, row: Row, repeats: int, reader: CardReader | None, baseline: int
) -> Iterator[tuple[Inputs, Fields]]:
    """Yields what prompts in a fresh server took: "first_" of its first, "resized_" of the first of
    another size, "text_" of a new text.
    """
    on_card, seeds = reader is not None, count(1)
    with tempfile.TemporaryDirectory() as folder:
        links = {f"custom_nodes/{PROBE}": Path(__file__).with_name(PROBE)}
        if on_card:
            links["models"] = setup.models.resolve()
        for name, target in links.items():
            Path(folder, name).parent.mkdir(exist_ok=True)
            Path(folder, name).symlink_to(target, target_is_directory=True)
        more = (*(() if on_card else ("--cpu",)), *setup.server_args)
        with ComfyUIServer(find_comfyui(), sys.executable, Path(folder), *more) as server:
            known = server.get_json("/object_info")

            def run(inputs: Inputs, shift: int = 0) -> Fields:
                graph = fill(graph_of(setup, row, inputs, next(seeds), shift), known)
                start = time.monotonic()
                fields = run_graph(server, graph)
                card = reader.between(start, time.monotonic(), baseline) if reader else {}
                return fields | card

            for number, inputs in enumerate(setup.inputs):
                yield inputs, renamed(run(inputs), "first_" if not number else "resized_")
                for _ in range(setup.warm_up):
                    run(inputs)
                for _ in range(repeats):
                    yield inputs, run(inputs)
                new = run(inputs, number + 1)
                yield inputs, renamed(new, "text_") | {"encode_ms": new["encode_ms"]}
                lines = server.log.read_text(errors="replace").splitlines()
                yield inputs, {"log": [line[:LONGEST] for line in lines if TOLD.search(line)]}


def renamed(fields: Fields, prefix: str) -> Fields:
    """What is told of a prompt that is not one of the repeated ones, and its peak."""
    found = {f"{prefix}{name}": fields.get(name) for name in ("ms", "received_gb")}
    return found | {"peak_gib": fields.get("peak_gib")}


def run_graph(server: ComfyUIServer, graph: ApiGraph) -> Fields:
    """Posts a graph and waits for its end; milliseconds of all and each part, and torch's peaks.

    Raises:
        ComfyUIServerError: the graph is refused or fails, the server ends, or it takes too long.
    """
    deadline = time.monotonic() + SECONDS
    try:
        # The server names the node that runs to clients only, and so the probe.
        posted = server.post_json("/prompt", {"prompt": graph, "client_id": "bench"})
    except urllib.error.HTTPError as error:
        raise ComfyUIServerError(
            f"ComfyUI refuses the graph: {error.read().decode()[:2000]}"
        ) from None
    prompt = posted["prompt_id"]
    while True:
        server.check_alive()
        if entry := server.get_json(f"/history/{prompt}").get(prompt):
            break
        if time.monotonic() > deadline:
            raise ComfyUIServerError(f"no answer in {SECONDS} s:\n{server.tail()}")
        time.sleep(POLL_SECONDS)
    told = dict(entry["status"]["messages"])
    if failure := told.get("execution_error"):
        raise ComfyUIServerError(f"{failure['node_type']}: {failure['exception_message']}")
    nodes = {node["node"]: node for node in server.get_json(f"/l40s_{PROBE}")}
    ms = float(told["execution_success"]["timestamp"] - told["execution_start"]["timestamp"])
    fields: Fields = {"ms": ms}
    for part, names in PARTS.items():
        seconds = [nodes[name]["seconds"] for name in names if name in nodes]
        if seconds:
            fields[f"{part}_ms"] = 1e3 * sum(seconds)
    fields["rest_ms"] = ms - sum(value for name, value in fields.items() if name != "ms")
    for part in ("sample", "decode"):
        fields[f"{part}_torch_peak_gib"] = nodes[part]["torch_peak_gib"]
    return fields


def graph_of(setup: BenchSetup, row: Row, inputs: Inputs, seed: int, shift: int = 0) -> ApiGraph:
    """The graph of one prompt, as /prompt takes it; `shift` words later the text begins."""
    nodes: ApiGraph = {}

    def add(name: str, kind: str, **given: object) -> list[Any]:
        nodes[name] = {"class_type": kind, "inputs": given}
        return [name, 0]

    ours, cfg = row.name != BASELINE, setup.steps > FEW
    on_card = setup.device.type == "cuda"
    transformer, encoder, vae = (
        (TRANSFORMER, TEXT_ENCODER, VAE) if on_card else (MICRO, MICRO, MICRO)
    )
    if ours:
        model = add("model", "QwenL40S_LoadModel", model=transformer, precision=row.precision)
        model = add("optimize", "QwenL40S_Optimize", model=model)
        if cfg:
            model = add("cache", "QwenL40S_StepCache", model=model, cache=CACHE)
        clip = add("clip", "QwenL40S_LoadTextEncoder", text_encoder=encoder, precision="bf16")
        vae = add("vae", "QwenL40S_LoadVAE", vae=vae, precision="auto")
    else:
        model = add("model", "UNETLoader", unet_name=transformer, weight_dtype="default")
        clip = add("clip", "CLIPLoader", clip_name=encoder, type="qwen_image")
        vae = add("vae", "VAELoader", vae_name=vae)
    text = " ".join(islice(cycle(PROMPT.split()), shift, shift + inputs.text))
    size = {"width": inputs.width, "height": inputs.height, "batch_size": inputs.batch}
    sampled = add(
        "sample",
        "KSampler",
        model=model,
        positive=add("positive", "CLIPTextEncode", text=text, clip=clip),
        negative=add("negative", "CLIPTextEncode", text=" ", clip=clip),
        latent_image=add("latent", "EmptySD3LatentImage", **size),
        seed=seed,
        steps=setup.steps,
        cfg=4.0 if cfg else 1.0,
        sampler_name="euler",
        scheduler="simple",
        denoise=1.0,
    )
    decoder = "QwenL40S_VAEDecode" if ours else "VAEDecode"
    images = add("decode", decoder, samples=sampled, vae=vae)
    add("save", "QwenL40S_SaveImage" if ours else "SaveImage", images=images)
    return nodes


def fill(graph: ApiGraph, known: dict[str, Any]) -> ApiGraph:
    """Adds the required inputs that a graph leaves out, by what the server says at /object_info."""
    for node in graph.values():
        for name, entry in known[node["class_type"]]["input"].get("required", {}).items():
            kind, options = entry[0], entry[1] if len(entry) > 1 else {}
            if name not in node["inputs"]:
                choices = kind if isinstance(kind, list) else options.get("options", [None])
                node["inputs"][name] = options.get("default", choices[0])
    return graph
