"""Writes a Qwen-Image of the published sizes with random weights: 58 GB, made on the card.

    python benchmarks/memory_weights.py COMFYUI FOLDER

FOLDER gets diffusion_models, text_encoders and vae, each with one file in bf16 and in ComfyUI's
names. Matrices are scaled so that activations stay finite. A file that is there is left alone.
"""

from __future__ import annotations

import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .memory_cases import TEXT_ENCODER, TEXT_WIDTH, TRANSFORMER, VAE

VOCABULARY = 152_064
Shapes = dict[str, tuple[int, ...]]


def transformer_shapes() -> Shapes:
    from ..loaders.convert import expected_tensors
    from ..spec import TransformerShape

    return expected_tensors(TransformerShape(60, 3072, 24, 128, TEXT_WIDTH, 64, 64))


def comfyui_shapes(comfyui: Path) -> tuple[Shapes, Shapes]:
    """Text encoder and VAE, from ComfyUI's own classes.

    The language model's head is in the published file and not in the class.
    """
    sys.path.insert(0, str(comfyui))
    import comfy.options

    # Nothing is computed with them, and ComfyUI would look for a card.
    arguments, sys.argv = sys.argv, [sys.argv[0], "--cpu"]
    comfy.options.enable_args_parsing()
    import comfy.cli_args

    sys.argv = arguments
    import comfy.ldm.wan.vae
    import torch
    from comfy.text_encoders.llama import Qwen25_7BVLI

    text_encoder = Qwen25_7BVLI({}, torch.bfloat16, "meta", torch.nn)
    with torch.device("meta"):
        vae = comfy.ldm.wan.vae.WanVAE(
            dim=96,
            z_dim=16,
            dim_mult=[1, 2, 4, 4],
            num_res_blocks=2,
            attn_scales=[],
            temperal_downsample=[False, True, True],
        )
    texts, images = (
        {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        for model in (text_encoder, vae)
    )
    return texts | {"lm_head.weight": (VOCABULARY, TEXT_WIDTH)}, images


def deviation(name: str, shape: tuple[int, ...]) -> float | None:
    """The standard deviation of a parameter; None for a norm's weight, which is one."""
    fan_in = math.prod(shape[1:])
    if name.endswith("bias"):
        return 0.02
    return None if fan_in == 1 else 0.5 * fan_in**-0.5


def write(path: Path, shapes: Shapes, device: str = "cuda") -> None:
    """Writes random weights of these shapes, unless the file is there."""
    if path.exists():
        return
    import torch

    from ..loaders.writer import SafetensorsLayout, write_safetensors

    begin = time.perf_counter()
    generator = torch.Generator(device).manual_seed(0)
    specs = {name: ("BF16", shape) for name, shape in shapes.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_safetensors(path, SafetensorsLayout(specs, {"format": "pt"})) as file:
        for name, shape in shapes.items():
            weight = torch.ones(shape, device=device, dtype=torch.bfloat16)
            spread = deviation(name, shape)
            if spread is not None:
                weight.normal_(0, spread, generator=generator)
            file.write(name, weight.cpu())
    seconds = time.perf_counter() - begin
    print(f"{path}: {path.stat().st_size / 1e9:.1f} GB in {seconds:.1f} s", flush=True)


def main() -> int:
    comfyui, folder = map(Path, sys.argv[1:])
    text_encoder, vae = comfyui_shapes(comfyui)
    files = {
        f"diffusion_models/{TRANSFORMER}": transformer_shapes(),
        f"text_encoders/{TEXT_ENCODER}": text_encoder,
        f"vae/{VAE}": vae,
    }
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(write, folder / name, shapes) for name, shapes in files.items()]
        for job in jobs:
            job.result()
    return 0


if __name__ == "__main__":
    sys.exit(main())
