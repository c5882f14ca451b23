"""Whether the running ComfyUI is one that this package knows, checked once.

ComfyUI has no frozen internal interface. What the loaders call is listed here with the parameters
that they use, so that a change upstream is one sentence to the user instead of a traceback.
"""

from __future__ import annotations

import importlib
import inspect
from functools import lru_cache

from ...optimizations.software import COMFYUI_FLOOR, release

# (module, name, parameters that are passed); an empty set asks only that the name is there.
CALLED: tuple[tuple[str, str, frozenset[str]], ...] = (
    ("comfy.ops", "mixed_precision_ops", frozenset({"quant_config", "compute_dtype"})),
    (
        "comfy.ops",
        "cast_bias_weight",
        frozenset({"s", "input", "offloadable", "compute_dtype", "want_requant"}),
    ),
    ("comfy.ops", "CastBiasWeightContext", frozenset()),
    ("comfy.ops", "run_every_op", frozenset()),
    ("comfy.quant_ops", "QuantizedLayout", frozenset()),
    ("comfy.quant_ops", "register_layout_class", frozenset({"name", "cls"})),
    ("comfy.supported_models", "QwenImage", frozenset({"unet_config"})),
    (
        "comfy.model_base",
        "BaseModel.load_model_weights",
        frozenset({"sd", "unet_prefix", "assign"}),
    ),
    ("comfy.model_detection", "detect_unet_config", frozenset({"state_dict", "key_prefix"})),
    (
        "comfy.model_management",
        "unet_dtype",
        frozenset({"model_params", "supported_dtypes", "weight_dtype"}),
    ),
    ("comfy.model_management", "unet_manual_cast", frozenset()),
    ("comfy.model_patcher", "CoreModelPatcher", frozenset({"load_device", "offload_device"})),
    ("comfy.patcher_extension", "WrappersMP.APPLY_MODEL", frozenset()),
    ("comfy.utils", "load_torch_file", frozenset({"ckpt"})),
    ("comfy.sd", "VAE", frozenset({"sd", "dtype"})),
    ("comfy.sd", "CLIP", frozenset({"target", "tokenizer_data", "model_options"})),
)


@lru_cache(maxsize=1)
def what_is_off() -> str | None:
    """One sentence when this ComfyUI is too old or not as expected; None when all is well."""
    floor = ".".join(map(str, COMFYUI_FLOOR))
    try:
        found = importlib.import_module("comfyui_version").__version__
    except (ImportError, AttributeError):
        return f"this ComfyUI does not tell its version: Qwen-Image L40S needs {floor} or newer."
    if release(found) < COMFYUI_FLOOR:
        return f"ComfyUI is {found} and Qwen-Image L40S needs {floor} or newer: update ComfyUI."
    for module, name, parameters in CALLED:
        fault = _fault(module, name, parameters)
        if fault:
            return (
                f"ComfyUI {found} {fault}, which Qwen-Image L40S calls: update Qwen-Image L40S, "
                "and until then use ComfyUI's own loaders."
            )
    return None


def _fault(module: str, name: str, parameters: frozenset[str]) -> str | None:
    try:
        target = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError):
        return f"has no {module}.{name}"
    if not parameters:
        return None
    known = inspect.signature(target).parameters
    missing = sorted(parameters - known.keys())
    return f"has no parameter {missing[0]!r} in {module}.{name}" if missing else None
