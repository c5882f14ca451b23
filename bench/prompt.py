"""Times a prompt, from its start to its file, in a real ComfyUI server: stock nodes and ours.

Each row gets a fresh server in each of `TURNS`. Up to `FEW` steps run without CFG, as with
Lightning LoRAs; more with it, and ours with the step cache `CACHE`. Peaks are the driver's.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count, cycle, islice, product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..errors import UnavailableError
from ..hosts.png import encode
from ..spec.formats import GIB
from ..spec.transformer import REFERENCE_SIDE
from .measure import Fields, PeakReader, used_bytes
from .rows import BenchSetup, Inputs, Row
from .server import ComfyUIServer, ComfyUIServerError, comfyui_folder, seconds_of

ApiGraph = dict[str, dict[str, Any]]
TURNS, FEW, CACHE = 3, 10, "balanced"
MICRO = "micro (bundled)"  # what a CPU runs
PROMPT = (
    "A lighthouse keeper in a yellow raincoat stands on wet rocks at dusk and holds a brass lamp "
    "while waves break behind him; far out a three-masted ship leans into the wind, gulls circle "
    "above the tower, and the beam of light cuts through low clouds. On the wall a painted sign "
    'reads "NORTH POINT 1871" in white letters. Oil painting, thick strokes, warm lamp light '
    "against cold blue water, fine detail in rope, stone and cloth."
)


def run_prompts(setup: BenchSetup, add: Callable[[Fields], None]) -> None:
    """Measures stock ComfyUI in bf16 and our rows.

    On a card `setup.models` gets random models of the published sizes, unless they are there. On a
    CPU the bundled model takes their place, in bf16: stock ComfyUI cannot load it.
    """
    on_card = setup.device.type == "cuda"
    rows = [row for row in setup.rows if on_card or (row.ours and not row.from_int8)]
    reader = held = None
    if on_card:
        from .forward import write_models

        write_models(setup.models, setup.files, any(it.from_int8 for it in rows))
        torch.cuda.empty_cache()
        held = hold_all_but(setup.free_gib)
        reader = PeakReader(used_bytes())
    found: dict[tuple[Row, Inputs], dict[str, list[float]]]
    found = {key: defaultdict(list) for key in product(rows, setup.inputs)}
    failed: dict[Row, str] = {}
    turns = min(TURNS, setup.repeats)
    for turn, row in product(range(turns), rows):
        if row in failed:
            continue
        try:
            repeats = (setup.repeats + turn) // turns
            for inputs, name, ms in _prompts(setup, row, repeats):
                found[row, inputs][name].append(ms)
                if reader:
                    found[row, inputs]["peak_gib"].append(reader.peak_gib())
        except (ComfyUIServerError, OSError) as error:
            failed[row] = " ".join(str(error).split())
    del held
    for (row, inputs), values in found.items():
        fields: Fields = {"error": failed[row]} if row in failed else {"samples_ms": values["ms"]}
        for name, each in values.items() if row not in failed else ():
            fields[name] = max(each) if name == "peak_gib" else median(each)
        add({"name": row.name, "size": inputs.size, "batch": inputs.batch} | fields)


def hold_all_but(free_gib: float | None) -> torch.Tensor | None:
    """Takes memory of a large card; raises UnavailableError where less is free."""
    if free_gib is None:
        return None
    torch.cuda.init()
    free = torch.cuda.mem_get_info()[0] / GIB
    if free < free_gib:
        raise UnavailableError(
            f"{free_gib:.1f} GiB must stay free, but the GPU has {free:.1f} GiB free: end other "
            "programs on it, or use a lower --free-gib."
        )
    return torch.empty(int((free - free_gib) * GIB), dtype=torch.uint8, device="cuda")


def _prompts(setup: BenchSetup, row: Row, repeats: int) -> Iterator[tuple[Inputs, str, float]]:
    """Yields what prompts of a fresh server took: first ones, one of a new text, and others."""
    on_card, seeds = setup.device.type == "cuda", count(1)
    with tempfile.TemporaryDirectory() as folder:
        if on_card:
            Path(folder, "models").symlink_to(setup.models.resolve(), target_is_directory=True)
        more = () if on_card else ("--cpu",)
        with ComfyUIServer(comfyui_folder(), sys.executable, Path(folder), *more) as server:
            _write_references(server.base / "input", setup.inputs[0].references)

            def run(inputs: Inputs, shift: int = 0) -> float:
                graph = graph_of(setup, row, inputs, next(seeds), shift)
                return 1e3 * seconds_of(server.end(server.begin(graph)))

            for number, inputs in enumerate(setup.inputs):
                yield inputs, "resized_ms" if number else "first_ms", run(inputs)
                run(inputs)
                for _ in range(repeats):
                    yield inputs, "ms", run(inputs)
                yield inputs, "text_ms", run(inputs, number + 1)


def graph_of(setup: BenchSetup, row: Row, inputs: Inputs, seed: int, shift: int = 0) -> ApiGraph:
    """Makes the graph of one prompt; `shift` words later the text begins."""
    nodes: ApiGraph = {}

    def add(name: str, kind: str, **given: object) -> list[Any]:
        nodes[name] = {"class_type": kind, "inputs": given}
        return [name, 0]

    ours, files = row.ours, setup.files
    if setup.device.type == "cpu":
        files = replace(files, transformer=MICRO, text_encoder=MICRO, vae=MICRO)
    cfg = files.cfg if setup.steps > FEW else 1.0
    transformer = files.int8 if row.from_int8 else files.transformer
    if ours:
        model = add("model", "QwenL40S_LoadModel", model=transformer, precision=row.precision)
        how = {"attention": "auto", "fused_blocks": True}
        model = add("optimize", "QwenL40S_Optimize", model=model, **how)
        if cfg > 1 and not inputs.references:
            model = add("cache", "QwenL40S_StepCache", model=model, cache=CACHE)
        encoder = {"text_encoder": files.text_encoder, "precision": "bf16"}
        clip = add("clip", "QwenL40S_LoadTextEncoder", **encoder)
        vae = add("vae", "QwenL40S_LoadVAE", vae=files.vae, precision="auto")
    else:
        model = add("model", "UNETLoader", unet_name=transformer, weight_dtype="default")
        clip = add("clip", "CLIPLoader", clip_name=files.text_encoder, type="qwen_image")
        vae = add("vae", "VAELoader", vae_name=files.vae)
    text = " ".join(islice(cycle(PROMPT.split()), shift, shift + inputs.text))
    images = [
        add(f"reference_{number}", "LoadImage", image=f"reference_{number}.png")
        for number in range(1, inputs.references + 1)
    ]
    if images:
        shown: dict[str, Any] = {
            files.image.format(number): image for number, image in enumerate(images, 1)
        }
        encoded: Callable[..., list[Any]] = partial(
            add, kind=files.encodes, clip=clip, vae=vae, **shown
        )
        positive = encoded("positive", prompt=text, **files.both)
        negative = ["positive", 1] if files.both else encoded("negative", prompt=" ")
    else:
        positive = add("positive", "CLIPTextEncode", text=text, clip=clip)
        negative = add("negative", "CLIPTextEncode", text=" ", clip=clip)
    size = {"width": inputs.width, "height": inputs.height, "batch_size": inputs.batch}
    how = {"sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    given = {"model": model, "positive": positive, "negative": negative, "seed": seed, "cfg": cfg}
    given["latent_image"] = add("latent", "EmptySD3LatentImage", **size)
    sampled = add("sample", "KSampler", **given, steps=setup.steps, **how)
    decoder = "QwenL40S_VAEDecode" if ours else "VAEDecode"
    images = add("decode", decoder, samples=sampled, vae=vae)
    saver = "QwenL40S_SaveImage" if ours else "SaveImage"
    add("save", saver, images=images, filename_prefix="bench")
    return nodes


def _write_references(folder: Path, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, count + 1):
        few = torch.rand(1, 3, 32, 32)
        side = (REFERENCE_SIDE, REFERENCE_SIDE)
        picture = torch.nn.functional.interpolate(few, side, mode="bilinear")[0].movedim(0, -1)
        (folder / f"reference_{number}.png").write_bytes(b"".join(encode(picture.numpy())))
