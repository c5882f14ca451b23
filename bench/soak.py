"""Paints settings in turn through one ComfyUI server: nothing grows, and no picture changes.

    python -m qwen_l40s.bench.soak [--pictures 600] [--settings 40] [--fresh 8]
    python -m qwen_l40s.bench.soak --full-size FOLDER --minutes 8 --settings 6 --fresh 1

The settings are drawn from a fixed seed, of the bundled micro models in turn, and of 2.1's as GGUF
where the package `gguf` is there to write it. Each round paints every
setting once, in another order, with prompts between that are interrupted at any place. The first
round is the warm-up. Each picture has to be its setting's first, pixel for pixel, and then that of
another server: each of `--fresh` servers paints its share of the settings, in another order.

On a card it needs ComfyUI's Python and nvidia-ml-py; FOLDER gets random weights as of `bench
image`, and the last fifth of the rounds may be no slower than the second.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from ..errors import UnavailableError
from ..families.registry import find_member
from ..loaders.source import bundled_micro_folder, check_complete, open_source
from .command import import_comfyui
from .lora import write_lora
from .measure import used_bytes
from .rows import published
from .server import ComfyUIServer, comfyui_folder, seconds_of

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "workflows" / "api" / "micro_text_to_image.json"
MB = 1e6
SEED, CANCELLED = 48, 0.05
MOST_GROWTH, MOST_SLOWING = 100 * MB, 1.03
CACHE = {"cache": "custom", "budget": 1.0, "head": 0.1, "tail": 0.1, "longest": 2, "gain": 0.5}
TEXTS = "a red ring", "a large green circle at the bottom right of a white background, and a star"
FRESH, LATE = "on a fresh server", "ended before its cancel"
NODE_OF_21 = "TextEncodeQwenImage21"
Graph = dict[str, dict[str, Any]]


class Model(NamedTuple):
    """Files of a model as the loader's choices name them, and a LoRA that fits."""

    transformer: str
    text_encoder: str
    vae: str
    lora: str


class Setting(NamedTuple):
    model: Model
    precision: str
    size: tuple[int, int]
    batch: int
    text: str
    cfg: float
    cached: bool
    lora: str | None
    nag: bool
    attention: str | None
    tiles: int
    seed: int


# Of each setting but model, size and seed: a value that stands twice comes twice as often.
CHOICES = {
    "precision": ("bf16", "int8", "fp8"),
    "batch": (1, 1, 2),
    "text": TEXTS,
    "cfg": (1.0, 4.0),
    "cached": (False, False, True),
    "lora": (None, "merge", "bypass"),
    "nag": (False, False, True),
    "attention": (None, "auto", "math"),
    "tiles": (0, 0, 2),
}
SMALL_SIZES = ((256, 256), (192, 320), (320, 192))
LARGE_SIZES = ((1328, 1328), (1664, 928))


def settings_of(models: Sequence[Model], sizes: Sequence[Any], number: int) -> list[Setting]:
    """Draws settings in which every choice comes as often as it can, always the same."""
    draw = random.Random(SEED)
    choices = {"model": models, "size": sizes, **CHOICES}
    columns = {
        name: draw.sample([values[it % len(values)] for it in range(number)], number)
        for name, values in choices.items()
    }
    return [
        Setting(seed=seed, **{name: column[seed] for name, column in columns.items()})
        for seed in range(number)
    ]


def graph_of(setting: Setting, turn: int = 0) -> Graph:
    """Makes the shared workflow of the micro model one of the setting.

    Args:
        turn: an input that the sampler passes over, and ComfyUI's cache does not: it samples again.
    """
    nodes: Graph = json.loads(TEMPLATE.read_text(encoding="utf-8"))
    sample = nodes["sample"]["inputs"]

    def through(kind: str, **inputs: Any) -> None:
        inputs["model"], sample["model"] = sample["model"], [kind, 0]
        nodes[kind] = {"class_type": f"QwenL40S_{kind}", "inputs": inputs}

    model, (width, height) = setting.model, setting.size
    files = {"model": model.transformer, "text_encoder": model.text_encoder, "vae": model.vae}
    nodes["load"]["inputs"] |= files | {"precision": setting.precision}
    nodes["positive"]["inputs"]["text"] = setting.text
    nodes["empty"]["inputs"] |= {"width": width, "height": height, "batch_size": setting.batch}
    if setting.lora:
        through("LoadLora", lora=model.lora, strength=1.0, lora_mode=setting.lora)
    if setting.attention:
        through("Optimize", attention=setting.attention, fused_blocks=True)
    if setting.nag:
        through("NAG", negative=["negative", 0], scale=5.0, tau=2.5, alpha=0.25)
    if setting.cached:
        custom = {f"cache.{name}": value for name, value in CACHE.items() if name != "cache"}
        through("StepCache", cache="custom", **custom)
    sample |= {"turn": turn, "seed": setting.seed}
    sample |= {"steps": 12 if setting.cached else 4, "cfg": setting.cfg}
    if setting.attention:
        nodes["decode"]["class_type"] = "QwenL40S_VAEDecode"
        nodes["decode"]["inputs"]["tiles"] = setting.tiles
    return nodes


