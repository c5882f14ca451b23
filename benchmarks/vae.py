"""Decoding and encoding through ComfyUI's VAE, whole and in exact tiles, on a card.

    python benchmarks/vae.py [--json FILE] [--sizes 1024,1328,2048]

The VAE has the real width and random weights, in bf16. For every plan: memory beside weights and
input as planned, allocated and reserved by torch, milliseconds (median of 5 after 2) and the
difference from the host's own whole pass in dB of its range. Then 4096x4096 in plans for small
budgets, with torch held to the budget. Needs ComfyUI: COMFYUI_PATH, or one in ~/ComfyUI.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import package  # noqa: F401, by which the next imports find qwen_l40s
import torch

from qwen_l40s.hosts.comfyui.library import import_comfyui
from qwen_l40s.optimizations.hardware import GIB
from qwen_l40s.optimizations.measure import peaks, reset_peaks, synchronize, time_calls

CARD = torch.device("cuda")
WARM_UP, REPEATS = 2, 5
TILES = (1, 2, 4, 9)
BUDGETS_GIB = (1.5, 2.0, 3.0, 6.0)


def random_vae() -> Any:
    """ComfyUI's class at the published width, with weights that keep activations near 1."""
    from comfy.ldm.wan.vae import WanVAE

    torch.manual_seed(0)
    vae = WanVAE(dim=96, z_dim=16, num_res_blocks=2, temperal_downsample=[False, True, True])
    for name, weight in vae.named_parameters():
        if "gamma" in name:
            weight.data.fill_(1)
        elif weight.ndim == 1:
            weight.data.zero_()
        else:
            # Of three taps in time an image reaches one.
            taps = weight[0].numel() / (weight.shape[2] if weight.ndim == 5 else 1)
            weight.data.normal_(0, math.sqrt(2 / taps))
    return vae.cuda().bfloat16().eval()


def measured(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """What a call returns, with its peaks beside what was allocated before, and its time."""
    for _ in range(WARM_UP):
        call()
    synchronize(CARD)
    reset_peaks(CARD)
    before, output, after = peaks(CARD), call(), peaks(CARD)
    figures = {
        "allocated_gib": after.allocated - before.allocated,
        "reserved_gib": after.reserved - before.reserved,
        "ms": time_calls(call, CARD, REPEATS).median,
    }
    return output, figures


def decibels(found: torch.Tensor, known: torch.Tensor) -> float:
    """Peak signal to noise, the peak being the known one's range."""
    error = (found.float() - known.float()).square().mean().clamp_min(1e-30)
    return 10 * math.log10((known.float().max() - known.float().min()) ** 2 / error)


def compare(direction: str, side: int, vae: Any) -> list[dict[str, Any]]:
    """The host's own pass and one row for each number of tiles."""
    from qwen_l40s.hosts.comfyui.vae_stages import decoder_stages, encoder_stages
    from qwen_l40s.optimizations.vae import decode, encode
    from qwen_l40s.planning.vae import VaeShape, plan_decode, plan_encode

    latent = side // 8
    if direction == "decode":
        given = torch.randn(1, 16, 1, latent, latent, device="cuda", dtype=torch.bfloat16)
        own, run, stages, plan_for = vae.decode, decode, decoder_stages(vae), plan_decode
    else:
        given = torch.rand(1, 3, 1, side, side, device="cuda", dtype=torch.bfloat16) * 2 - 1
        own, run, stages, plan_for = vae.encode, encode, encoder_stages(vae), plan_encode
    known, figures = measured(lambda: own(given))
    rows = [{"direction": direction, "side": side, "plan": "ComfyUI's own, whole", **figures}]
    for tiles in TILES:
        plan = plan_for(VaeShape(), latent, latent, budget=None, tiles=tiles, image_on_card=True)
        found, ours = measured(lambda plan=plan: run(stages, given, plan))
        row = {
            "direction": direction,
            "side": side,
            "plan": f"{plan.how}, {plan.tiles[0]}x{plan.tiles[1]}",
            "planned_gib": plan.peak_bytes / GIB,
            **ours,
            "times_whole": ours["ms"] / figures["ms"],
            "equal": torch.equal(found, known),
            "db": decibels(found, known),
        }
        rows.append(row)
    return rows


def small_budgets(side: int, vae: Any) -> list[dict[str, Any]]:
    """Decoding in plans for little memory, while torch may not take more."""
    from qwen_l40s.hosts.comfyui.vae_stages import decoder_stages
    from qwen_l40s.optimizations.vae import decode
    from qwen_l40s.planning.vae import VaeShape, plan_decode

    latent = side // 8
    latents = torch.randn(1, 16, 1, latent, latent, device="cuda", dtype=torch.bfloat16)
    image = torch.empty(1, 3, 1, side, side)
    total = torch.cuda.get_device_properties(0).total_memory
    rows = []
    for gib in BUDGETS_GIB:
        budget = int(gib * GIB)
        plan = plan_decode(VaeShape(), latent, latent, budget=budget, image_on_card=False)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + budget) / total)
        row = {"direction": "decode", "side": side, "budget_gib": gib, "plan": plan.reason}
        try:
            begin = time.perf_counter()
            decode(decoder_stages(vae), latents, plan, out=image)
            torch.cuda.synchronize()
            row |= {
                "planned_gib": plan.peak_bytes / GIB,
                "ms": 1000 * (time.perf_counter() - begin),
            }
        except torch.OutOfMemoryError as error:
            row["error"] = str(error)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sizes", default="1024,1328,2048")
    parser.add_argument("--largest", type=int, default=4096, help="decoded within small budgets")
    options = parser.parse_args()
    comfyui = import_comfyui(cpu=False)
    vae, rows = random_vae(), []
    with torch.inference_mode():
        for side in map(int, options.sizes.split(",")):
            for direction in ("decode", "encode"):
                rows += compare(direction, side, vae)
        rows += small_budgets(options.largest, vae)
    for row in rows:
        print(
            "  ".join(
                f"{value:.4g}" if type(value) is float else str(value) for value in row.values()
            )
        )
    conditions = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "comfyui": comfyui,
        "python": platform.python_version(),
        "weights": "random, dim 96, bf16",
    }
    if options.json:
        options.json.write_text(
            json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
