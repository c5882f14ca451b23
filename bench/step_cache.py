"""Compares our step cache with EasyCache and with fewer steps, at equal numbers of computed steps.

    python -m qwen_l40s.bench.step_cache --output FILE [--prompts 40] [--steps 50 20]
        [--only RULE ...] [--device cpu]
    python -m qwen_l40s.bench.step_cache --table FILE

Runs in the Python that runs ComfyUI: the nodes of this package and of ComfyUI sample held-out
prompts with the bundled micro model (euler, simple, CFG 4; on a CPU in fp32), one image at a time.
The error is the relative L2 distance of the final latent from that of the same seed without a
cache; `right` is the share of images whose shapes, colours and places are right. FILE is rewritten
after each rule; --table prints it as Markdown.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from ..loaders.source import bundled_micro_folder
from ..machine.device import choose_device
from ..micro.judge import adherence
from ..micro.scene import Scene, sample_prompts
from ..step_cache import PRESETS, computed_steps
from .command import conditions, import_comfyui
from .forward import relative_error
from .measure import Fields, RowWriter

CFG, LATENT = 4.0, (1, 16, 1, 32, 32)
OTHER_COUNT = 0.5  # steps
OURS, EASYCACHE, FEWER = RULES = ("ours", "EasyCache", "fewer steps")
EASYCACHE_SPAN = 0.15, 0.95  # of the run, the node's own
# EasyCache's thresholds at which prompts of pairs that training showed compute as many steps as the
# preset: {steps: {preset: threshold}}, of bench/results/step-cache-micro.json.
THRESHOLDS = {
    50: {"faithful": 0.0079, "balanced": 0.0213, "fast": 0.0866},
    20: {"faithful": 0.0149, "balanced": 0.0205},
}


class Painted(NamedTuple):
    """Holds what one run gave.

    Attributes:
        latent: The final one.
        computed: How many of its steps called the transformer.
        distance: What our cache says how far the latent is from that of no cache.
    """

    latent: torch.Tensor
    computed: float
    distance: float | None


class Micro:
    """Runs the bundled model in ComfyUI, and counts the calls of its transformer."""

    def __init__(self) -> None:
        from comfy.patcher_extension import WrappersMP

        from ..hosts.comfyui.load.text_encoder import load_text_encoder
        from ..hosts.comfyui.load.transformer import load_model
        from ..hosts.comfyui.load.vae import load_vae

        folder = bundled_micro_folder()
        self.model, self._calls = load_model(folder)[0], 0
        self._clip, self._vae = load_text_encoder(folder)[0], load_vae(folder)[0]
        # ComfyUI's EasyCache writes into its input, which in fp32 is the sampler's own latent.
        self.model.add_wrapper_with_key(
            WrappersMP.DIFFUSION_MODEL,
            "copy",
            lambda call, x, *args, **kwargs: call(x.clone(), *args, **kwargs),
        )
        self.model.model.diffusion_model.img_in.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._calls += 1

    def paint(self, model: Any, prompt: str, seed: int, steps: int) -> Painted:
        """Samples one image's latent; each prompt takes a call of its own in a computed step."""
        import comfy.sample

        from ..hosts.comfyui.sample.step_cache import STEP_CACHE_KEY

        self._calls = 0
        noise = torch.randn(LATENT, generator=torch.Generator().manual_seed(seed))
        positive, negative = (
            self._clip.encode_from_tokens_scheduled(self._clip.tokenize(text))
            for text in (prompt, " ")
        )
        latent = comfy.sample.sample(
            *(model, noise, steps, CFG, "euler", "simple", positive, negative),
            torch.zeros_like(noise),
            disable_pbar=True,
            seed=seed,
        )
        cache = model.get_attachment(STEP_CACHE_KEY)
        return Painted(latent, self._calls / 2, cache and cache.figures().distance)

    def right(self, latent: torch.Tensor, scene: Scene) -> bool:
        """Whether the image has its shapes, colours and places right."""
        image = self._vae.decode(latent).reshape(256, 256, 3)
        return adherence((image * 255).round().byte().numpy(), scene).score == 1