def micro_models(models: Path) -> list[Model]:
    """Writes a LoRA for each bundled model into a folder, and 2.1 as GGUF; names what is there.

    A GGUF file cannot say how the head of the other, which is 32 wide, is split over the axes.
    """
    found = []
    for kind in ("loras", "diffusion_models"):
        (models / kind).mkdir(parents=True)
    for title, name in (("micro", "1.x"), ("micro 2.1", "2.1")):
        folder, lora = bundled_micro_folder(name) / "transformer", f"{title}.safetensors"
        shape = check_complete(open_source(folder, "transformer"))
        write_lora(models / "loras" / lora, shape, 4, torch.device("cpu"))
        found.append(Model(*[f"{title} (bundled)"] * 3, lora))
    if find_spec("gguf"):
        (weights,), file = folder.glob("*.safetensors"), f"{title}.gguf"
        _write_gguf(weights, models / "diffusion_models" / file)
        found += [found[0], found[-1]._replace(transformer=file)]
    return found


def full_size_models(models: Path) -> list[Model]:
    """Writes random weights of Qwen-Image and a LoRA into a folder."""
    from .comfyui import write_models

    import_comfyui(cpu=False)
    files, lora = published(None), "soak.safetensors"
    write_models(models, files)
    shape = find_member(files.member).transformer
    write_lora(models / "loras" / lora, shape, 16, torch.device("cuda"))
    torch.cuda.empty_cache()
    return [Model(files.transformer, files.text_encoder, files.vae, lora)]


def _write_gguf(weights: Path, path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "qwen_image21")
    for name, tensor in load_file(weights).items():
        fits = tensor.ndim == 2 and tensor.shape[1] % 32 == 0
        kind = gguf.GGMLQuantizationType.Q8_0 if fits else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(tensor.float().numpy(), kind), raw_dtype=kind)
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()


class Painted(NamedTuple):
    """What came of a prompt: seconds by the server, and the bytes that were in use after it."""

    setting: Setting
    seconds: float
    memory: int
    card: int


