"""Makes the files that a workflow names, in a ComfyUI base folder, while a test needs them.

Headers of the published sizes for a workflow that is only accepted, or models of a few megabytes
for one that runs. Both lie under the names that the workflow has.
"""

from __future__ import annotations

import functools
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import narrow_text_encoder
import narrow_transformer
import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKLQwenImage
from PIL import Image, ImageDraw
from published_text_encoder import published_shapes
from safetensors.torch import load_file, save_file

from qwen_l40s.families.parts import text_encoder_name_to_native, vae_name_to_native
from qwen_l40s.families.qwen_image import MARKER_2511, QwenImageShape
from qwen_l40s.loaders.writer import SAFETENSORS_DTYPES, SafetensorsLayout

Graph = dict[str, dict[str, Any]]
Tensors = dict[str, torch.Tensor]
MICRO = Path(__file__).resolve().parent.parent / "models" / "micro"
PUBLISHED = QwenImageShape(60, 3072, 24, 128, 3584, 64, 64)
# {(class, input): the folder of models/ that it chooses from}
MODEL_INPUTS = {
    ("QwenL40S_Load", "model"): "diffusion_models",
    ("QwenL40S_Load", "text_encoder"): "text_encoders",
    ("QwenL40S_Load", "vae"): "vae",
    ("QwenL40S_LoadModel", "model"): "diffusion_models",
    ("QwenL40S_LoadTextEncoder", "text_encoder"): "text_encoders",
    ("QwenL40S_LoadVAE", "vae"): "vae",
    ("QwenL40S_LoadLora", "lora"): "loras",
    ("ControlNetLoader", "control_net_name"): "controlnet",
}
ADDITION = "time_text_embed.addition_t_embedding.weight"
NO_FILES = ("micro (bundled)", "micro 2.1 (bundled)", "automatic")
IMAGE_SIDES = (256, 192)
NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
HOLE = (96, 64, 160, 128)  # where a picture is transparent: what LoadImage gives as its mask
SEES = "TextEncodeQwenImageEditPlus"
VISION_BLOCKS, VISION_MLP = 2, 64  # as workflow_nodes.py has it
# What ComfyUI takes for granted; a picture, a mask and a picture to paint into.
CONTROL_BLOCKS, CONTROL_CHANNELS = 5, 33


def models_named(graph: Graph) -> set[tuple[str, str]]:
    """(folder of models/, file name) of every model file that a graph's nodes choose."""
    return {
        (folder, node["inputs"][name])
        for node in graph.values()
        for (kind, name), folder in MODEL_INPUTS.items()
        if node["class_type"] == kind
        and isinstance(node["inputs"].get(name), str)
        and node["inputs"][name] not in NO_FILES
    }


def images_named(graph: Graph) -> set[str]:
    return {node["inputs"]["image"] for node in graph.values() if node["class_type"] == "LoadImage"}


@contextmanager
def published_files(base: Path, graph: Graph) -> Iterator[None]:
    """What a graph names, as sparse files with headers of the published sizes."""
    with _files(base, graph, _published):
        yield


@contextmanager
def small_files(base: Path, graph: Graph) -> Iterator[None]:
    """What a graph names, as models that run in seconds: the micro model's parts, or where the
    text encoder is to see images a narrower one with random weights, whose encoder can.
    """
    sees = any(node["class_type"] == SEES for node in graph.values())
    # The micro text encoder's own tokenizer is looked for beside the folder of its weights.
    tokenizer = base / "models" / "tokenizer"
    if not tokenizer.exists():
        tokenizer.symlink_to(MICRO / "tokenizer", target_is_directory=True)
    with _files(base, graph, _seeing_parts if sees else _micro_parts):
        yield


@contextmanager
def _files(base: Path, graph: Graph, make: Callable[[Path, str], None]) -> Iterator[None]:
    """Links files into `base` that are made once, as new as if they were made now: no run finds
    what an earlier one loaded.
    """
    store = base / "made" / make.__name__
    links = []
    for folder, name in sorted(models_named(graph)):
        kind = _kind(folder, name)
        made = store / f"{kind}.safetensors"
        if not made.exists():
            made.parent.mkdir(parents=True, exist_ok=True)
            make(made, kind)
        links.append((made, base / "models" / folder / name))
    for name in sorted(images_named(graph)):
        made = store / "pictures" / name
        if not made.exists():
            made.parent.mkdir(parents=True, exist_ok=True)
            picture(name).save(made)
        links.append((made, base / "input" / name))
    for made, link in links:
        link.parent.mkdir(parents=True, exist_ok=True)
        os.utime(made)
        os.link(made, link)
    try:
        yield
    finally:
        for _, link in links:
            link.unlink()


