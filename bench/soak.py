"""Generates settings in turn through one ComfyUI server: nothing grows, and no image changes.

    python -m qwen_l40s.bench.soak [--pictures 600] [--settings 40] [--fresh 8]
    python -m qwen_l40s.bench.soak --full-size FOLDER --minutes 8 --settings 6 --fresh 1

The settings are drawn from a fixed seed, of the bundled micro models in turn. Each round generates
every setting once, in another order, with prompts between that are interrupted at any place. The
first round is the warm-up. Each image has to be its setting's first, pixel for pixel, and then
that of another server: each of `--fresh` servers generates its share of the settings, in another
order.

On a card it needs ComfyUI's Python and nvidia-ml-py. FOLDER gets random weights as of `bench
image`, which run in int8; the card's memory may not grow after two rounds, and the last fifth of
the rounds may not be slower than the second.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image

from ..errors import UnavailableError
from ..families.registry import find_member
from ..loaders.source import bundled_micro_folder, check_complete, open_source
from .command import import_comfyui
from .forward import write_models
from .lora import write_lora
from .measure import used_bytes
from .rows import published
from .server import ComfyUIServer, comfyui_folder, seconds_of

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "workflows" / "api" / "micro_text_to_image.json"
NODE_OF_21 = "TextEncodeQwenImage21"
MB = 1e6
SEED, CANCELLED = 48, 0.05
MOST_GROWTH, MOST_SLOWING = 100 * MB, 1.03
CACHE = {"budget": 1.0, "head": 0.1, "tail": 0.1, "longest": 2, "gain": 0.5}
IN_TURN, FRESH = "in turn", "on a fresh server"
# A value that stands twice comes twice as often.
CHOICES: dict[str, Sequence[Any]] = {
    "precision": ("bf16", "int8", "fp8"),
    "size": ((256, 256), (192, 320), (320, 192)),
    "batch": (1, 1, 2),
    "text": ("a red ring", "a large green circle at the bottom right of a white background"),
    "cfg": (1.0, 4.0),
    "cached": (False, False, True),
    "lora": ("", "merge", "bypass"),
    "nag": (False, False, True),
    "attention": ("", "auto", "math"),
    "tiles": (0, 0, 2),
}
FULL_SIZE = {"precision": ("int8",), "size": ((1328, 1328), (1664, 928)), "batch": (1,)}
PARTS = "model", "text_encoder", "vae"
Graph = dict[str, dict[str, Any]]
Setting = dict[str, Any]
Model = tuple[str, dict[str, str]]  # a LoRA that fits, and files as the loader names them


def settings_of(choices: Mapping[str, Sequence[Any]], number: int) -> list[Setting]:
    """Draws settings in which every choice comes as often as it can, always the same."""
    draw = random.Random(SEED)
    columns = [
        draw.sample([values[it % len(values)] for it in range(number)], number)
        for values in choices.values()
    ]
    return [
        {"seed": seed} | dict(zip(choices, values, strict=True))
        for seed, values in enumerate(zip(*columns, strict=True))
    ]


def graph_of(setting: Setting, turn: int = 0) -> Graph:
    """Makes the micro model's workflow one of the setting; another `turn` samples it again."""
    nodes: Graph = json.loads(TEMPLATE.read_text(encoding="utf-8"))
    sample, (width, height) = nodes["sample"]["inputs"], setting["size"]
    lora, files = setting["model"]

    def through(kind: str, **inputs: Any) -> None:
        inputs["model"], sample["model"] = sample["model"], [kind, 0]
        nodes[kind] = {"class_type": f"QwenL40S_{kind}", "inputs": inputs}

    nodes["load"]["inputs"] |= files | {"precision": setting["precision"]}
    nodes["positive"]["inputs"]["text"] = setting["text"]
    nodes["empty"]["inputs"] |= {"width": width, "height": height, "batch_size": setting["batch"]}
    if setting["lora"]:
        through("LoadLora", lora=lora, strength=1.0, lora_mode=setting["lora"])
    if setting["attention"]:
        through("Optimize", attention=setting["attention"], fused_blocks=True)
        nodes["decode"]["class_type"] = "QwenL40S_VAEDecode"
        nodes["decode"]["inputs"]["tiles"] = setting["tiles"]
    if setting["nag"]:
        through("NAG", negative=["negative", 0], scale=5.0, tau=2.5, alpha=0.25)
    if setting["cached"]:
        through("StepCache", cache="custom", **{f"cache.{name}": it for name, it in CACHE.items()})
    sample |= {"turn": turn, "seed": setting["seed"], "cfg": setting["cfg"]}
    sample["steps"] = 12 if setting["cached"] else 4
    return nodes


def micro_models(models: Path) -> list[Model]:
    found = []
    for title, name in (("micro", "1.x"), ("micro 2.1", "2.1")):
        shape = check_complete(open_source(bundled_micro_folder(name), "transformer"))
        lora = f"{title}.safetensors"
        write_lora(models / "loras" / lora, shape, 4, torch.device("cpu"))
        found.append((lora, dict.fromkeys(PARTS, f"{title} (bundled)")))
    return found


def full_size_models(models: Path) -> list[Model]:
    import_comfyui(cpu=False)
    files, lora = published(None), "soak.safetensors"
    write_models(models, files)
    shape = find_member(files.member).transformer
    write_lora(models / "loras" / lora, shape, 16, torch.device("cuda"))
    torch.cuda.empty_cache()
    names = files.transformer, files.text_encoder, files.vae
    return [(lora, dict(zip(PARTS, names, strict=True)))]


