"""Runs the blocks of Qwen-Image with few kernels, on either host's module.

It computes what a block's own `forward` does, in bf16 with 16 launches, 12 of them GEMMs. In stock
ComfyUI 44 of the 170 ms of a pass are memory traffic between the GEMMs (H200, 1024x1024).

- Both streams are rows of one matrix, so that each step between two GEMMs is one kernel for both.
- Gate, residual, the next LayerNorm and its modulation are one kernel, across the border between
  two blocks as well, which also quantizes for all layers that follow.
- q, k and v are written into the joint buffers of attention, normalized and rotated in place.
- GELU and SwiGLU are in the GEMM's epilogue, or in the quantizer of what follows.

A block of Qwen-Image-2.1 is run as one whose text has no rows: without shift and bias, with SwiGLU,
and beside cached keys and values of text and references, or with their rows behind the image's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from ...families.registry import spec_of
from ...spec.formats import RowFormat
from ...verdict import Verdict
from ..fused import Ops
from ..linear import Gemm
from ..modulation import Entry, Halves
from ..reference import Modulation, QKNorm, Rotary, Tokens
from .attend import Attend, BlockGuidance, Segment, attend_parts
from .block_form import (
    ATTENTION_OUT,
    DENSE,
    IMAGE_LAST,
    MLP_IN,
    MLP_OUT,
    QKV,
    BlockForm,
    LayerForm,
    LowRank,
    heads_of,
    part_of,
    quantized_form,
)
from .products import Operand, PackedOperand, PackedWeight, Share, merged_product, streams_of
from .workspace import Prefix, Program, Workspace


class LayerTensors(NamedTuple):
    """The tensors of a linear layer on the card, for one product."""

    # (N, K), in the dtype of the activations, or quantized, in 4 or 6 bits too
    weight: torch.Tensor | PackedWeight
    scale: torch.Tensor | None  # (N, 1), fp32; None for a weight that is not quantized
    bias: torch.Tensor | None  # (N,), or None

    def third(self, part: int | None) -> LayerTensors:
        """Gives the rows of q, k or v of a layer that makes all three; itself for None."""
        return self if part is None else LayerTensors(*(third(it, part) for it in self))


def third(tensor: torch.Tensor | PackedWeight | None, part: int | None) -> Any:
    """Gives one of three parts of a matrix's rows; the matrix itself for None."""
    if tensor is None or part is None:
        return tensor
    if isinstance(tensor, PackedWeight):
        codes, scale = third(tensor.codes, part), third(tensor.group_scale, part)
        return tensor._replace(codes=codes, group_scale=scale)
    return tensor.chunk(3)[part]