def compare(args: argparse.Namespace) -> None:
    device = torch.device(choose_device(args.device))
    version = import_comfyui(cpu=device.type == "cpu")
    from comfy_extras.nodes_easycache import EasyCacheNode

    from ..hosts.comfyui.sample.step_cache import cache_steps

    micro = Micro()
    wanted = sample_prompts(args.prompts, 1)
    about = {"prompts": args.prompts, "cfg": CFG, "sampler": "euler, simple"}
    writer = RowWriter(conditions(device, version) | about, args.output)

    def paint(model: Any, steps: int) -> tuple[list[Painted], float]:
        found = [micro.paint(model, prompt, i, steps) for i, (prompt, _) in enumerate(wanted)]
        right = [
            micro.right(each.latent, scene) for each, (_, scene) in zip(found, wanted, strict=True)
        ]
        return found, 100 * fmean(right)

    for steps in args.steps:
        exact, share = paint(micro.model, steps)
        writer.add({"rule": "none", "steps": steps, "right": share})
        for (preset, threshold), rule in product(THRESHOLDS[steps].items(), args.only):
            computed, model = computed_steps(steps, preset), micro.model
            if rule == OURS:
                model = cache_steps(model, PRESETS[preset])
            elif rule == EASYCACHE:
                model = EasyCacheNode.execute(model, threshold, *EASYCACHE_SPAN, False).args[0]
            found, right = paint(model, computed if rule == FEWER else steps)
            about = {"rule": rule, "steps": steps, "preset": preset, "planned": computed}
            about |= errors(found, exact)
            writer.add(about | {"right": right, "change": right - share})


def errors(found: Sequence[Painted], exact: Sequence[Painted]) -> Fields:
    """Measures how far latents are from those of no cache, and how far ours says they are."""
    each = [
        relative_error(one.latent, known.latent) for one, known in zip(found, exact, strict=True)
    ]
    worst = sorted(each, reverse=True)[: math.ceil(len(each) / 10)]
    row = {
        "computed": fmean(one.computed for one in found),
        "mean": fmean(each),
        "worst_decile": fmean(worst),
        "most": worst[0],
    }
    pairs = zip(found, each, strict=True)
    ratios = [one.distance / error for one, error in pairs if one.distance]
    return row | ({"estimate_by_error": {"median": median(ratios)}} if ratios else {})


def table(results: dict[str, Any]) -> str:
    """Formats the results as Markdown: each rule's error, mean / worst decile, in percent.

    In brackets the computed steps, where they are others than the preset's.
    """
    rows = [row for row in results["rows"] if "preset" in row]
    columns = {(row["steps"], row["preset"]): row["planned"] for row in rows}
    head = ["rule", *(f"{n} of {steps}, `{preset}`" for (steps, preset), n in columns.items())]
    lines = [head, ["---"] * len(head)]
    for name in dict.fromkeys(row["rule"] for row in rows):
        cells = {(row["steps"], row["preset"]): _cell(row) for row in rows if row["rule"] == name}
        lines.append([name, *(cells.get(column, "") for column in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(row: dict[str, Any]) -> str:
    other = abs(row["computed"] - row["planned"]) >= OTHER_COUNT
    computed = f" ({row['computed']:.1f})" if other else ""
    return f"{100 * row['mean']:.2f} / {100 * row['worst_decile']:.2f}{computed}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, help="the results, as JSON")
    add("--table", type=Path, help="print results as Markdown instead")
    add("--prompts", type=int, default=40)
    add("--steps", type=int, nargs="+", choices=THRESHOLDS, default=list(THRESHOLDS))
    add("--only", nargs="+", choices=RULES, default=RULES, metavar="RULE")
    add("--device", default="auto")
    args = parser.parse_args(arguments)
    if args.table:
        print(table(json.loads(args.table.read_text(encoding="utf-8"))))
        return
    if args.output is None:
        parser.error("--output FILE is needed")
    with torch.inference_mode():
        compare(args)


if __name__ == "__main__":
    main()
