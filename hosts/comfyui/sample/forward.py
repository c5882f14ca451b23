"""One forward pass of ComfyUI's Qwen-Image whose blocks the executor runs.

ComfyUI's own loop over the blocks stays: it calls each block, and what other nodes do between two
blocks or around one happens as ever. For the length of one call each block's `forward` is replaced
by one that has the host's arguments, or hands them to the host's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import comfy.ops
import torch

from ....loaders.convert import is_finite
from ....machine.card import first_line
from ....optimizations.block import BlockExecutor, Step
from ....optimizations.fused import Ops
from ....optimizations.modulation import Entry, compute_entry
from ....optimizations.reference import Modulation, Rotary, Tokens
from ....optimizations.self_check import Check
from .attention import SLOT, SlotAttention, host_attention, without_choice
from .layers import ComfyLayers

Streams = tuple[torch.Tensor, torch.Tensor]
# What ComfyUI's loop gives a block, all by name.
ARGUMENTS = {
    "hidden_states",
    "encoder_hidden_states",
    "encoder_hidden_states_mask",
    "temb",
    "image_rotary_emb",
    "timestep_zero_index",
    "transformer_options",
}


class ForwardPass:
    """The blocks of one call of the diffusion model.

    Args:
        blocks: ComfyUI's blocks, in order.
        ops: The kernels.
        attention: What computes attention as long as it is in ComfyUI's slot; None for whatever is.
        modulation: Gives the modulation of all blocks for a timestep embedding.
        check: Compares the first block with the host's own.
        across_borders: Whether the caller puts nothing between two blocks; patches are looked for.
    """

    def __init__(
        self,
        blocks: Sequence[torch.nn.Module],
        ops: Ops,
        attention: SlotAttention | None,
        modulation: Callable[[torch.Tensor], Entry],
        check: Check,
        across_borders: bool,
    ) -> None:
        self._blocks = blocks
        self._executor = BlockExecutor(ComfyLayers(), ops, self._attend)
        self._attention = attention
        self._options: dict[str, Any] = {}  # of the block that runs
        self._modulation = modulation
        self._check = check
        self._across_borders = across_borders
        self._entry: Entry | None = None
        self._embedding: torch.Tensor | None = None
        self._rotation: tuple[torch.Tensor, Rotary] | None = None
        self._masked: tuple[torch.Tensor, torch.Tensor] | None = None
        self.fused, self.blocks = 0, len(blocks)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Puts the executor into the blocks, and takes it out again."""
        try:
            for index, block in enumerate(self._blocks):
                # Not through Module.__setattr__, which costs as much as a launch.
                block.__dict__["forward"] = _Bound(self, index, block)
            yield
        finally:
            for block in self._blocks:
                block.__dict__.pop("forward", None)

    def run(self, index: int, block: torch.nn.Module, arguments: dict[str, Any]) -> Streams:
        """One block; arguments and result are those of ComfyUI's block."""
        self._options = options = arguments["transformer_options"]
        patches = options.get("patches", {})
        if self._check.failed or patches.get("attn1_patch"):
            return host_forward(block, arguments)
        image, text = arguments["hidden_states"], arguments["encoder_hidden_states"]
        embedding, zero = arguments["temb"], arguments["timestep_zero_index"]
        batch = len(image)
        zero_from = image.shape[1] if zero is None else zero
        tokens = Tokens(batch, text.shape[1], image.shape[1], zero_from)
        halves = self._halves(index, block, embedding, batch)
        following = None
        watched = patches.get("double_block") or options.get("patches_replace", {}).get("dit")
        if self._across_borders and not watched and index + 1 < len(self._blocks):
            after = self._blocks[index + 1]
            following = after, self._entry.of(index + 1)[0]
        mask = self._mask(arguments["encoder_hidden_states_mask"], tokens, image.dtype)
        step = Step(tokens, self._rotary(arguments["image_rotary_emb"]), mask)
        comfy.ops.run_every_op()
        self.fused += 1
        masked = mask is not None
        if index > 0 or not self._check.wanted(tokens, masked):
            return self._executor.run(block, text, image, step, halves, following)
        own = without_choice(options)
        expected = host_forward(block, {**arguments, "transformer_options": own})
        try:
            result = self._first(block, text, image, step, halves, following)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers, drivers and packages raise anything
            self._check.fail(f"the fused block raised {first_line(error)}")
        else:
            if self._check.passes((text, image), result, expected, step.tokens, masked):
                return result
        self.fused = 0
        return expected

    def _first(self, *operands: Any) -> Streams:
        """The block that is compared, once more with another attention where it gives NaN."""
        result = self._executor.run(*operands)
        if all(map(is_finite, result)) or not self._chosen:
            return result
        self._attention.give_up()
        return self._executor.run(*operands)

    @property
    def _chosen(self) -> bool:
        """Whether ComfyUI's slot holds this package's attention, and it works."""
        held = self._options.get(SLOT)
        return held is not None and held is self._attention and not held.broken

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        if self._chosen:
            return self._attention.attend(q, k, v, mask)
        return host_attention(q, k, v, mask, self._options)

    def _halves(
        self,
        index: int,
        block: torch.nn.Module,
        embedding: torch.Tensor,
        batch: int,
    ) -> tuple[Modulation, Modulation]:
        if self._entry is None:
            self._embedding = embedding
            self._entry = self._modulation(embedding)
        if embedding is not self._embedding:  # another node has changed it for this block
            return compute_entry((block,), embedding, batch).of(0)
        return self._entry.of(index)

    def _rotary(self, matrices: torch.Tensor) -> Rotary:
        """From ComfyUI's (batch, 1, joint, head_dim / 2, 2, 2) of [[cos, -sin], [sin, cos]]."""
        if self._rotation is None or self._rotation[0] is not matrices:
            cos, sin = matrices[:, 0, :, :, 0, 0], matrices[:, 0, :, :, 1, 0]
            self._rotation = matrices, Rotary(cos.contiguous(), sin.contiguous())
        return self._rotation[1]

    def _mask(
        self, text_mask: torch.Tensor | None, tokens: Tokens, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """From what ComfyUI adds to the scores of the text tokens, (batch, text)."""
        if text_mask is None:
            return None
        if self._masked is None or self._masked[0] is not text_mask:
            mask = text_mask.new_zeros((tokens.batch, 1, 1, tokens.joint), dtype=dtype)
            mask[:, 0, 0, : tokens.text] = text_mask
            self._masked = text_mask, mask
        return self._masked[1]


class _Bound:
    """The `forward` of one block during one call."""

    __slots__ = ("_block", "_index", "_pass")

    def __init__(self, forward_pass: ForwardPass, index: int, block: torch.nn.Module) -> None:
        self._pass, self._index, self._block = forward_pass, index, block

    def __call__(self, *positional: Any, **arguments: Any) -> Streams:
        if positional or arguments.keys() != ARGUMENTS or arguments["image_rotary_emb"] is None:
            # Another ComfyUI than the one that the executor was written for.
            return type(self._block).forward(self._block, *positional, **arguments)
        return self._pass.run(self._index, self._block, arguments)


def host_forward(block: torch.nn.Module, arguments: dict[str, Any]) -> Streams:
    """The block's own forward: text and image."""
    return type(block).forward(block, **arguments)
