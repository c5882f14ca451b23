"""Writes a Qwen2.5-VL that is 64 wide, with the published vocabulary, in the forms people have.

Used inside ComfyUI's Python too, so it imports torch and safetensors only.
"""

from __future__ import annotations

import contextlib
import functools
import json
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file

HIDDEN, LAYERS, MLP, HEADS, VOCABULARY = 64, 2, 128, 4, 152_064
QKV = HEADS * 128
# What ComfyUI's own loader has to be told; it takes the rest for granted.
CONFIG = {
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
Tensors = dict[str, torch.Tensor]


def weights() -> Tensors:
    """The language model in flat names, bf16."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).bfloat16()

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return random(rows, columns, scale=columns**-0.5)

    found = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN),
        "model.norm.weight": 1 + random(HIDDEN, scale=0.1),
    }
    for layer in (f"model.layers.{index}" for index in range(LAYERS)):
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}.{name}.weight"] = 1 + random(HIDDEN, scale=0.1)
        for name in ("q", "k", "v"):
            found[f"{layer}.self_attn.{name}_proj.weight"] = matrix(QKV, HIDDEN)
            found[f"{layer}.self_attn.{name}_proj.bias"] = random(QKV, scale=0.1)
        found[f"{layer}.self_attn.o_proj.weight"] = matrix(HIDDEN, QKV)
        found[f"{layer}.mlp.gate_proj.weight"] = matrix(MLP, HIDDEN)
        found[f"{layer}.mlp.up_proj.weight"] = matrix(MLP, HIDDEN)
        found[f"{layer}.mlp.down_proj.weight"] = matrix(HIDDEN, MLP)
    return found


def linear_layers(tensors: Tensors) -> list[str]:
    return [
        name.removesuffix(".weight")
        for name in tensors
        if name.endswith("_proj.weight") and tensors[name].dim() == 2
    ]


def nested(tensors: Tensors) -> Tensors:
    return {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}


def toy_tower(prefix: str) -> Tensors:
    """A vision tower of another width than ComfyUI's, and a head: both are left out."""
    return {
        f"{prefix}.patch_embed.proj.weight": torch.zeros(32, 3, 2, 14, 14),
        f"{prefix}.blocks.0.norm1.weight": torch.zeros(32),
        "lm_head.weight": torch.zeros(VOCABULARY, 1),
    }


def marker(settings: dict) -> torch.Tensor:
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


def scaled_fp8(tensors: Tensors) -> Tensors:
    """As `qwen_2.5_vl_7b_fp8_scaled` is: one scale a tensor, and a marker for all."""
    found = {**tensors, "scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)}
    for layer in linear_layers(tensors):
        weight = tensors[f"{layer}.weight"].float()
        scale = weight.abs().amax() / 448
        found[f"{layer}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        found[f"{layer}.scale_weight"] = scale
        found[f"{layer}.scale_input"] = torch.ones(())
    return found


def unscaled_fp8(tensors: Tensors, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensors:
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def _rows(tensors: Tensors, dtype: torch.dtype, largest: int) -> Tensors:
    found = dict(tensors)
    for layer in linear_layers(tensors):
        weight = tensors[f"{layer}.weight"].float()
        scale = weight.abs().amax(dim=1, keepdim=True) / largest
        values = weight / scale
        found[f"{layer}.weight"] = (values if largest > 127 else values.round()).to(dtype)
        found[f"{layer}.weight_scale"] = scale
    return found


def int8_rows(tensors: Tensors, settings: dict | None) -> Tensors:
    """Writes one scale a row; `settings` go into every `.comfy_quant`, which None leaves out."""
    found = _rows(tensors, torch.int8, 127)
    if settings is not None:
        found |= {f"{layer}.comfy_quant": marker(settings) for layer in linear_layers(tensors)}
    return found


def fp8_rows(tensors: Tensors) -> Tensors:
    """Writes one scale a row, a form that ComfyUI's layers do not have."""
    return _rows(tensors, torch.float8_e4m3fn, 448)


def write(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path, metadata)
    return path


def write_shards(folder: Path, tensors: Tensors) -> Path:
    """Two shards and their index, as transformers writes them."""
    names = sorted(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    weight_map = {}
    for number, half in enumerate(halves, 1):
        shard = f"model-{number:05}-of-00002.safetensors"
        write(folder / shard, {name: tensors[name] for name in half})
        weight_map |= dict.fromkeys(half, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


# Of 2.1's text encoder, for `small`.
TEXT_21 = {"hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": 3}
TEXT_21 |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def small() -> contextlib.ExitStack:
    """Makes ComfyUI's encoders of fewer and narrower layers until it is closed."""
    from comfy.text_encoders import llama, qwen_image

    tower = partial(llama.qwen_vl.Qwen2VLVisionTransformer, num_layers=2, intermediate_size=64)
    read = functools.lru_cache(qwen_image.Qwen2Tokenizer.from_pretrained)
    patches = [
        mock.patch.object(llama.qwen_vl, "Qwen2VLVisionTransformer", tower),
        mock.patch.object(qwen_image.Qwen2Tokenizer, "from_pretrained", read),
    ]
    if hasattr(llama, "Qwen3VL_8BConfig"):
        from comfy.text_encoders import qwen3vl

        config = partial(llama.Qwen3VL_8BConfig, **TEXT_21)
        vision = {"hidden_size": 64, "intermediate_size": 64, "depth": 2}
        vision |= {"deepstack_visual_indexes": [0, 1]}
        configs = {"qwen3vl_8b": lambda **given: config(**given)}
        patches += [
            mock.patch.dict(qwen3vl.QWEN3VL_CONFIGS, configs),
            mock.patch.dict(qwen3vl.QWEN3VL_VISION, {"qwen3vl_8b": vision}),
        ]
    stack = contextlib.ExitStack()
    for patch in patches:
        stack.enter_context(patch)
    return stack


def random_like(model: torch.nn.Module) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, weight in model.state_dict().items():
        value = torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5
        found[name] = (value if weight.dim() > 1 else 1 + 0.1 * value).bfloat16()
    return found


def weights_21() -> Tensors:
    from comfy.text_encoders.qwen3vl import Qwen3VL

    return random_like(Qwen3VL({}, torch.bfloat16, "meta", torch.nn))