class Soak:
    """Paints settings and compares each picture with the setting's first.

    Attributes:
        rounds: of the server that keeps painting.
        different: how many pictures were, by where they were painted.
    """

    def __init__(self, settings: Sequence[Setting], card: Callable[[], int]) -> None:
        self.settings, self.draw, self.turns = settings, random.Random(SEED), count()
        self.rounds: list[list[Painted]] = []
        self.known: dict[Setting, str] = {}
        self.different: Counter[str] = Counter()
        self.cancelled = 0
        self._card = card

    def paint(self, server: ComfyUIServer, setting: Setting, where: str) -> Painted:
        entry = server.end(server.begin(graph_of(setting, next(self.turns))))
        self._compare(server, setting, entry, where)
        return Painted(setting, seconds_of(entry), resident(server.process.pid), self._card())

    def round(self, server: ComfyUIServer) -> None:
        """Paints every setting once; behind the first round some prompts are interrupted."""
        done: list[Painted] = []
        for setting in self.draw.sample(self.settings, len(self.settings)):
            if self.rounds and self.draw.random() < CANCELLED:
                usual = median(it.seconds for it in self.rounds[-1])
                self._cancel(server, self.draw.choice(self.settings), self.draw.uniform(0, usual))
            done.append(self.paint(server, setting, "in turn"))
        self.rounds.append(done)

    def _cancel(self, server: ComfyUIServer, setting: Setting, after: float) -> None:
        prompt = server.begin(graph_of(setting, next(self.turns)))
        time.sleep(after)
        server.ask("/interrupt", {"prompt_id": prompt})
        entry = server.end(prompt)
        if "execution_interrupted" in dict(entry["status"]["messages"]):
            self.cancelled += 1
        else:
            self._compare(server, setting, entry, LATE)

    def _compare(
        self, server: ComfyUIServer, setting: Setting, entry: dict[str, Any], where: str
    ) -> None:
        digest = hashlib.sha256()
        for image in entry["outputs"]["save"]["images"]:
            path = server.base / image["type"] / image["subfolder"] / image["filename"]
            digest.update(pixels(path).tobytes())
            path.unlink()
        if self.known.setdefault(setting, digest.hexdigest()) != digest.hexdigest():
            self.different[where] += 1
            print(f"different, {where}: {setting}", flush=True)


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def resident(pid: int) -> int:
    """Bytes of host memory that a process has, as Linux tells them; 0 elsewhere."""
    status = Path(f"/proc/{pid}/status")
    found = re.search(r"VmRSS:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else 0


def growth(rounds: Sequence[Sequence[Painted]], name: str) -> int:
    """By how much the most of any later round is above the most of the first, in bytes."""
    most = [max(getattr(it, name) for it in done) for done in rounds]
    return max(most[1:], default=most[0]) - most[0]


def slowing(rounds: Sequence[Sequence[Painted]]) -> float:
    """The median prompt of the last fifth of the rounds, against that of the second fifth."""
    fifth = max(1, len(rounds) // 5)
    parts = rounds[-fifth:], rounds[fifth : 2 * fifth] or rounds
    last, second = (median(it.seconds for done in part for it in done) for part in parts)
    return last / second


def soak(args: argparse.Namespace) -> int:
    """Paints, prints what came of it, and returns 0, or 1 where something grew or changed."""
    began, comfyui = time.monotonic(), comfyui_folder()
    if comfyui is None:
        raise UnavailableError("there is no ComfyUI: name its folder with COMFYUI_PATH.")
    own = [comfyui / ".venv" / "bin" / "python", Path(sys.executable)]
    python = args.python or next(it for it in own if it.exists())
    with tempfile.TemporaryDirectory() as folder:
        base, card = Path(folder), lambda: 0
        # ComfyUI with much memory keeps what earlier prompts gave, which would be growth.
        more = ["--cache-classic"]
        if args.full_size:
            (base / "models").symlink_to(args.full_size.resolve(), target_is_directory=True)
            models, sizes, card = full_size_models(args.full_size), LARGE_SIZES, used_bytes()
        else:
            models, sizes = micro_models(base / "models"), SMALL_SIZES
            more.append("--cpu")
        start = partial(ComfyUIServer, comfyui, python, base, *more)
        with start() as server:
            if NODE_OF_21 not in server.ask("/object_info"):
                models = [it for it in models if "2.1" not in it.lora]
            run = Soak(settings_of(models, sizes, args.settings), card)
            while len(run.rounds) * args.settings < args.pictures:
                if time.monotonic() - began > args.minutes * 60:
                    break
                run.round(server)
                memory = max(it.memory for it in run.rounds[-1]) / MB
                print(f"{len(run.rounds) * args.settings} pictures, {memory:.0f} MB", flush=True)
        order = run.draw.sample(run.settings, args.settings)
        for number in range(args.fresh):
            with start() as server:
                for setting in order[number :: args.fresh]:
                    run.paint(server, setting, FRESH)
    return report(run, args, time.monotonic() - began)


def report(run: Soak, args: argparse.Namespace, seconds: float) -> int:
    first, last = (max(it.memory for it in done) / MB for done in (run.rounds[0], run.rounds[-1]))
    grown, slower = (growth(run.rounds, name) for name in ("memory", "card")), slowing(run.rounds)
    host, card = grown
    alike = len(run.settings) - len(set(run.known.values()))
    rows = {
        "pictures": len(run.rounds) * len(run.settings),
        "settings": len(run.settings),
        "prompts interrupted": run.cancelled,
        "host memory, the most of the first round, MB": round(first),
        "of the last round": round(last),
        "growth of any round": round(host / MB),
        "pictures that differ in turn": run.different["in turn"] + run.different[LATE],
        f"on {args.fresh} fresh servers": run.different[FRESH],
        "settings that paint the same": alike,
        "seconds": round(seconds),
    }
    if args.full_size:
        rows |= {"growth on the card, MB": card / MB, "last fifth against second": f"{slower:.3f}"}
    for name, value in rows.items():
        print(f"{name:45} {value:>10}")
    slow = args.full_size is not None and (card > 0 or slower > MOST_SLOWING)
    return int(host >= MOST_GROWTH or bool(run.different) or alike > 0 or slow)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--pictures", type=int, default=600)
    add("--settings", type=int, default=40)
    add("--fresh", type=int, default=8)
    add("--minutes", type=float, default=float("inf"))
    add("--full-size", type=Path, metavar="FOLDER")
    add("--python", type=Path, default=os.environ.get("COMFYUI_PYTHON"))
    return soak(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
