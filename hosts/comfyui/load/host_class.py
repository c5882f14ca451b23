"""Which of ComfyUI's classes a transformer is built with, and in what sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.model_detection
import comfy.supported_models
import torch

from ....errors import CheckpointError, UnavailableError
from ....loaders.convert import check_complete
from ....loaders.source import Source
from ....spec.transformer import NEEDS_21, SingleStreamShape, TransformerShape

# {form of the sizes: ComfyUI's configuration class}
CLASSES = {TransformerShape: "QwenImage", SingleStreamShape: "QwenImage21"}


def host_shape(source: Source) -> TransformerShape:
    """A transformer's sizes as ComfyUI builds it: gate and up in one weight.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
        UnavailableError: this ComfyUI is older than the model.
    """
    shape = check_complete(source)
    if not isinstance(shape, SingleStreamShape):
        return shape
    require_21(source.path)
    return replace(shape, fused_mlp=True)


def require_21(path: Path) -> None:
    """Raises UnavailableError where this ComfyUI is older than Qwen-Image-2.1."""
    if not hasattr(comfy.supported_models, CLASSES[SingleStreamShape]):
        raise UnavailableError(f"{NEEDS_21}, and this one is older: update ComfyUI.", path)


def model_config(
    source: Source, shape: TransformerShape, tensors: Mapping[str, torch.Tensor]
) -> comfy.supported_models.BASE:
    """What ComfyUI detects itself, completed by the sizes that it takes for granted.

    Args:
        tensors: what is loaded, by name.
    """
    sizes: dict[str, Any] = comfy.model_detection.detect_unet_config(tensors, "")
    if not isinstance(shape, SingleStreamShape):  # of which it reads all
        sizes.update(
            num_attention_heads=shape.heads,
            attention_head_dim=shape.head_dim,
            joint_attention_dim=shape.joint_dim,
            out_channels=shape.packed_out_channels // 4,
        )
    sizes.update(_rope_axes(source, shape.head_dim))
    return getattr(comfy.supported_models, CLASSES[type(shape)])(sizes)


def _rope_axes(source: Source, head_dim: int) -> dict[str, tuple[int, ...]]:
    """The split of a head over time, height and width, which no tensor tells."""
    axes = source.config.get("axes_dims_rope")
    if axes is None and head_dim == 128:
        return {}  # the published models: ComfyUI's default
    if not isinstance(axes, list) or len(axes) != 3 or sum(axes) != head_dim:
        raise CheckpointError(
            f"axes_dims_rope is {axes} in config.json and must be three numbers that add up to "
            f"{head_dim}: put the config.json of the model next to its weights.",
            source.path,
        )
    return {"axes_dims_rope": tuple(axes)}