class Soak:
    """Makes the images of settings and compares each with the setting's first."""

    def __init__(self, settings: Sequence[Setting], card: Callable[[], int]) -> None:
        self.settings, self.draw, self.turns = settings, random.Random(SEED), count()
        # The seconds of each prompt, and the most bytes of system RAM and of the card behind one.
        self.rounds: list[tuple[list[float], int, int]] = []
        self.known: dict[int, bytes] = {}
        self.different: Counter[str] = Counter()  # images, by where they were made
        self.cancelled, self._card = 0, card

    def round(self, server: ComfyUIServer) -> None:
        """Generates every setting once; behind the first round some prompts are interrupted."""
        seconds, host, card = [], 0, 0
        for setting in self.draw.sample(self.settings, len(self.settings)):
            if self.rounds and self.draw.random() < CANCELLED:
                after = self.draw.uniform(0, median(self.rounds[-1][0]))
                self.paint(server, self.draw.choice(self.settings), IN_TURN, cancel_after=after)
            seconds.append(seconds_of(self.paint(server, setting, IN_TURN)))
            host, card = max(host, resident(server.process.pid)), max(card, self._card())
        self.rounds.append((seconds, host, card))

    def paint(
        self, server: ComfyUIServer, setting: Setting, where: str, cancel_after: float | None = None
    ) -> dict[str, Any]:
        """Compares what comes of a prompt, which may have ended before it is interrupted."""
        prompt = server.begin(graph_of(setting, next(self.turns)))
        if cancel_after is not None:
            time.sleep(cancel_after)
            server.ask("/interrupt", {"prompt_id": prompt})
        entry = server.end(prompt)
        if "execution_interrupted" in dict(entry["status"]["messages"]):
            self.cancelled += 1
            return entry
        pixels = b""
        for image in entry["outputs"]["save"]["images"]:
            path = server.base / image["type"] / image["subfolder"] / image["filename"]
            pixels += Image.open(path).tobytes()
            path.unlink()
        if self.known.setdefault(setting["seed"], pixels) != pixels:
            self.different[where] += 1
            print(f"different, {where}: {setting}", flush=True)
        return entry


def resident(pid: int) -> int:
    (found,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found) * 1024


def soak(args: argparse.Namespace) -> int:
    """Generates, prints what came of it, and returns 0, or 1 where something grew or changed."""
    began, comfyui = time.monotonic(), comfyui_folder()
    if comfyui is None:
        raise UnavailableError("COMFYUI_PATH names no ComfyUI: set it to ComfyUI's folder.")
    own = comfyui / ".venv" / "bin" / "python"
    python = os.environ.get("COMFYUI_PYTHON") or (own if own.exists() else sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        base, card, more = Path(folder), lambda: 0, ["--cpu"]
        models = args.full_size or base / "models"
        (models / "loras").mkdir(parents=True, exist_ok=True)
        if args.full_size:
            (base / "models").symlink_to(models.resolve(), target_is_directory=True)
            choices = CHOICES | FULL_SIZE | {"model": full_size_models(models)}
            # Else ComfyUI on a host with much memory keeps what all earlier prompts gave.
            card, more = used_bytes(), ["--cache-classic"]
        else:
            choices = CHOICES | {"model": micro_models(models)}
        start = partial(ComfyUIServer, comfyui, python, base, *more)
        with start() as server:
            if NODE_OF_21 not in server.ask("/object_info"):
                choices["model"] = choices["model"][:1]
            run = Soak(settings_of(choices, args.settings), card)
            ends = began + 60 * args.minutes
            while len(run.rounds) * args.settings < args.pictures and time.monotonic() < ends:
                run.round(server)
                host, on_card = (each / MB for each in run.rounds[-1][1:])
                done = len(run.rounds) * args.settings
                print(f"{done} images, {host:.0f} MB of RAM, {on_card:.0f} of VRAM", flush=True)
        order = run.draw.sample(run.settings, args.settings)
        for number in range(args.fresh):
            with start() as server:
                for setting in order[number :: args.fresh]:
                    run.paint(server, setting, FRESH)
    return report(run, args, time.monotonic() - began)


def report(run: Soak, args: argparse.Namespace, seconds: float) -> int:
    times, host, card = zip(*run.rounds, strict=True)
    alike = len(run.known) - len(set(run.known.values()))
    rows = {
        "pictures": len(run.rounds) * len(run.settings),
        "settings": len(run.settings),
        "prompts interrupted": run.cancelled,
        "MB of host memory, the most of the first round": round(host[0] / MB),
        "of the last": round(host[-1] / MB),
        "of any": round(max(host) / MB),
        "pictures that differ from the first": run.different[IN_TURN],
        f"on {args.fresh} fresh servers": run.different[FRESH],
        "settings that paint the same": alike,
        "seconds": round(seconds),
    }
    bad = max(host) - host[0] >= MOST_GROWTH or run.different or alike
    if args.full_size:
        fifth = max(1, len(run.rounds) // 5)
        parts = times[-fifth:], times[fifth : 2 * fifth] or times
        last, second = (median(it for done in part for it in done) for part in parts)
        # What the first round fills late, such as modulation tables, is there in all of the second.
        rows["MB more on the card than in the first two rounds"] = (max(card) - max(card[:2])) / MB
        rows["seconds of a prompt, last fifth / second"] = round(last / second, 3)
        bad = bad or max(card) > max(card[:2]) or last / second > MOST_SLOWING
    for name, value in rows.items():
        print(f"{name:48} {value:>10}")
    return int(bool(bad))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--pictures", type=int, default=600)
    add("--settings", type=int, default=40)
    add("--fresh", type=int, default=8)
    add("--minutes", type=float, default=math.inf)
    add("--full-size", type=Path, metavar="FOLDER")
    return soak(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
