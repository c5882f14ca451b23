"""Qwen-Image in ComfyUI: 1.x, and 2.1, which it has since 0.37."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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
from ...optimizations.blocks.attend import Segment
from ...optimizations.blocks.block import Step
from ...optimizations.blocks.host import BlockInputs, PrefixedStream, Streams
from ...optimizations.blocks.workspace import Prefix
from ...optimizations.reference import Rotary, Tokens
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


@cached
def is_known() -> bool:
    return contract.is_known(
        (CODE, "QwenImage21Transformer2DModel._forward"),
        (CODE, "QwenImage21TransformerBlock.forward"),
        BLOCK_ARGUMENTS,
    )


class PrefixedComfyPass(PrefixedStream, ComfyPass):
    """One call, whose blocks read ComfyUI's prefix cache, fill it, or run without it.

    Where they do not read it, text, references and image are rows of one stream in segments: a text
    segment is causal, an image's reads all up to its own end. The executor gets the rows of the
    image first, and those behind are modulated as at timestep 0.
    """

    names = BLOCK_ARGUMENTS
    streams, shared = ("x", "mod"), ("pe",)
    additions = ()
    masked = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.peers = ()  # other cards have no part in a pass
        self._fills = False
        self._shift = 0  # rows before those of the image, where both are given
        # ComfyUI's tensor and the executor's with the same rows: of the input, of the last output.
        self._watched = False
        self._given: tuple[torch.Tensor, torch.Tensor] | None = None
        self._made: tuple[torch.Tensor, torch.Tensor] | None = None
        self._put: torch.nn.Module | None = None  # whose keys ComfyUI's own block has put away
        self._slot: Any = None  # of the prefix cache
        self._prefixes: Sequence[Prefix] | None = None

    def fallback(self) -> Verdict | None:
        return super().fallback() or (None if is_known() else OTHER_MODEL)

    def no_graphs(self) -> Verdict | None:
        # Where the cache is filled or moves, nobody knows what later blocks read.
        if self._fills:
            return FILLS
        if not self._shift and self.prefixes is None:
            return NOT_READ
        return super().no_graphs()

    def inputs(
        self, block: torch.nn.Module, positional: tuple, arguments: dict[str, Any]
    ) -> BlockInputs | Verdict | None:
        if positional or arguments.keys() != ARGUMENTS:
            return OTHER_ARGUMENTS
        self._options, self._block = arguments["transformer_options"], block
        self._shift, bound = 0, self._segments_of(arguments)
        if bound is None:
            return super().inputs(block, positional, arguments)
        comfy.ops.run_every_op()
        (x, mod, pe), before = map(arguments.get, ("x", "mod", "pe")), arguments["prefix_len"]
        batch, rows, _ = x.shape
        self._fills, self._shift = before == rows, before % rows
        tokens, segments = Tokens(batch, 0, rows, rows - before), bound.pop("segments")
        make = partial(self.new_step, tokens, x, pe, segments)
        step = self.kept_step((pe,), (tokens, x.dtype, segments), make)
        if self._fills:
            step = step._replace(keep=partial(self._keep, **bound))
        patches, replaced = (self._options.get(it, {}) for it in ("patches", "patches_replace"))
        self._watched = bool(patches.get("single_block") or replaced.get("dit"))
        if self._made is not None and x is self._made[0]:
            image, self._given = self._made[1], None
        else:
            image = self._turned(x, -1)
            self._given = None if self._watched else (x, image)
        return BlockInputs(image[:, :0], image, mod, step, self._watched)

    def _turned(self, x: torch.Tensor, way: int) -> torch.Tensor:
        """Has the image's rows first, or last again."""
        return x.roll(way * self._shift, 1) if self._shift else x

    def _keep(self, keys: torch.Tensor, values: torch.Tensor, cache: Any, block_index: int) -> None:
        if self._block is not self._put:
            cache.put(block_index, torch.stack([keys, values], 1))

    def output(self, streams: Streams) -> torch.Tensor:
        image = super().output(streams)
        if not self._shift:
            return image
        if self._given is not None and image is self._given[1]:  # of a graph, but the last block's
            return self._given[0]
        x = self._turned(image, 1)
        self._made = None if self._watched else (x, image)
        return x

    def host_block(self, block: torch.nn.Module, arguments: dict[str, Any]) -> Streams:
        text, image = super().host_block(block, arguments)
        self._put = block
        return text, self._turned(image, -1)

    def unchanged(
        self,
        index: int,
        positional: tuple,
        arguments: dict[str, Any],
        inputs: tuple[torch.Tensor, torch.Tensor, object],
    ) -> bool:
        if not self._shift:
            return super().unchanged(index, positional, arguments, inputs)
        same = arguments.get("x") is self._given[0] and arguments.get("mod") is inputs[2]
        return not positional and same and self._segments_of(arguments) is not None

    def beside(
        self, block: torch.nn.Module, positional: tuple, arguments: dict[str, Any]
    ) -> Prefix | Verdict:
        comfy.ops.run_every_op()
        return self.prefix_of(arguments) or OTHER_ARGUMENTS

    def prefix_of(self, arguments: dict[str, Any]) -> Prefix | None:
        """Reads what ComfyUI's `prefix_cached_attention` has bound; None of others."""
        # Calling it would join them with those of the image in new tensors.
        bound = _bound(arguments["attn_fn"], "prefix_cached_attention")
        if not {"prefix_k", "prefix_v"} <= bound.keys() or arguments["prefix_len"]:
            return None
        return Prefix(bound["prefix_k"], bound["prefix_v"])

    def _segments_of(self, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """Reads what ComfyUI's `block_causal_attention` has bound: the segments, those of the image
        first, and the cache with the place to fill; None of others.
        """
        bound = _bound(arguments["attn_fn"], "block_causal_attention")
        before, rows = arguments["prefix_len"], arguments["x"].shape[1]
        known = {"segments", "cache", "block_index"} <= bound.keys()
        if not (known and before and (bound["cache"] is not None) == (before == rows)):
            return None
        image, places = rows - before, []
        for start, stop, mask in bound["segments"]:
            if start == before:
                places.insert(0, Segment(0, image, 0, rows, mask is not None))
            else:
                places.append(
                    Segment(start + image, stop + image, image, stop + image, mask is not None)
                )
        return {
            "segments": tuple(places),
            "cache": bound["cache"],
            "block_index": bound["block_index"],
        }

    def new_step(self, tokens: Tokens, image: torch.Tensor, *shared: Any) -> Step:
        pe, *segments = shared
        rotary = rotary_of(pe.transpose(1, 2))
        rotary = Rotary(*(self._turned(part, -1) for part in rotary))
        return Step(tokens, rotary, None, segments=segments[0] if segments else ())

    @property
    def prefixes(self) -> Sequence[Prefix] | None:
        """Of ComfyUI's prefix cache, where it lies on the card as it is read."""
        cache = None if self._shift else self.owner.diffusion_model.prefix_cache
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
        return [
            torch.cat([target, zero.expand_as(target)]).squeeze(1) for zero, target in embedding[:4]
        ]


def _bound(attend: Any, maker: str) -> dict[str, Any]:
    """Reads what a function of ComfyUI has bound in the one that it gives; nothing of others."""
    code = getattr(attend, "__code__", None)
    if code is None or not attend.__qualname__.startswith(f"{maker}."):
        return {}
    cells = (cell.cell_contents for cell in attend.__closure__)
    return dict(zip(code.co_freevars, cells, strict=True))


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
