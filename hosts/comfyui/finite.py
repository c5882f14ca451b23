"""Notices NaN and infinity at a model's first step, and names where they come from.

Reading 40 GB only to look for them would cost a load's time again, and under dynamic VRAM weights
are not read before they are used. One synchronization at the first step costs nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from comfy.quant_ops import QuantizedTensor

from ...errors import CheckpointError, UnavailableError
from ...loaders.tensor_checks import is_finite
from .off_card import named_weights

KEY = "qwen_l40s_finite"


def check_first_step(patcher: ModelPatcher, path: Path) -> None:
    """Adds the check to a freshly loaded model; its clones share it, so it runs once a load."""
    checked = False

    def wrapper(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal checked
        output = executor(x, *args, **kwargs)
        if not checked and is_finite(x):
            if not is_finite(output):
                _refuse(executor.class_obj.diffusion_model, path)
            checked = True
        return output

    patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, wrapper)


def _refuse(module: torch.nn.Module, path: Path) -> None:
    for name, weight in named_weights(module):
        quantized = isinstance(weight, QuantizedTensor)
        held = (weight._qdata, weight._params.scale) if quantized else (weight.detach(),)
        if not all(map(is_finite, held)):
            raise CheckpointError(
                f"{path} holds NaN or infinity in the tensor {name!r}: download the file again."
            )
    raise UnavailableError(
        f"{path} gave NaN or infinity at its first step although its weights are finite: an "
        "attention kernel, a LoRA or another node's patch is at fault, so run once without them."
    )
