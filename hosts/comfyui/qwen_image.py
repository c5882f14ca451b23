"""Qwen-Image 1.x in ComfyUI."""

from __future__ import annotations

from typing import Any

import comfy.model_base
import comfy.supported_models
import torch
from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

from ...errors import CheckpointError
from ...families.comfyui import ModelKind
from ...families.qwen_image import QWEN_IMAGE, QwenImageShape
from ...loaders.source import Source
from .sample.forward import ComfyPass

TIMESTEP_ZERO = "index_timestep_zero"  # how Edit-2511 has its references modulated


def rope_axes(source: Source, head_dim: int) -> dict[str, tuple[int, ...]]:
    """Says how a head is split over time, height and width, which no tensor tells.

    Raises:
        CheckpointError: the settings of the weights do not, or not rightly.
    """
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


def settings_of(transformer: torch.nn.Module) -> dict[str, Any]:
    """Returns what `rope_axes` needs of a file."""
    return {"axes_dims_rope": list(transformer.pe_embedder.axes_dim)}


def _config_sizes(shape: QwenImageShape, source: Source) -> dict[str, Any]:
    # Which ComfyUI takes for granted.
    return rope_axes(source, shape.head_dim) | {
        "num_attention_heads": shape.heads,
        "attention_head_dim": shape.head_dim,
        "joint_attention_dim": shape.joint_dim,
        "out_channels": shape.packed_out_channels // 4,
    }


def _shape(transformer: QwenImageTransformer2DModel) -> QwenImageShape:
    blocks = transformer.transformer_blocks
    return QwenImageShape(
        blocks=len(blocks),
        dim=transformer.inner_dim,
        heads=blocks[0].attn.heads,
        head_dim=blocks[0].attn.dim_head,
        joint_dim=transformer.txt_in.in_features,
        in_channels=transformer.in_channels,
        packed_out_channels=transformer.proj_out.out_features,
        addition_t_cond=hasattr(transformer.time_text_embed, "addition_t_embedding"),
    )


KIND = ModelKind(
    family=QWEN_IMAGE,
    base=comfy.model_base.QwenImage,
    transformer=QwenImageTransformer2DModel,
    config=comfy.supported_models.QwenImage,
    config_sizes=_config_sizes,
    shape=_shape,
    takes=lambda it: (it.txt_in.in_features, it.in_channels // QwenImageShape.patch**2),
    settings=settings_of,
    timestep_zero=lambda transformer: transformer.default_ref_method == TIMESTEP_ZERO,
    passes=ComfyPass,
    embed=lambda transformer, *given: transformer.time_text_embed(*given),
)
