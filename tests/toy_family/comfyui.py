"""What the package is told of it in ComfyUI."""

from __future__ import annotations

from typing import Any

import comfy.ops
import torch

from qwen_l40s.families.comfyui import ModelKind
from qwen_l40s.hosts.comfyui.sample.forward import OTHER_ARGUMENTS, ComfyPass, rotary_of
from qwen_l40s.optimizations.blocks.block import Step
from qwen_l40s.optimizations.blocks.host import BlockInputs
from qwen_l40s.optimizations.modulation import Entry
from qwen_l40s.optimizations.reference import Tokens

from .family import TOY, ToyShape
from .model import ToyConfig, ToyImage, ToyTransformer

ARGUMENTS = ("x", "words", "modulation", "rotation", "transformer_options")


class ToyPass(ComfyPass):
    """One call: its blocks get text and image as rows of one tensor."""

    names = ARGUMENTS
    additions = ()
    _rows = _parts = None

    def inputs(self, block: torch.nn.Module, positional: tuple, arguments: dict[str, Any]) -> Any:
        if positional or arguments.keys() != set(ARGUMENTS):
            return OTHER_ARGUMENTS
        x, words, modulation, rotation, self._options = map(arguments.get, ARGUMENTS)
        self._block = block
        # What the block before gave, joined for the host: its parts are known.
        text, image = self._parts if x is self._rows else (x[:, :words], x[:, words:])
        tokens = Tokens(len(x), words, x.shape[1] - words, x.shape[1] - words)
        make = lambda: Step(tokens, rotary_of(rotation), None)  # noqa: E731
        step = self.kept_step((rotation,), tokens, make)
        comfy.ops.run_every_op()
        return BlockInputs(text, image, modulation, step, False)

    def output(self, streams: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        self._parts, self._rows = streams, torch.cat(streams, 1)
        return self._rows

    def unchanged(self, index: int, positional: tuple, arguments: Any, inputs: Any) -> bool:
        return not positional and arguments["x"] is self._rows

    def entry(self, embedding: torch.Tensor, batch: int) -> Entry:
        rows = embedding.expand(len(self.blocks), batch, -1)
        return Entry(rows, rows)

    def host_block(self, block: torch.nn.Module, arguments: dict[str, Any]) -> Any:
        words = arguments["words"]
        out = type(block).forward(block, **arguments)
        return out[:, :words], out[:, words:]


def _shape(transformer: ToyTransformer) -> ToyShape:
    block, dim = transformer.layers[0], transformer.patch.out_features
    return ToyShape(
        blocks=len(transformer.layers),
        dim=dim,
        heads=block.attention.heads,
        head_dim=dim // block.attention.heads,
        joint_dim=transformer.caption.in_features,
        in_channels=transformer.patch.in_features,
        packed_out_channels=transformer.unpatch.out_features,
        ratio=block.feed_forward.down.in_features // dim,
    )


KIND = ModelKind(
    family=TOY,
    base=ToyImage,
    transformer=ToyTransformer,
    config=ToyConfig,
    shape=_shape,
    takes=lambda it: (it.caption.in_features, it.patch.in_features // ToyShape.patch**2),
    settings=lambda transformer: {},
    passes=ToyPass,
)
