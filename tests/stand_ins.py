"""Model files that are a header before a hole, and a stand-in for ComfyUI where loads are planned.

For `tools/grid.py`; the package must be importable before this module is.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from qwen_l40s.families.qwen_image import FULL_SIZE, LAYERED_SHAPE
from qwen_l40s.families.qwen_image_21 import SHAPE as SHAPE_21
from qwen_l40s.loaders.sizes import CheckpointSizes, read_sizes
from qwen_l40s.loaders.source import Source, bundled_micro_folder, open_source
from qwen_l40s.loaders.writer import SafetensorsLayout
from qwen_l40s.planning.rates import Rates
from qwen_l40s.planning.request import OtherModel, Parts
from qwen_l40s.spec.formats import GIB, CardFacts

BESIDE = (OtherModel("qwen-image-2.1", "int8"), OtherModel("qwen-image-edit-2511", "bf16"))
PARTS = (
    Parts(text_encoder_bytes=9 * GIB, file_bytes=(("text encoder", 9 * GIB), ("VAE", 254_000_000))),
    Parts(transformer_bytes=27 * GIB, modulation_bytes=12 * GIB, vae_bytes=300_000_000),
    Parts(transformer_bytes=20 * GIB, modulation_bytes=7 * GIB, packed=(11 * GIB, 4 * GIB)),
)
# What a calibration could have measured.
MEASURED = Rates({"bf16": 2.1e14, "int8": 4e14}, 1.6e14, 7e11, 1.1e14, 3.7e13, 2.4e10, 2.2e9)
SHAPES = {
    **{"full": FULL_SIZE, "2511": FULL_SIZE, "pruned": replace(FULL_SIZE, blocks=38)},
    **{"layered": LAYERED_SHAPE, "2.1": SHAPE_21, "fused": replace(SHAPE_21, fused_mlp=True)},
}
# {form: (type of the layers that are quantized, of all others, what a marker says)}
FORMS = {
    "bf16": ("BF16", "BF16", None),
    "fp16": ("F16", "F16", None),
    "fp32": ("F32", "F32", None),
    "fp8": ("F8_E4M3", "BF16", None),
    "e5m2": ("F8_E5M2", "BF16", None),
    "rows": ("F8_E4M3", "BF16", {"format": "float8_e4m3fn_rowwise"}),
    "int8": ("I8", "BF16", {"format": "int8_tensorwise", "convrot": True}),
    "w4a8": ("I8", "BF16", {"format": "asym_w4a8_int8", "convrot_groupsize": 256}),
}
# Of a shape and a form, and the bundled models.
FILES = (
    *(f"full {form}" for form in FORMS),
    *("2511 bf16", "2511 int8", "pruned bf16", "layered bf16", "layered fp8", "layered int8"),
    *("2.1 bf16", "2.1 int8", "2.1 w4a8", "fused bf16", "fused fp8", "fused int8"),
    *("micro 1.x", "micro 2.1"),
)


@cache
def opened(file: str, folder: Path) -> tuple[Source, CheckpointSizes]:
    """Opens one of `FILES`, which is written into a folder."""
    name, form = file.split()
    if name == "micro":
        path = bundled_micro_folder(form)
    else:
        path = folder / f"{file}.safetensors"
        layout = layout_of(name, *FORMS[form])
        path.write_bytes(layout.header)
        os.truncate(path, layout.file_bytes)
    return open_source(path, "transformer"), read_sizes(path)


def layout_of(name: str, dtype: str, other: str, marker: dict[str, Any] | None):
    layers, specs = SHAPES[name].quantizable_layers(), {}
    for tensor, size in SHAPES[name].tensors().items():
        layer = tensor.removesuffix(".weight")
        if layer == tensor or layer not in layers:
            specs[tensor] = other, size
            continue
        rows, columns = size
        specs[tensor] = dtype, size
        if marker:
            specs[f"{layer}.weight_scale"] = "F32", (rows, 1)
        if marker and "w4a8" in marker["format"]:
            specs[tensor] = dtype, (rows, columns // 2)
            specs[f"{layer}.weight_s_rel"] = "F8_E4M3", (rows, columns // 16)
    if name == "2511":
        specs["__index_timestep_zero__"] = "F32", (0,)
    about = {"layers": dict.fromkeys(layers, marker) if marker else {}}
    return SafetensorsLayout(specs, {"_quantization_metadata": json.dumps(about)})


def planned_in_comfyui(
    source: Source,
    keep: Sequence[str],
    precision: str,
    place: str,
    *,
    card: CardFacts | None,
    memory: int,
    dynamic: bool,
    state: str,
) -> tuple[Any, list[int]]:
    """What the loader in ComfyUI plans of a file, and the bytes of host memory that it asks for.

    Args:
        memory: GiB that are available.
        dynamic: whether ComfyUI has dynamic VRAM.
        state: "high" as of `--highvram`.
    """
    (host, comfy), needed = _planner_without_comfyui(), []
    host.card_facts, host.available_memory = lambda device: card, lambda: memory * GIB
    host.check_host_memory = lambda count, what: needed.append(count)
    comfy.memory_management.aimdo_enabled = dynamic
    comfy.model_management.vram_state = state
    return host.plan_load(source, precision, keep, place), needed


@cache
def _planner_without_comfyui() -> tuple[Any, Any]:
    """The module and what it finds in the place of ComfyUI, as whoever imports it later does."""
    comfy = sys.modules["comfy"] = ModuleType("comfy")
    parts = ("model_detection", "supported_models", "memory_management", "model_management")
    for name in (*parts, "quant_ops"):
        sys.modules[f"comfy.{name}"] = ModuleType(f"comfy.{name}")
        setattr(comfy, name, sys.modules[f"comfy.{name}"])
    comfy.quant_ops.QUANT_ALGOS = {"asym_w4a8_int8": None}
    comfy.supported_models.QwenImage21 = None
    comfy.model_management.get_torch_device = lambda: None
    comfy.model_management.VRAMState = SimpleNamespace(HIGH_VRAM="high")
    from qwen_l40s.hosts.comfyui.load import plan

    return plan, comfy