def _kind(folder: str, name: str) -> str:
    """What a file is to hold, from where it lies and what its name says."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if folder in ("loras", "vae"):
        return f"layered_{folder}" if "layered" in words else folder
    if folder == "controlnet":
        return folder
    if folder == "text_encoders":
        return f"text_encoder_{'fp8' if 'fp8' in words else 'bf16'}"
    family = "edit_2511" if {"edit", "2511"} <= words else "text_to_image"
    family = "layered" if "layered" in words else family
    return f"{family}_{'fp8' if 'fp8' in words else 'bf16'}"


def picture(name: str) -> Image.Image:
    """A picture with a hole, another for each name."""
    red, green, blue = zlib.crc32(name.encode()).to_bytes(4, "big")[:3]
    image = Image.new("RGBA", IMAGE_SIDES, (red, green, blue, 255))
    draw = ImageDraw.Draw(image)
    for step in range(0, IMAGE_SIDES[0], 8):
        draw.line((step, 0, 255 - step, IMAGE_SIDES[1]), (step, 200 - step // 2, blue, 255), 3)
    draw.rectangle((HOLE[0], HOLE[1], HOLE[2] - 1, HOLE[3] - 1), (10, 20, 30, 0))
    return image


# --- headers of the published sizes


@functools.cache
def _text_encoder_shapes() -> dict[str, tuple[int, ...]]:
    return {
        text_encoder_name_to_native(name): tuple(shape)
        for name, shape in published_shapes().items()
    }


@functools.cache
def _vae_shapes(channels: int = 3) -> dict[str, tuple[int, ...]]:
    with init_empty_weights():
        vae = AutoencoderKLQwenImage(input_channels=channels)
    return {vae_name_to_native(name): tuple(w.shape) for name, w in vae.state_dict().items()}


def _published(path: Path, kind: str) -> None:
    """A header that could be the published file's, and a hole instead of the weights."""
    if kind in SMALL:
        SMALL[kind](path)
        return
    if kind.startswith("text_encoder"):
        shapes = _text_encoder_shapes()
    else:
        shapes = _vae_shapes(4 if "layered" in kind else 3)
        if not kind.endswith("vae"):
            layered = kind.startswith("layered")
            shapes = replace(PUBLISHED, addition_t_cond=layered).tensors()
    # On `meta` nothing has values.
    tensors = {n: torch.empty(s, dtype=torch.bfloat16, device="meta") for n, s in shapes.items()}
    tensors = _stored(tensors, kind)
    specs = {name: (NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    layout = SafetensorsLayout(specs, {"format": "pt"})
    with path.open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.file_bytes)


def _stored(tensors: Tensors, kind: str) -> Tensors:
    if kind == "text_encoder_fp8":
        tensors = narrow_text_encoder.scaled_fp8(tensors)
    elif kind.endswith("_fp8"):
        tensors = narrow_text_encoder.unscaled_fp8(tensors)
    if kind.startswith("edit_2511"):
        tensors = {**tensors, MARKER_2511: torch.empty(0)}
    if kind == "layered_bf16" and ADDITION not in tensors:
        width = len(tensors["img_in.bias"])
        tensors = {**tensors, ADDITION: torch.zeros(2, width, dtype=torch.bfloat16)}
    return tensors


# --- models that run


def _micro_parts(path: Path, kind: str) -> None:
    if kind in SMALL:
        SMALL[kind](path)
    elif kind.endswith("vae"):
        vae = _micro("vae")
        save_file(_with_alpha(vae) if kind.startswith("layered") else vae, path)
    elif kind.startswith("text_encoder"):
        save_file(_stored(_micro("text_encoder"), kind), path)
    else:
        narrow_transformer.write(path, _stored(_micro("transformer"), kind))


def _with_alpha(vae: Tensors) -> Tensors:
    """A VAE with Layered's fourth channel: it counts nothing on the way in, and is half opaque."""
    into, out = vae["encoder.conv_in.weight"], vae["decoder.conv_out.weight"]
    bias = vae["decoder.conv_out.bias"]
    return vae | {
        "encoder.conv_in.weight": torch.cat([into, torch.zeros_like(into[:, :1])], dim=1),
        "decoder.conv_out.weight": torch.cat([out, torch.zeros_like(out[:1])]),
        "decoder.conv_out.bias": torch.cat([bias, torch.zeros_like(bias[:1])]),
    }


def _seeing_parts(path: Path, kind: str) -> None:
    if kind.startswith("text_encoder"):
        save_file(_stored(narrow_text_encoder.weights(), kind) | _vision_tower(), path)
    elif kind in ("loras", "vae"):
        _micro_parts(path, kind)
    else:
        narrow_transformer.write(path, _stored(narrow_transformer.weights(), kind))


def _micro(part: str) -> Tensors:
    (file,) = (MICRO / part).glob("*.safetensors")
    return load_file(file)


def _vision_tower() -> Tensors:
    """The published tower with fewer and narrower blocks: what ComfyUI builds beside
    workflow_nodes.py.
    """
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, shape in _text_encoder_shapes().items():
        block = re.match(r"visual\.blocks\.(\d+)\.", name)
        if not name.startswith("visual.") or (block and int(block[1]) >= VISION_BLOCKS):
            continue
        # The merger ends in the language model's width, and an MLP's is between its layers.
        ends = narrow_text_encoder.HIDDEN if name.startswith("visual.merger.mlp.2.") else shape[0]
        shape = tuple({3420: VISION_MLP}.get(size, size) for size in (ends, *shape[1:]))
        weight = torch.randn(shape, generator=generator)
        weight *= shape[1] ** -0.5 if len(shape) == 2 else 0.02
        found[name] = (weight + ("norm" in name or "ln_q" in name)).bfloat16()
    return found


def write_lora(path: Path) -> None:
    """A LoRA in the keys of the published Lightning files, for a transformer 128 wide."""
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {}
    for block in range(narrow_transformer.SHAPE.blocks):
        for name in ("to_q", "to_k", "to_v", "to_out.0"):
            layer = f"transformer_blocks.{block}.attn.{name}"
            tensors[f"{layer}.lora_down.weight"] = torch.randn(4, 128, generator=generator) * 0.01
            tensors[f"{layer}.lora_up.weight"] = torch.randn(128, 4, generator=generator) * 0.01
            tensors[f"{layer}.alpha"] = torch.tensor(4.0)
    save_file(tensors, path)


def write_control(path: Path) -> None:
    """A ControlNet in the keys of Qwen-Image-2512-Fun-Controlnet-Union, of the micro model's first
    block: what it adds is little, and depends on the picture.
    """
    generator = torch.Generator().manual_seed(0)
    first = "transformer_blocks.0."
    block = {n.removeprefix(first): w for n, w in _micro("transformer").items() if first in n}
    width = narrow_transformer.SHAPE.dim
    layers = {"control_img_in": torch.randn(width, 4 * CONTROL_CHANNELS, generator=generator) * 0.1}
    layers["control_blocks.0.before_proj"] = torch.randn(width, width, generator=generator) * 0.1
    tensors: Tensors = {}
    for index in range(CONTROL_BLOCKS):
        layers[f"control_blocks.{index}.after_proj"] = torch.eye(width) * 0.02
        tensors |= {f"control_blocks.{index}.{name}": w.clone() for name, w in block.items()}
    for layer, weight in layers.items():
        tensors[f"{layer}.weight"] = weight
        tensors[f"{layer}.bias"] = torch.zeros(width)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, path)


SMALL = {"loras": write_lora, "controlnet": write_control}  # in every test


# Boxes of the page, in its units.

TITLE = 30  # above a node's position, as the page draws it


class Box(NamedTuple):
    x: int
    y: int
    width: int
    height: int


def overlap(one, other):
    ends = ((box.x, box.x + box.width, box.y, box.y + box.height) for box in (one, other))
    (left, right, top, bottom), (its_left, its_right, its_top, its_bottom) = ends
    return left < its_right and its_left < right and top < its_bottom and its_top < bottom
