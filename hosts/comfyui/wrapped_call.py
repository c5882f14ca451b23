"""What an APPLY_MODEL wrapper finds in the call that it wraps."""

from __future__ import annotations

from typing import Any

# The places of `control` and `transformer_options` behind x and t, in BaseModel.apply_model.
CONTROL, OPTIONS = 2, 3
COMPILED = "torch.compile"  # the key of comfy_api.torch_helpers


def is_compiled(options: dict[str, Any]) -> bool:
    """Whether TorchCompileModel puts a compiled model in the place of the one that is called.

    Args:
        options: transformer_options.
    """
    return bool(options.get("wrappers", {}).get("apply_model", {}).get(COMPILED))
