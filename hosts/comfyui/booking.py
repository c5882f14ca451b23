"""Tells ComfyUI what a step of the model needs, so that it moves nothing off the card for nothing.

Without dynamic VRAM ComfyUI books a tenth more than the weights it is about to load, 2.5 GiB for a
transformer in bf16, and besides that twice what it guesses for a step. On a card where transformer,
text encoder and a step fit by some hundred MiB, a part of the text encoder then leaves.
"""

from __future__ import annotations

import weakref
from typing import Any

import comfy.model_management
import torch

# ComfyUI guesses 1.8, which is 576 MiB for one 1024x1024 image in bf16; the whole step, with the
# workspaces of its kernels, took 0.35 GiB there and 0.58 at 1328x1328 (NVIDIA H200).
STEP_FACTOR = 1.1
BOOKED_BESIDE = 0.1


def book_what_is_needed(model: Any, weights: int, device: torch.device) -> None:
    """Has a BaseModel's `memory_required` leave out what is booked for a step already.

    Only where weights and a step fit what is free: there the tenth is never used. Elsewhere ComfyUI
    gets the whole figure, by which it also decides how much of the model it loads.

    Args:
        weights: bytes that ComfyUI loads of the model.
        device: where it loads them.
    """
    model.memory_usage_factor = STEP_FACTOR
    held = weakref.ref(model)

    def memory_required(*args: Any, **kwargs: Any) -> float:
        model = held()
        needed = type(model).memory_required(model, *args, **kwargs)
        if model.model_loaded_weight_memory:
            return needed
        free = comfy.model_management.get_free_memory(device)
        fits = weights + needed + comfy.model_management.minimum_inference_memory() <= free
        return max(0.0, needed - BOOKED_BESIDE * weights) if fits else needed

    model.memory_required = memory_required
