"""Compares our step cache with EasyCache and with fewer steps, at equal numbers of computed steps.

    python -m qwen_l40s.bench.step_cache --output FILE [--prompts 40] [--steps 50 20]
        [--device cpu]

Runs in the Python that runs ComfyUI: the nodes of this package and of ComfyUI sample held-out
prompts with the bundled micro model (euler, simple, CFG 4; on a CPU in fp32), one image at a time.
The error is the relative L2 distance of the final latent from that of the same seed without a
cache. FILE is rewritten after each rule.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from ..loaders.source import bundled_micro_folder
from ..machine.device import choose_device
from ..measure.fidelity import relative_error
from ..micro.scene import sample_prompts
from ..planning.step_cache import PRESETS, computed_steps
from .command import conditions, import_comfyui
from .measure import Fields, RowWriter

CFG, LATENT = 4.0, (1, 16, 1, 32, 32)
OURS, EASYCACHE, FEWER = RULES = ("ours", "EasyCache", "fewer steps")
EASYCACHE_SPAN = 0.15, 0.95  # of the run, the node's own
# EasyCache's thresholds at which prompts of pairs that training showed compute as many steps as the
# preset: {steps: {preset: threshold}}, of bench/results/step-cache-micro.json.
THRESHOLDS = {
    50: {"faithful": 0.0079, "balanced": 0.0213, "fast": 0.0866},
    20: {"faithful": 0.0149, "balanced": 0.0205},
}


class Micro:
    """Runs the bundled model in ComfyUI, and counts the calls of its transformer."""

    def __init__(self) -> None:
        from comfy.patcher_extension import WrappersMP

        from ..hosts.comfyui.load.text_encoder import load_text_encoder
        from ..hosts.comfyui.load.transformer import load_model

        folder = bundled_micro_folder()
        self.model, self._calls = load_model(folder)[0], 0
        self._clip = load_text_encoder(folder)[0]
        # ComfyUI's EasyCache writes into its input, which in fp32 is the sampler's own latent.
        self.model.add_wrapper_with_key(
            WrappersMP.DIFFUSION_MODEL,
            "copy",
            lambda call, x, *args, **kwargs: call(x.clone(), *args, **kwargs),
        )
        self.model.model.diffusion_model.img_in.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._calls += 1

    def sample(self, model: Any, prompt: str, seed: int, steps: int) -> tuple[torch.Tensor, float]:
        """Returns one image's latent, and how many of its steps called the transformer."""
        import comfy.sample

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
        return latent, self._calls / 2


def compare(args: argparse.Namespace) -> None:
    device = torch.device(choose_device(args.device))
    version = import_comfyui(cpu=device.type == "cpu")
    from comfy_extras.nodes_easycache import EasyCacheNode

    from ..hosts.comfyui.sample.step_cache import cache_steps

    micro = Micro()
    prompts = [prompt for prompt, _ in sample_prompts(args.prompts, 1)]
    about = {"prompts": args.prompts, "cfg": CFG, "sampler": "euler, simple"}
    writer = RowWriter(conditions(device, version) | about, args.output)

    def sample(model: Any, steps: int) -> tuple[Sequence[torch.Tensor], Sequence[float]]:
        found = [micro.sample(model, prompt, i, steps) for i, prompt in enumerate(prompts)]
        images, seconds = zip(*found, strict=True)
        return images, seconds

    for steps in args.steps:
        exact, _ = sample(micro.model, steps)
        for (preset, threshold), rule in product(THRESHOLDS[steps].items(), RULES):
            planned, model = computed_steps(steps, preset), micro.model
            if rule == OURS:
                model = cache_steps(model, PRESETS[preset])
            elif rule == EASYCACHE:
                model = EasyCacheNode.execute(model, threshold, *EASYCACHE_SPAN, False).args[0]
            latents, computed = sample(model, planned if rule == FEWER else steps)
            about = {"rule": rule, "steps": steps, "preset": preset, "planned": planned}
            writer.add(about | {"computed": fmean(computed)} | errors(latents, exact))


def errors(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> Fields:
    each = [relative_error(one, known) for one, known in zip(found, exact, strict=True)]
    worst = sorted(each, reverse=True)[: math.ceil(len(each) / 10)]
    return {"mean": fmean(each), "worst_decile": fmean(worst), "most": worst[0]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, required=True, help="the results, as JSON")
    add("--prompts", type=int, default=40)
    add("--steps", type=int, nargs="+", choices=THRESHOLDS, default=list(THRESHOLDS))
    add("--device", default="auto")
    with torch.inference_mode():
        compare(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
