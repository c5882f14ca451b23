"""Lists what ComfyUI has of each family: classes, and where a transformer has its sizes. The code
that runs a family is imported with its first call: to ask what a MODEL is takes nothing else of
ComfyUI.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import comfy.model_base
import comfy.supported_models
from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

from ...families.comfyui import ModelKind, later
from ...families.qwen_image import QWEN_IMAGE, QwenImageShape
from ...families.qwen_image_21 import QWEN_IMAGE_21, QwenImage21Shape

TIMESTEP_ZERO = "index_timestep_zero"  # how Edit-2511 has its references modulated


def settings_of(transformer: Any) -> dict[str, Any]:
    """Returns what `families.qwen_image.rope_axes` needs of a file."""
    return {"axes_dims_rope": list(transformer.pe_embedder.axes_dim)}


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


RUNS = ".hosts.comfyui.qwen_image:"

KIND = ModelKind(
    family=QWEN_IMAGE,
    base=comfy.model_base.QwenImage,
    transformer=QwenImageTransformer2DModel,
    config=comfy.supported_models.QwenImage,
    shape=_shape,
    takes=attrgetter("txt_in.in_features", "out_channels"),
    settings=settings_of,
    timestep_zero=lambda transformer: transformer.default_ref_method == TIMESTEP_ZERO,
    passes=later(RUNS + "ComfyPass"),
    embed=lambda transformer, *given: transformer.time_text_embed(*given),
    add_negative=later(RUNS + "join_negative"),
)


def _shape_21(transformer: Any) -> QwenImage21Shape:
    blocks, dim = transformer.transformer_blocks, transformer.inner_dim
    heads = blocks[0].attn.heads
    return QwenImage21Shape(
        blocks=len(blocks),
        dim=dim,
        heads=heads,
        head_dim=dim // heads,
        joint_dim=transformer.txt_in.in_layer.in_features,
        in_channels=transformer.img_in.in_features,
        packed_out_channels=transformer.proj_out.out_features,
        fused_mlp=hasattr(blocks[0].img_mlp, "gate_up"),
        mlp_ratio=blocks[0].img_mlp.out.in_features // dim,
    )


def _kind_21() -> ModelKind | None:
    base = getattr(comfy.model_base, QWEN_IMAGE_21.comfyui_class, None)
    if base is None:
        return None
    from comfy.ldm.qwen_image21.model import QwenImage21Transformer2DModel

    return ModelKind(
        family=QWEN_IMAGE_21,
        base=base,
        transformer=QwenImage21Transformer2DModel,
        config=comfy.supported_models.QwenImage21,
        shape=_shape_21,
        takes=attrgetter("txt_in.in_layer.in_features", "img_in.in_features"),
        settings=settings_of,
        passes=later(RUNS + "PrefixedComfyPass"),
        add_negative=later(RUNS + "keep_negative"),
    )


KIND_21 = _kind_21()
