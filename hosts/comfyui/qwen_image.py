"""Qwen-Image in ComfyUI: 1.x, and 2.1, which it has since 0.37."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import comfy.model_base
import comfy.ops
import comfy.supported_models
import torch
from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

from ...caches import cached
from ...families.comfyui import ModelKind
from ...families.qwen_image import QWEN_IMAGE, QwenImageShape
from ...families.qwen_image_21 import QWEN_IMAGE_21, QwenImage21Shape
from ...optimizations.blocks.block import Step
from ...optimizations.blocks.host import PrefixedStream
from ...optimizations.blocks.workspace import Prefix
from ...optimizations.reference import Tokens
from ...verdict import Verdict
from . import contract
from .sample.forward import OTHER_ARGUMENTS, ComfyPass, rotary_of

TIMESTEP_ZERO = "index_timestep_zero"  # how Edit-2511 has its references modulated


def settings_of(transformer: torch.nn.Module) -> dict[str, Any]:
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


KIND = ModelKind(
    family=QWEN_IMAGE,
    base=comfy.model_base.QwenImage,
    transformer=QwenImageTransformer2DModel,
    config=comfy.supported_models.QwenImage,
    shape=_shape,
    takes=attrgetter("txt_in.in_features", "out_channels"),
    settings=settings_of,
    timestep_zero=lambda transformer: transformer.default_ref_method == TIMESTEP_ZERO,
    passes=ComfyPass,
    embed=lambda transformer, *given: transformer.time_text_embed(*given),
)


# 2.1

CODE = QWEN_IMAGE_21.comfyui_code
# What ComfyUI's loop gives a block, by place.
BLOCK_ARGUMENTS = ("x", "mod", "pe", "attn_fn", "prefix_len", "transformer_options")
ARGUMENTS = set(BLOCK_ARGUMENTS)
FILLS = Verdict("ComfyUI fills its prefix cache")
NOT_READ = Verdict("ComfyUI's prefix cache is in host memory or in 8 or 4 bits")
OTHER_MODEL = Verdict("this ComfyUI calls its Qwen-Image-2.1 in a way that is unknown here")
NO_PREFIX_CACHE = Verdict(
    "ComfyUI's prefix cache is off: a node switches it off, hooks into the blocks, or leaves it no "
    "memory"
)


@cached
def is_known() -> bool:
    return contract.is_known(
        (CODE, "QwenImage21Transformer2DModel._forward"),
        (CODE, "QwenImage21TransformerBlock.forward"),
        BLOCK_ARGUMENTS,
    )


class PrefixedComfyPass(PrefixedStream, ComfyPass):
    """One call, whose blocks read ComfyUI's prefix cache. What fills it is ComfyUI's own."""

    names = BLOCK_ARGUMENTS
    streams, shared = ("x", "mod"), ("pe",)
    additions = ()
    masked = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.peers = ()  # other cards have no part in a pass
        self._fills = False
        self._slot: Any = None  # of the prefix cache
        self._prefixes: Sequence[Prefix] | None = None

    def fallback(self) -> Verdict | None:
        return super().fallback() or (None if is_known() else OTHER_MODEL)

    def no_graphs(self) -> Verdict | None:
        # Where the cache is filled or moves, nobody knows what later blocks read.
        if self._fills:
            return FILLS
        if self.prefixes is None:
            return NOT_READ
        return super().no_graphs()

    def beside(
        self, block: torch.nn.Module, positional: tuple, arguments: dict[str, Any]
    ) -> Prefix | Verdict | None:
        if positional or arguments.keys() != ARGUMENTS:
            return OTHER_ARGUMENTS
        if before := arguments["prefix_len"]:
            self._fills = before == arguments["x"].shape[1]
            return None if self._fills else NO_PREFIX_CACHE
        prefix = self.prefix_of(arguments)
        if prefix is None:
            return NO_PREFIX_CACHE
        self._options, self._block = arguments["transformer_options"], block
        comfy.ops.run_every_op()
        return prefix

    def prefix_of(self, arguments: dict[str, Any]) -> Prefix | None:
        """Reads what ComfyUI's `prefix_cached_attention` has bound; None of others."""
        # Calling it would join them with those of the image in new tensors.
        attend = arguments["attn_fn"]
        code = getattr(attend, "__code__", None)
        if code is None or not attend.__qualname__.startswith("prefix_cached_attention."):
            return None
        bound = dict(zip(code.co_freevars, attend.__closure__, strict=True))
        if not {"prefix_k", "prefix_v"} <= bound.keys():
            return None
        return Prefix(bound["prefix_k"].cell_contents, bound["prefix_v"].cell_contents)

    def new_step(self, tokens: Tokens, image: torch.Tensor, *shared: Any) -> Step:
        return Step(tokens, rotary_of(shared[0].transpose(1, 2)), None)

    @property
    def prefixes(self) -> Sequence[Prefix] | None:
        """Of ComfyUI's prefix cache, where it lies on the card as it is read."""
        cache = self.owner.diffusion_model.prefix_cache
        try:
            # A pack may call the transformer with several prompts, each of which has a slot.
            if self._slot is cache.slot and self._prefixes is not None:
                return self._prefixes
            self._slot, self._prefixes = cache.slot, None
            blocks = cache.slot["blocks"]
            if cache.dtype == "default" and cache.store_device == self.device:
                self._prefixes = [Prefix(*blocks[i].unbind(1)) for i in range(len(self.blocks))]
        except (AttributeError, KeyError, TypeError):  # it is off, or another
            return None
        return self._prefixes

    def parts_of(self, embedding: Any) -> Sequence[torch.Tensor]:
        """Reads ComfyUI's (zero, target) of each; of the gates it gives tanh."""
        return [target.squeeze(1) for _, target in embedding[:4]]


def _shape_21(transformer: torch.nn.Module) -> QwenImage21Shape:
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
        passes=PrefixedComfyPass,
    )


KIND_21 = _kind_21()
