"""One forward pass of diffusers' Qwen-Image whose blocks the executor runs.

diffusers' own loop over the blocks stays, with ControlNet's residuals between them. For the
length of one call each block's `forward` is replaced by one that takes the same arguments, or hands
them to diffusers' own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ...loaders.tensor_checks import is_finite
from ...optimizations.attention import aligned_mask
from ...optimizations.block import BlockExecutor, Step
from ...optimizations.fused import Ops
from ...optimizations.hardware import first_line
from ...optimizations.modulation import Entry
from ...optimizations.streams import Tokens
from .arguments import SHARED, STREAMS, UnfitError, joint_mask_of, rotary_of, zero_from_of
from .attention import HostAttention, TransformerAttention, backend_of
from .layers import DiffusersLayers
from .prepared import Call, Prepared, processor_of

Streams = tuple[torch.Tensor, torch.Tensor]


class Shared(NamedTuple):
    """What the blocks of a pass have in common.

    Attributes:
        arguments: What it was made of, in the order of `SHARED`.
        step: As the executor takes it.
        entry: The modulation of every block.
    """

    arguments: tuple[Any, ...]
    step: Step
    entry: Entry


class ForwardPass:
    """The blocks of one call of the transformer.

    Args:
        prepared: What is known of them.
        ops: The kernels.
        attention: The attention.
        call: What the transformer was called with.
        begin: Called with the first block's arguments, before their modulation is read.
        across_borders: Whether nothing but the loop itself stands between two blocks.

    Attributes:
        layers: The layers that ran.
        fused: How many blocks the executor ran.
        others: Why diffusers' own ran, and how many.
    """

    def __init__(
        self,
        prepared: Prepared,
        ops: Ops,
        attention: TransformerAttention,
        call: Call,
        begin: Callable[[Call, dict[str, Any]], None],
        across_borders: bool,
    ) -> None:
        self._prepared = prepared
        self._ops = ops
        self._call = call
        self._begin = begin
        self._across_borders = across_borders
        self._processor = processor_of(prepared.blocks[0])
        self._host_attention = HostAttention(self._processor)
        self._attention = attention
        self.layers = DiffusersLayers()
        attend = attention.for_pass(self._processor, self._host_attention)
        self._executor = BlockExecutor(self.layers, ops, attend)
        self._shared: Shared | None = None
        self.fused = 0
        self.others: Counter[str] = Counter()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Puts the executor into the blocks, and takes it out again."""
        blocks = self._prepared.blocks
        try:
            for index, block in enumerate(blocks):
                # Not through Module.__setattr__, which costs as much as a launch.
                block.__dict__["forward"] = _Bound(self, index, block)
            yield
        finally:
            for block in blocks:
                block.__dict__.pop("forward", None)

    def run(self, index: int, block: torch.nn.Module, arguments: dict[str, Any]) -> Streams:
        """One block; arguments and result are those of diffusers' block."""
        try:
            self._require(block, arguments["hidden_states"].dtype)
            shared = self._read(arguments)
            check = self._prepared.check  # the first block of a run may have renewed it
            if check.failed:
                raise UnfitError(check.failed)
        except UnfitError as reason:
            self.others[str(reason)] += 1
            return host_forward(block, arguments)
        image, text = (arguments[name] for name in STREAMS)
        step, halves = shared.step, shared.entry.of(index)
        following = self._following(index, image.dtype, shared)
        operands = block, text, image, step, halves, following
        masked = step.mask is not None
        self.fused += 1
        if self.fused > 1 or not check.wanted(step.tokens, masked):
            return self._executor.run(*operands)
        expected = host_forward(block, arguments)
        try:
            result = self._executor.run(*operands)
            if not all(map(is_finite, result)) and self._attention.may_be_wrong:
                # Is it the attention or another kernel?
                host = BlockExecutor(DiffusersLayers(), self._ops, self._host_attention.attend)
                result = host.run(*operands)
                if all(map(is_finite, result)):
                    self._attention.give_up()
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # compilers, drivers and packages raise anything
            check.fail(f"the fused block raised {first_line(error)}")
        else:
            if check.passes((text, image), result, expected, step.tokens, masked):
                return result
        self.fused -= 1
        self.others[check.failed] += 1
        return expected

    def _require(self, block: torch.nn.Module, dtype: torch.dtype) -> None:
        reason = self._prepared.misfit(block, dtype)
        if not reason and backend_of(processor_of(block)) != backend_of(self._processor):
            reason = "its attention backend is not that of the first block"
        if reason:
            raise UnfitError(reason)

    def _following(
        self, index: int, dtype: torch.dtype, shared: Shared
    ) -> tuple[torch.nn.Module, Any] | None:
        """The next block and its modulation, where the executor runs it right after this one."""
        blocks = self._prepared.blocks
        if not self._across_borders or index + 1 == len(blocks):
            return None
        try:
            self._require(blocks[index + 1], dtype)
        except UnfitError:
            return None
        return blocks[index + 1], shared.entry.of(index + 1)[0]

    def _read(self, arguments: dict[str, Any]) -> Shared:
        """What a block's arguments say; read once, and again where one has been exchanged."""
        given = tuple(arguments.get(name) for name in SHARED)
        shared = self._shared
        if shared is None or any(
            ours is not theirs for ours, theirs in zip(shared.arguments, given, strict=True)
        ):
            if arguments.keys() - {*SHARED, *STREAMS}:
                unknown = ", ".join(sorted(arguments.keys() - {*SHARED, *STREAMS}))
                raise UnfitError(f"its argument {unknown} is not known here")
            shared = Shared(given, *self._understand(arguments))
            self._shared = shared
        return shared

    def _understand(self, arguments: dict[str, Any]) -> tuple[Step, Entry]:
        image, text = (arguments[name] for name in STREAMS)
        embedding, index = arguments["temb"], arguments.get("modulate_index")
        batch = len(image)
        if len(text) != batch or image.dtype != text.dtype:
            raise UnfitError("text and image differ in batch or dtype")
        rows = batch if index is None else 2 * batch
        if embedding.dim() != 2 or len(embedding) != rows:
            raise UnfitError(f"{len(embedding)} timestep embeddings where {rows} belong")
        zero_from = image.shape[1] if index is None else zero_from_of(index, image)
        tokens = Tokens(batch, text.shape[1], image.shape[1], zero_from)
        rotary = rotary_of(arguments.get("image_rotary_emb"), tokens)
        mask = joint_mask_of(arguments, tokens)
        self._host_attention.mask = mask
        if mask is not None:
            scores = torch.zeros(mask.shape, dtype=image.dtype, device=image.device)
            mask = aligned_mask(scores.masked_fill_(~mask, float("-inf")))
        if self._shared is None:
            self._begin(self._call, arguments)
        return Step(tokens, rotary, mask), self._prepared.entry(embedding, batch)


class _Bound:
    """The `forward` of one block during one call."""

    __slots__ = ("_block", "_index", "_pass")

    def __init__(self, forward_pass: ForwardPass, index: int, block: torch.nn.Module) -> None:
        self._pass, self._index, self._block = forward_pass, index, block

    def __call__(self, *positional: Any, **arguments: Any) -> Streams:
        if positional or not all(name in arguments for name in STREAMS):
            return type(self._block).forward(self._block, *positional, **arguments)
        return self._pass.run(self._index, self._block, arguments)


def host_forward(block: torch.nn.Module, arguments: dict[str, Any]) -> Streams:
    """The block's own forward: text and image."""
    return type(block).forward(block, **arguments)