def run_third(module: torch.nn.Module, part: int | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Gives what computes one of three parts of a layer's columns; the layer itself for None."""
    return module if part is None else lambda x: module(x).chunk(3, -1)[part]


class Layers(Protocol):
    """A host's access to its layers."""

    def kind(self, layer: torch.nn.Module) -> str | RowFormat | None:
        """Returns `DENSE`, or the format of the rows that its quantized weight is multiplied with;
        None for a layer that has to run itself, such as one that another extension has wrapped.
        """

    def tensors(
        self, layer: torch.nn.Module, like: torch.Tensor
    ) -> AbstractContextManager[LayerTensors]:
        """Returns a layer's tensors for activations like these, as long as the context lasts."""

    def low_rank(self, layer: torch.nn.Module) -> LowRank | None:
        """Returns what LoRAs add beside a layer that does not run itself, on the card in the dtype
        of the activations; None without. Layers that read the same rows of one stream have one
        `down`.
        """

    def hold(self, blocks: Sequence[torch.nn.Module]) -> AbstractContextManager[Hashable | None]:
        """Holds the weights for one pass, as far as they can be held.

        The value is a token of where they are, or None where they may move, with the reason in
        `moving`. The same token: every tensor of the blocks' layers has the address and the layout
        that it had when the token was last seen. An out-of-memory error that leaves the context may
        be due to the held weights: the pass runs again without, and no other of the run holds them.
        """

    @property
    def moving(self) -> Verdict | None:
        """Why the last `hold` gave None; None where it gave a token."""

    def is_foreign(self, module: torch.nn.Module) -> bool:
        """Returns whether somebody else than this package has changed what a module computes."""

    def rounds(self, layer: torch.nn.Module) -> bool:
        """Returns whether a layer may round its activations to 8 bits: host and executor then
        differ by more than the order of their sums.
        """

    def norm_weight(self, norm: torch.nn.Module, like: torch.Tensor) -> torch.Tensor:
        """Returns the weight of an RMSNorm, where `like` is."""

    def gemm(self, format: str, device: torch.device) -> Gemm:
        """Returns the GEMM of weights in "fp8" or "int8"."""


class Step(NamedTuple):
    """What every block of one forward pass shares."""

    tokens: Tokens
    rotary: Rotary
    # added to the scores, (batch, 1, 1, keys) in the activations' dtype, or None
    mask: torch.Tensor | None
    prefix: Prefix | None = None  # what the block's attention reads besides; of this block alone
    segments: tuple[Segment, ...] = ()  # which tokens read which; empty where all read all
    # takes keys and values for the host to keep, as those of a `Prefix`; of this block
    keep: Callable[[torch.Tensor, torch.Tensor], None] | None = None
    guidance: BlockGuidance | None = None  # by a negative prompt, of `nag`; of this block

    @property
    def before(self) -> int:
        return 0 if self.prefix is None else self.prefix.keys.shape[1]


Multiply = Callable[[torch.Tensor], torch.Tensor]


class KnownBlock(NamedTuple):
    """What is known of a block, its layers in the order of `block_form.PLACES`."""

    # modules, head_norms: the host's layers, and the RMSNorms of a `QKNorm`
    modules: tuple[torch.nn.Module, ...]
    head_norms: tuple[torch.nn.Module, ...]
    form: BlockForm  # equal forms are the same object
    ups: tuple[torch.Tensor | None, ...]  # the second matrix of each layer's LoRAs, or None
    # the first matrices of text and image for those of `STAGES` that have LoRAs
    downs: Mapping[range, tuple[torch.Tensor | None, ...]]
    # of each layer, or its module where it runs itself; None where tensors may move
    operands: tuple[Operand | PackedOperand | Multiply, ...] | None = None
    norms: QKNorm | None = None  # of queries and keys; None where they may move


class _Carried(NamedTuple):
    """What a block leaves for the next one: its two results, the matrix behind them, the modulation
    that was announced, and the program whose first layers' input is written; None for none.
    """

    text: torch.Tensor
    image: torch.Tensor
    x: torch.Tensor
    norms: Modulation
    program: Program | None

    def continues(self, text: torch.Tensor, image: torch.Tensor, norms: Modulation) -> bool:
        """Returns whether a block gets these very tensors and the modulation that was announced."""
        return (
            (self.text is text or not text.numel())  # of 2.1 a new tensor each time
            and self.image is image
            and self.norms.text.data_ptr() == norms.text.data_ptr()
            and self.norms.image.data_ptr() == norms.image.data_ptr()
        )


class BlockExecutor:
    """Runs the blocks of one forward pass; it carries the streams from block to block.

    Args:
        workspace: Whose buffers no other pass uses meanwhile; None for one of its own.
        known: What was found of blocks whose tensors stay where they are, by block; is added to.
            None where they may move.
    """

    def __init__(
        self,
        layers: Layers,
        ops: Ops,
        attend: Attend,
        workspace: Workspace | None = None,
        known: dict[torch.nn.Module, KnownBlock] | None = None,
    ) -> None:
        self._layers = layers
        self._attend = attend
        self._workspace = workspace or Workspace(ops)
        self._held = known is not None
        self._blocks = {} if known is None else known
        self._programs: dict[tuple[int, Share], Program] = {}  # by the form's id
        self._carried: _Carried | None = None
        self._beside: torch.cuda.Stream | None = None  # where the text's products run

    def run(
        self,
        block: torch.nn.Module,
        text: torch.Tensor,
        image: torch.Tensor,
        step: Step,
        halves: Halves,
        following: tuple[torch.nn.Module, Modulation] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs one block.

        Args:
            text, image: (batch, tokens, D), any strides.
            following: The next block and its modulation of attention, where nothing reads or
                changes the streams on the way to it. Its first norm is then part of this block's
                last kernel, and the tensors that are returned change when it runs.

        Returns:
            text and image, new tensors of the same shapes.
        """
        attention, mlp = halves
        carried, self._carried = self._carried, None
        if carried and not carried.continues(text, image, attention):
            carried = None
        x = carried.x if carried else torch.cat([it.flatten(0, 1) for it in (text, image)])
        next_block, next_norms = following or (block, None)
        here, after = self.look(block, image), self.look(next_block, image)
        share = Share.all(step.tokens, step.before)
        program, next_program = self._both(here.form, after.form, share, x)
        if carried is None or carried.program is not program:
            program.begin(x, attention)
        if carried is None:
            text, image = streams_of(x, step.tokens)
        self._multiply(program, here, QKV)
        self.go_to_last(program, here, x, step, halves)
        self._multiply(program, here, MLP_OUT)
        if next_norms is None:
            program.end(x, mlp)
        else:
            program.go_on(x, mlp, next_norms, next_program)
            self._carried = _Carried(text, image, x, next_norms, next_program)
        return text, image

    def run_all(
        self,
        blocks: Sequence[torch.nn.Module],
        x: torch.Tensor,
        step: Step,
        entry: Entry,
        beside: torch.cuda.Stream | None = None,
        prefixes: Sequence[Prefix] | None = None,
    ) -> None:
        """Runs all blocks that nobody watches, in place.

        Args:
            x: Both streams in stream order, (rows, D), contiguous.
            beside: Another stream for the text's products, which leave most of a card idle.
        """
        self._beside = beside
        text, image = streams_of(x, step.tokens)
        self._carried = _Carried(text, image, x, entry.of(0).attention, None)
        try:
            for index, block in enumerate(blocks):
                after = None
                if index + 1 < len(blocks):
                    after = blocks[index + 1], entry.of(index + 1).attention
                if prefixes is not None:
                    step = step._replace(prefix=prefixes[index])
                text, image = self.run(block, text, image, step, entry.of(index), after)
        finally:  # the pass goes on where a capture fails
            self._beside = None
            for program in self._programs.values():
                program.mixed.let_go()

    def _both(
        self, form: BlockForm, after: BlockForm, share: Share, x: torch.Tensor
    ) -> tuple[Program, Program]:
        programs = self._programs
        while True:
            changes = self._workspace.changes
            for wanted in (form, after):
                if (id(wanted), share) not in programs:
                    programs[id(wanted), share] = self._workspace.program(wanted, share, x)
            if changes == self._workspace.changes:
                return programs[id(form), share], programs[id(after), share]
            programs.clear()

    def go_to_last(
        self,
        program: Program,
        here: KnownBlock,
        x: torch.Tensor,
        step: Step,
        halves: Halves,
    ) -> None:
        """Computes what the MLP's last layers read, from q, k and v."""
        attention, mlp = halves
        if step.prefix is not None:
            program.place(step.prefix)
        norms = here.norms or self._norms(here.head_norms, x)
        cut = step.segments or step.guidance
        program.rotate(norms, step.rotary)
        attend, (q, k, v) = self._attend, program.heads
        if step.keep is not None:
            step.keep(k, v)
        if cut:
            how = step.guidance, step.segments, program.ops.guided_rows
            attend = partial(attend_parts, attend, *how)
        program.mix(attend(q, k, v, step.mask))
        self._multiply(program, here, ATTENTION_OUT)
        program.middle(x, attention, mlp)
        self._multiply(program, here, MLP_IN)
        program.activate()

    def _multiply(self, program: Program, here: KnownBlock, stage: range) -> None:
        self.compute_low(program, here, stage)
        if self._beside is None:
            self.multiply(program, here, stage)
            return
        half, current = len(stage) // 2, torch.cuda.current_stream()
        self._beside.wait_stream(current)
        try:
            with torch.cuda.stream(self._beside):
                self.multiply(program, here, stage[half:])
            self.multiply(program, here, stage[:half])
        finally:  # a capture cannot end while a stream is not joined
            current.wait_stream(self._beside)

    def compute_low(self, program: Program, here: KnownBlock, stage: range) -> None:
        """Computes what the LoRAs of one of `STAGES` make of the rows that are there."""
        if here.downs and (downs := here.downs.get(stage)):
            program.compute_low(stage, downs)

    def multiply(self, program: Program, here: KnownBlock, places: Iterable[int]) -> None:
        """Runs the products of these places, for which `compute_low` has run."""
        products, operands = program.products, here.operands
        if operands is not None:
            for place in places:
                if (product := products[place]) is not None:
                    product(program.readable(place, operands[place]))
            return
        like = program.like
        for place in places:
            product = products[place]
            if product is None:
                continue
            module, form = here.modules[place], here.form.layers[place]
            part = here.form.spec.thirds[place]
            if form.kind is None:
                product(run_third(module, part))
                continue
            with self._layers.tensors(module, like) as tensors:
                if tensors.scale is None and form.kind != DENSE:
                    product = merged_product(program.reads[place], form.format)
                operand = Operand.of(*tensors.third(part), here.ups[place])
                product(program.readable(place, operand))

    def prepared(self, blocks: Sequence[torch.nn.Module]) -> bool:
        """Returns whether all that is asked of these blocks was found in an earlier pass."""
        return self._held and len(self._blocks) >= len(blocks)

    def replayable(self, blocks: Sequence[torch.nn.Module]) -> bool:
        """Returns whether no layer of these blocks runs itself, or is read anew each time."""
        known = filter(None, map(self._blocks.get, blocks))
        return not any(
            block.operands is None or any(layer.kind is None for layer in block.form.layers)
            for block in known
        )

    def look(self, block: torch.nn.Module, like: torch.Tensor) -> KnownBlock:
        found = self._blocks.get(block)
        if found is None:
            found = self._blocks[block] = self._look(block, like)
        return found

    def _look(self, block: torch.nn.Module, like: torch.Tensor) -> KnownBlock:
        spec = spec_of(block)
        modules = tuple(part_of(block, it) for it in spec.places)
        head_norms = tuple(part_of(block, it) for it in spec.qk_norms)
        parts = spec.thirds
        layers, lows = zip(
            *(self._form(*it, like.device) for it in zip(modules, parts, strict=True)), strict=True
        )
        ups = tuple(low and third(low.up, part) for low, part in zip(lows, parts, strict=True))
        inner = modules[IMAGE_LAST].in_features
        eps = part_of(block, spec.norms[0]).eps, head_norms[0].eps
        form = BlockForm(spec, layers, heads_of(block), inner, *eps)
        form = self._workspace.forms.setdefault(form, form)
        downs = {}
        for stage, readers in form.readers.items():
            found = [[lows[place].down for place in places if lows[place]] for places in readers]
            if any(found):
                downs[stage] = tuple(next(iter(them), None) for them in found)
        if not self._held:
            return KnownBlock(modules, head_norms, form, ups, downs)
        operands: list[Operand | PackedOperand | Multiply] = []
        for module, part, layer, up in zip(modules, parts, layers, ups, strict=True):
            if layer.kind is None:
                operands.append(run_third(module, part))
                continue
            with self._layers.tensors(module, like) as tensors:
                if (tensors.scale is None) != (layer.kind == DENSE):
                    return KnownBlock(modules, head_norms, form, ups, downs)
                operands.append(Operand.of(*tensors.third(part), up))
        norms = self._norms(head_norms, like)
        return KnownBlock(modules, head_norms, form, ups, downs, tuple(operands), norms)

    def _form(
        self, layer: Any, part: int | None, device: torch.device
    ) -> tuple[LayerForm, LowRank | None]:
        kind = self._layers.kind(layer)
        if kind is None:
            return LayerForm(None), None
        low = self._layers.low_rank(layer)
        beside = () if low is None else (low.up.shape[1], low.start, len(low.down))
        if not isinstance(kind, RowFormat):
            return LayerForm(kind, None, None, *beside), low
        gemm = self._layers.gemm(kind.storage, device)
        rows = layer.out_features if part is None else layer.out_features // 3
        return quantized_form(kind, gemm, rows, layer.in_features, *beside), low

    def _norms(self, head_norms: tuple[torch.nn.Module, ...], like: torch.Tensor) -> QKNorm:
        return QKNorm(*(self._layers.norm_weight(norm, like) for norm in head_norms))
