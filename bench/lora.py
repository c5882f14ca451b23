"""Times a forward pass in bf16 with a LoRA in addition to the weights, by rank.

    python -m qwen_l40s.bench.lora [--side 1328] [--blocks 60] [--device cuda] [--repeats 10]

Runs in the Python that runs ComfyUI, with random weights of Qwen-Image; prints a row for each rank,
and how long `auto` takes to tell what a merge would lose.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from ..families.qwen_image import FULL_SIZE
from ..machine.device import choose_device
from ..spec.transformer import TransformerShape
from .command import import_comfyui
from .forward import (
    ForwardProgram,
    Measured,
    in_comfyui,
    input_tensors,
    random_model,
    random_tensor,
)
from .measure import times_ms
from .rows import Inputs

RANKS = (0, 16, 32, 64, 128, 256)


def write_lora(path: Path, shape: TransformerShape, rank: int, device: torch.device) -> None:
    tensors = {}
    for layer, (rows, columns) in shape.quantizable_layers().items():
        for end, size in (("down", (rank, columns)), ("up", (rows, rank))):
            name = f"{layer}.lora_{end}.weight"
            tensors[name] = (random_tensor(name, size, device) / 10).cpu()
    save_file(tensors, path)


def compare(args: argparse.Namespace) -> None:
    device = torch.device(choose_device(args.device))
    import_comfyui(cpu=device.type == "cpu")
    from ..hosts.comfyui.lora import apply, loss
    from ..hosts.comfyui.sample.optimize import optimize

    shape = replace(FULL_SIZE, blocks=args.blocks)
    weights = {name: random_tensor(name, size, device) for name, size in shape.tensors().items()}
    model = random_model(weights, shape, device, edit=False)
    tensors, known = input_tensors(shape, Inputs(args.side, args.side), device), 0.0

    def body(program: ForwardProgram) -> Measured:
        sigma = tensors.sigmas[0]
        return {"ms": median(times_ms(lambda: program.call(sigma), device, args.repeats))}, None

    seconds = []

    def timed_loss(*arguments: Any) -> float | None:
        begun = time.perf_counter()
        found = loss.merge_loss(*arguments)
        seconds.append(time.perf_counter() - begun)
        return found

    apply.merge_loss = timed_loss  # type: ignore[assignment]
    for rank in RANKS:
        patched, told = model, ""
        if rank:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "lora.safetensors"
                write_lora(path, shape, rank, device)
                lost = apply.apply_lora(model, path, 1.0, how="auto")[1].loss
                patched = apply.apply_lora(model, path, 1.0, how="bypass")[0]
            told = f", a merge loses {lost:.1%}, told in {seconds[-1] * 1000:.0f} ms"
        milliseconds = in_comfyui(optimize(patched), tensors, body)[0]["ms"]
        known = known or milliseconds
        print(f"rank {rank}: {milliseconds:.1f} ms ({milliseconds / known:.3f}){told}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--side", type=int, default=1328)
    add("--blocks", type=int, default=FULL_SIZE.blocks)
    add("--device", default="auto")
    add("--repeats", type=int, default=10)
    with torch.inference_mode():
        compare(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
