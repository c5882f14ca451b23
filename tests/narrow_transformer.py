"""Writes a Qwen-Image transformer that is 128 wide, in the forms people have.

Used inside ComfyUI's Python too; the package must be importable before this module is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from qwen_l40s.families.qwen_image import QwenImageShape
from qwen_l40s.loaders.quantize import layers_to_quantize, quantize_rows, row_format
from qwen_l40s.loaders.stored import StoredLayer

SHAPE = QwenImageShape(
    blocks=2, dim=128, heads=4, head_dim=32, joint_dim=64, in_channels=64, packed_out_channels=64
)
AXES = [8, 12, 12]
# What ComfyUI's class is told; its own loader takes the published sizes for granted.
CONFIG = {
    "image_model": "qwen_image",
    "in_channels": 64,
    "num_layers": 2,
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "joint_attention_dim": 64,
    "axes_dims_rope": tuple(AXES),
}
LAYER = "transformer_blocks.1.attn.to_q"
MODULATION = "transformer_blocks.0.img_mod.1"
MARKER_2511 = "__index_timestep_zero__"
Tensors = dict[str, torch.Tensor]


def weights(shape: QwenImageShape = SHAPE) -> Tensors:
    """Random bf16 weights of a size at which activations stay around 1."""
    generator = torch.Generator().manual_seed(0)
    found: Tensors = {}
    for name, size in shape.tensors().items():
        weight = torch.randn(size, generator=generator)
        weight *= 0.5 / size[1] ** 0.5 if len(size) == 2 else 0.02
        found[name] = (weight + (len(size) == 1 and "norm" in name)).bfloat16()
    return found


def layers(tensors: Tensors) -> list[str]:
    return sorted(layers_to_quantize(name.removesuffix(".weight") for name in tensors))


def write(path: Path, tensors: Tensors, config: Mapping[str, Any] | None = None) -> Path:
    """Writes one file whose own header says how a head is split, which no tensor does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = {"config": {"axes_dims_rope": AXES, **(config or {})}}
    save_file(tensors, path, {"qwen_l40s": json.dumps(entry)})
    return path


def sharded(
    folder: Path,
    tensors: Tensors,
    parts: tuple[str, ...] = ("a", "b"),
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a diffusers folder of files of these names, and returns the path of its index."""
    folder.mkdir(parents=True)
    files = {key: f"{parts[i % len(parts)]}.safetensors" for i, key in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({key: tensors[key] for key in files if files[key] == file}, folder / file)
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text(json.dumps({"axes_dims_rope": AXES, **(config or {})}))
    return index


def quantized(
    tensors: Tensors,
    change: Callable[[torch.Tensor], Tensors],
    marker: Mapping[str, Any] | None = None,
    only: list[str] | None = None,
) -> Tensors:
    """The tensors with layers replaced by what `change(weight)` returns by suffix.

    Args:
        marker: what the layers' `.comfy_quant` says; none is written without it.
        only: the layers; all that are quantized usually, if not given.
    """
    found = dict(tensors)
    for layer in layers(tensors) if only is None else only:
        weight = found.pop(f"{layer}.weight")
        found |= {f"{layer}.{end}": tensor for end, tensor in change(weight).items()}
        if marker is not None:
            text = json.dumps(marker).encode()
            found[f"{layer}.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    return found


def rounded(weight: torch.Tensor, precision: str) -> StoredLayer:
    form = row_format(precision, weight.shape[1])
    return StoredLayer.rounded(*quantize_rows(weight, precision, rotation=form.rotation), form)


def fp8_of_one_scale(weight: torch.Tensor) -> Tensors:
    """As the published scaled fp8 files have it, with a scale for the activations too."""
    scale = weight.abs().max().float() / 448
    values = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.02)}


def lora(
    tensors: Tensors, modules: Iterable[str], rank: int = 4, seed: int = 1, scale: float = 0.1
) -> Tensors:
    """A LoRA of some layers of a model with these weights, by bare names."""
    generator = torch.Generator().manual_seed(seed)
    found: Tensors = {}
    for module in modules:
        rows, columns = tensors[f"{module}.weight"].shape
        for end, shape in (("down", (rank, columns)), ("up", (rows, rank))):
            matrix = torch.randn(shape, generator=generator) * scale
            found[f"{module}.lora_{end}.weight"] = matrix
    return found


def stock(tensors: Tensors, dtype: torch.dtype = torch.bfloat16, cast=torch.bfloat16):
    """A MODEL by the calls of ComfyUI's own loader, which takes the published sizes for granted.

    Args:
        dtype: of the weights, as its menu has it; by default that of quantized files.
        cast: that it computes in.
    """
    import comfy.model_management
    import comfy.model_patcher
    import comfy.supported_models
    import comfy.utils

    tensors, _ = comfy.utils.convert_old_quants(dict(tensors), "", metadata={})
    config = comfy.supported_models.QwenImage(dict(CONFIG))
    config.quant_config = comfy.utils.detect_layer_quantization(tensors, "")
    config.set_inference_dtype(dtype, cast)
    loaded = config.get_model(tensors, "")
    devices = comfy.model_management.get_torch_device(), torch.device("cpu")
    patcher = comfy.model_patcher.CoreModelPatcher(loaded, *devices)
    loaded.load_model_weights(tensors, "", assign=patcher.is_dynamic())
    return patcher


def load_patcher(path, form="bf16", off_card=False, disable_dynamic=False):
    """A MODEL as the loader makes it, with the modulation where the test wants it; in ComfyUI."""
    from qwen_l40s.hosts.comfyui.load.plan import plan_load
    from qwen_l40s.hosts.comfyui.load.transformer import load_patcher
    from qwen_l40s.loaders.source import open_source

    plan = plan_load(open_source(path, "transformer"), form)
    return load_patcher(replace(plan, named=False, off_card=off_card), disable_dynamic)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def difference(found: torch.Tensor, known: torch.Tensor) -> float:
    return float((found - known).norm() / known.norm())


def prompt(tokens: int, width: int = SHAPE.joint_dim, **values) -> list:
    return [[random(1, tokens, width, seed=tokens), values]]


def sample(model, *prompts, steps=2, cfg=1.0, sampler="euler", noise=None, batch=1, side=8, **more):
    """A few of ComfyUI's steps from fixed noise, of 1.x or of `narrow_21`.

    Args:
        prompts: conditioning, or how many tokens it has; one stands for both.
        more: what a conditioning that is made here has besides its text, as `values`.
    """
    import comfy.sample

    later, values = type(model.model).__name__ == "QwenImage21", more.pop("values", {})
    if noise is None:
        noise = random(batch, *((64,) if later else (16, 1)), side, side)
    width = 96 if later else SHAPE.joint_dim
    prompts = [prompt(it, width, **values) if isinstance(it, int) else it for it in prompts]
    prompts = prompts * 2 if len(prompts) == 1 else prompts
    how = steps, cfg, sampler, "simple", *prompts, torch.zeros_like(noise)
    with torch.inference_mode():
        return comfy.sample.sample(model, noise, *how, disable_pbar=True, seed=0, **more).float()
