"""Times a forward pass in bf16 with a LoRA in addition to the weights, by rank.

    python -m qwen_l40s.bench.lora

Runs in the Python that runs ComfyUI, with random weights of Qwen-Image; prints a row for each rank,
and what a merge would lose.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

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

RANKS, SIDE, REPEATS = (0, 16, 32, 64, 128, 256), 1328, 10


def write_lora(path: Path, shape: TransformerShape, rank: int, device: torch.device) -> None:
    tensors = {}
    for layer, (rows, columns) in shape.quantizable_layers().items():
        for end, size in (("down", (rank, columns)), ("up", (rows, rank))):
            name = f"{layer}.lora_{end}.weight"
            tensors[name] = (random_tensor(name, size, device) / 10).cpu()
    save_file(tensors, path)


def compare() -> None:
    device = torch.device(choose_device("auto"))
    import_comfyui(cpu=device.type == "cpu")
    from ..hosts.comfyui.lora import apply
    from ..hosts.comfyui.sample.optimize import optimize

    named = FULL_SIZE.tensors().items()
    weights = {name: random_tensor(name, size, device) for name, size in named}
    model = random_model(weights, FULL_SIZE, device, edit=False)
    tensors, known = input_tensors(FULL_SIZE, Inputs(SIDE, SIDE), device), 0.0

    def body(program: ForwardProgram) -> Measured:
        sigma = tensors.sigmas[0]
        return {"ms": median(times_ms(lambda: program.call(sigma), device, REPEATS))}, None

    for rank in RANKS:
        patched, told = model, ""
        if rank:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "lora.safetensors"
                write_lora(path, FULL_SIZE, rank, device)
                lost = apply.apply_lora(model, path, 1.0, how="auto")[1].loss
                patched = apply.apply_lora(model, path, 1.0, how="bypass")[0]
            told = f", a merge loses {lost:.1%}"
        milliseconds = in_comfyui(optimize(patched), tensors, body)[0]["ms"]
        known = known or milliseconds
        print(f"rank {rank}: {milliseconds:.1f} ms ({milliseconds / known:.3f}){told}", flush=True)


def main() -> None:
    with torch.inference_mode():
        compare()


if __name__ == "__main__":
    main()
