"""Runs in ComfyUI's own Python: this package's loader beside ComfyUI's own.

    python comfyui_loader.py COMFYUI FOLDER

FOLDER holds one-block transformers of the real width. Prints one JSON object {check: figure}.
"""

import json

import comfyui_boot

(FOLDER,) = comfyui_boot.ARGUMENTS
comfyui_boot.start("--cpu")

import comfy.model_management
import comfy.sample
import comfy.samplers
import comfy.sd
import torch
from safetensors.torch import load_file

from qwen_l40s.hosts.comfyui.load.transformer import load_model


def sample(model) -> torch.Tensor:
    """Two Euler steps with guidance at 64 x 64, from fixed noise and text."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 16, 1, 8, 8, generator=generator)
    positive, negative = torch.randn(2, 1, 6, 3584, generator=generator)
    return comfy.sample.sample(
        model,
        noise,
        2,
        2.5,
        "euler",
        "simple",
        [[positive, {}]],
        [[negative, {}]],
        torch.zeros_like(noise),
        disable_pbar=True,
        seed=0,
    )


def loaded(name: str, precision: str = "auto", **settings) -> torch.Tensor:
    return sample(load_model(FOLDER / name, precision, **settings)[0])


def stock(name: str) -> torch.Tensor:
    return sample(comfy.sd.load_diffusion_model(str(FOLDER / name)))


def edited(model, **settings) -> torch.Tensor:
    """One forward with a reference image beside the noise, as Edit and Layered are run."""
    comfy.model_management.load_models_gpu([model])
    generator = torch.Generator().manual_seed(1)
    noise, reference = torch.randn(2, 1, 16, 1, 8, 8, generator=generator)
    text = torch.randn(1, 6, 3584, generator=generator)
    return model.model.diffusion_model(
        noise,
        torch.tensor([0.7]),
        text,
        ref_latents=[reference],
        transformer_options={},
        **settings,
    )


def difference(found: torch.Tensor, known: torch.Tensor) -> float:
    return float((found - known).norm() / known.norm())


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    known = stock("bf16.safetensors")
    ours, _ = load_model(FOLDER / "bf16.safetensors")
    figures = {"identical in bf16": float(torch.equal(sample(ours), known))}
    copy = ours.clone(force_deepcopy=True)
    figures["identical after cached_patcher_init"] = float(torch.equal(sample(copy), known))
    figures["identical from shards"] = float(torch.equal(loaded("sharded"), known))
    figures["identical from a checkpoint with a prefix"] = float(
        torch.equal(loaded("prefixed.safetensors"), known)
    )
    for name, settings in (
        ("edit_2511", {}),
        ("layered", {"additional_t_cond": torch.tensor([0])}),
    ):
        theirs = edited(
            comfy.sd.load_diffusion_model(str(FOLDER / f"{name}.safetensors")), **settings
        )
        mine = edited(load_model(FOLDER / f"{name}.safetensors")[0], **settings)
        figures[f"identical for {name}"] = float(torch.equal(mine, theirs))
    for precision in ("int8", "fp8"):
        on_load = loaded("bf16.safetensors", precision)
        figures[f"{precision} against bf16"] = difference(on_load, known)
        file = loaded(f"{precision}.safetensors")
        figures[f"{precision} file is as {precision} on load"] = float(torch.equal(file, on_load))
        back = loaded(f"{precision}.safetensors", "bf16")
        figures[f"{precision} dequantized against itself"] = difference(back, on_load)
    figures["int8 file in ComfyUI's own loader against ours"] = difference(
        stock("int8.safetensors"), loaded("int8.safetensors")
    )
    everything = loaded("bf16.safetensors", "int8", keep=["*"])
    figures["identical when every layer is kept"] = float(torch.equal(everything, known))
    for name in ("scaled_fp8", "fp8_marker", "convrot"):
        stored = loaded(f"{name}.safetensors")
        figures[f"{name} against bf16"] = difference(stored, known)
        figures[f"{name} against ComfyUI's own loader"] = difference(
            stored, stock(f"{name}.safetensors")
        )
    unscaled = loaded("unscaled_fp8.safetensors")
    # The same values in bf16, which is exact.
    rounded = load_file(FOLDER / "unscaled_fp8.safetensors")
    figures["unscaled fp8 holds fp8 values"] = float(
        all(weight.dtype == torch.float8_e4m3fn for weight in rounded.values())
    )
    figures["unscaled fp8 against its values in bf16"] = difference(
        unscaled, loaded("unscaled_in_bf16.safetensors")
    )
    print(json.dumps(figures))


main()
