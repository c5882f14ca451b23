"""Whether the running ComfyUI is one that this package knows, checked once.

ComfyUI has no frozen internal interface. What this package hooks into or replaces is listed here
with the parameters that it relies on, so that a change upstream is one sentence to the user instead
of a wrong picture or a traceback. What is only imported and called needs no list.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from functools import lru_cache

from ...machine.comfyui import COMFYUI_FLOOR
from ...machine.packages import release
from ...optimizations.fallback import Fallback

# {module: {name: parameters that are passed or read}}; without parameters only the name is looked
# for.
HOOKS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    # The places that the wrappers stand in, and what they are called with.
    "comfy.patcher_extension": {
        "WrappersMP.OUTER_SAMPLE": (),
        "WrappersMP.PREDICT_NOISE": (),
        "WrappersMP.APPLY_MODEL": (),
        "CallbacksMP.ON_DETACH": (),
    },
    "comfy.model_base": {
        "BaseModel.apply_model": (
            *("x", "t", "c_concat", "c_crossattn", "control", "transformer_options"),
        ),
    },
    "comfy.samplers": {"CFGGuider.predict_noise": ()},
    # What the executor runs in place of, and the attention that it hands over to.
    "comfy.ldm.qwen_image.model": {
        "QwenImageTransformerBlock.forward": (
            *("hidden_states", "encoder_hidden_states", "encoder_hidden_states_mask", "temb"),
            *("image_rotary_emb", "timestep_zero_index", "transformer_options"),
        ),
    },
    "comfy.ldm.modules.attention": {
        "optimized_attention_masked": ("q", "k", "v", "heads", "mask", "skip_reshape"),
    },
    # How weights come to the card, with patches and quantized.
    "comfy.ops": {
        "CastBiasWeightContext": (),
        "cast_bias_weight": ("s", "input", "offloadable", "compute_dtype", "want_requant"),
        "mixed_precision_ops": ("quant_config", "compute_dtype"),
    },
    "comfy.quant_ops": {
        "QuantizedTensor": ("qdata", "layout_cls", "params"),
        "register_layout_class": ("name", "cls"),
    },
    # Methods that off-card weights, LoRA files and the plan of a decode replace or call into.
    "comfy.model_patcher": {
        "ModelPatcher._load_list": ("for_dynamic", "default_device"),
        "ModelPatcher.patch_weight_to_device": ("key", "device_to", "return_weight"),
    },
    "comfy.model_management": {
        "free_memory": ("memory_required", "device", "keep_loaded"),
    },
    "comfy.lora": {"load_lora": ("lora", "to_load", "log_missing")},
    "comfy.sd": {"VAE.decode": ("samples_in",), "VAE.encode": ("pixel_samples",)},
}


@lru_cache(maxsize=1)
def unsupported_host() -> Fallback | None:
    """Why nothing of this package runs in this ComfyUI, in one sentence; None when all is well."""
    floor = ".".join(map(str, COMFYUI_FLOOR))
    try:
        found = importlib.import_module("comfyui_version").__version__
    except (ImportError, AttributeError):
        return Fallback(
            f"this ComfyUI does not give its version: Qwen-Image L40S needs {floor} or newer.",
            final=True,
        )
    if release(found) < COMFYUI_FLOOR:
        return Fallback(
            f"ComfyUI is {found} and Qwen-Image L40S needs {floor} or newer: update ComfyUI.",
            final=True,
        )
    for module, names in HOOKS.items():
        for name, parameters in names.items():
            if fault := _fault(module, name, parameters):
                return Fallback(
                    f"ComfyUI {found} {fault}, which Qwen-Image L40S calls: update Qwen-Image "
                    "L40S, and until then use ComfyUI's own loaders.",
                    final=True,
                )
    return None


def _fault(module: str, name: str, parameters: tuple[str, ...]) -> str | None:
    try:
        target = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError):
        return f"has no {module}.{name}"
    if not parameters:
        return None
    if not callable(target):
        return f"has {module}.{name} as a {type(target).__name__}"
    known = inspect.signature(target).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return None
    missing = [parameter for parameter in parameters if parameter not in known]
    return f"has no parameter {missing[0]!r} in {module}.{name}" if missing else None
