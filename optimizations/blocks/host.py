"""Defines what a host gives a forward pass, and remembers what is known of its model in a run."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import is_
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ...planning.split_cost import KEYS, ROWS, Exchange
from ...spec.formats import RowFormat
from ...spec.sizes import COMPARED_AT_ONCE
from ...verdict import Verdict, Verdicts
from ..attention import ChosenAttention
from ..fused import Ops, choose_ops
from ..inventory import Inventory
from ..modulation import Entry, modulation_layers, shared_entry
from ..reference import Tokens
from .block import KnownBlock, Layers, Step
from .block_form import (
    DENSE,
    read_parts,
    token_layers,
    unknown_modulation,
    unsupported_block,
)
from .graphs import GraphFigures
from .workspace import Prefix

OTHER_CLASSES = Verdict("another extension has replaced some of its modules")
Streams = tuple[torch.Tensor, torch.Tensor]  # text and image


class BlockInputs(NamedTuple):
    # text, image: (batch, tokens, D)
    text: torch.Tensor
    image: torch.Tensor
    # of the timestep, (batch, D), or (2 batch, D) where the second half is for timestep 0; or
    # whatever else the host makes the modulation of, the same object in all blocks of a pass
    embedding: Any
    step: Step
    intercepted: bool  # on the way to the next block, besides `HostPass.additions`


class HostPass:
    """A host's adapter: one call of its transformer."""

    owner: Any  # the host's model; referenced weakly
    # what its weights are; what is known of the model in this run is known under it
    state: Hashable
    blocks: Sequence[torch.nn.Module]  # the transformer's, in order
    dtype: torch.dtype
    device: torch.device
    latents: torch.Tensor  # what the call denoises
    layers: Layers
    # of the model, over its runs; `start_run()` begins new figures, `lines()` tells
    modulation: Any
    # this package's, where it computes the attention of the block that runs
    attention: ChosenAttention | None
    # of cards that have nothing to do in this pass, each with its own copy of the model; they have
    # no modulation of their own in it, and what the host gives blocks is here
    peers: Sequence[HostPass]
    # whether passes of other cards are launched meanwhile, by threads that the interpreter lets run
    # in turns
    in_turns: bool
    names: Sequence[str] = ()  # of a block's arguments, as far as the host passes them by place
    # the names of what the host's block gets: text, image and embedding, or the last of them
    streams: tuple[str, ...]
    # what the host adds to the first image rows after each block, (batch or 1, rows, D) in any
    # floating dtype, on this pass's device, or None; empty where nothing is added
    additions: Sequence[torch.Tensor | None]
    # what the attention of each block reads besides, where that is known before it is called and
    # stays where it is until the run ends; None for none
    prefixes: Sequence[Prefix] | None = None
    steps: int | None  # of the run, where the host tells
    prepared: PreparedModel  # what is known of the model, as soon as a pass begins
    _kept: Mapping[Hashable, tuple[tuple, Step]] = MappingProxyType({})

    def fallback(self) -> Verdict | None:
        """Returns why the host's blocks run in this pass; None when the executor's do."""

    def unsupported(self, block: torch.nn.Module) -> Verdict | None:
        """Returns why the executor does not compute a block, beyond its form."""

    def inputs(
        self, block: torch.nn.Module, positional: tuple, arguments: dict[str, Any]
    ) -> BlockInputs | Verdict | None:
        """Returns what a block was called with, or why the executor cannot take it; None where the
        call is beside the pass and the host's.
        """
        raise NotImplementedError

    def run_block(
        self, block: torch.nn.Module, positional: tuple, arguments: dict[str, Any]
    ) -> Any:
        """Runs a block that the executor does not."""
        return type(block).forward(block, *positional, **arguments)

    def lasting(self, capturing: bool = False) -> AbstractContextManager[None]:
        """Lets what is allocated meanwhile outlive the block that runs."""
        return nullcontext()

    def failed(self, error: RuntimeError) -> Verdict | None:
        """Returns why the host's blocks run from here on, after an error of the host's memory that
        fused blocks can cause; None for another.
        """

    def clean_up(self) -> None:
        """Ends what a call of the transformer has left open or wrong, before it is repeated."""

    def unchanged(
        self, index: int, positional: tuple, arguments: dict[str, Any], inputs: BlockInputs
    ) -> bool:
        """Returns whether a block was called with this text, image and embedding, as `inputs` would
        find, and with the prefix that was announced.
        """
        text, image, embedding = map(arguments.get, self.streams)
        same = text is inputs.text and image is inputs.image and embedding is inputs.embedding
        return same and not positional

    def output(self, streams: Streams) -> Any:
        """Returns what the host's block returns for text and image."""
        return streams

    def entry(self, embedding: Any, batch: int) -> Entry:
        """Returns the modulation of all blocks for a timestep embedding."""
        raise NotImplementedError

    def no_graphs(self) -> Verdict | None:
        """Returns why the pass may not replay a CUDA graph; None when it may."""

    def host_attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attends as the host does for the block that runs, as `block.Attend`."""
        raise NotImplementedError

    def host_block(self, block: torch.nn.Module, arguments: dict[str, Any]) -> Streams:
        """Runs the block's forward with the host's attention."""
        raise NotImplementedError

    def kept_step(self, given: tuple, form: Hashable, make: Callable[[], Step]) -> Step:
        """Makes what the blocks of a pass share once, as long as the host gives them the same."""
        known, step = self._kept.get(form, ((), None))
        if step is None or not all(map(is_, given, known)):
            with self.lasting():
                step = make()
            self._kept = {**self._kept, form: (given, step)}
        return step


class DoubleStream(HostPass):
    """Gives the hosts' passes of Qwen-Image 1.x what they have in common."""

    streams: tuple[str, ...] = "encoder_hidden_states", "hidden_states", "temb"


class PrefixedStream(HostPass):
    """Gives the hosts' passes of Qwen-Image-2.1 what they have in common: their blocks run with the
    rows of the image alone, beside keys and values that the host has kept.

    A host gives `find_prefix` for a block's call, as `HostPass.inputs`; `prefix_of` its arguments,
    or None; `new_step` for tokens, image and the arguments named in `shared`; and `parts_of` the
    embedding: scale and gate of attention, then of the MLP, as `shared_entry` takes them.
    """

    shared: tuple[str, ...]
    find_prefix: Callable[..., Prefix | Verdict | None]
    prefix_of: Callable[..., Prefix | None]
    new_step: Callable[..., Step]
    parts_of: Callable[..., Sequence[torch.Tensor]]

    def inputs(
        self, block: torch.nn.Module, positional: tuple, arguments: dict[str, Any]
    ) -> BlockInputs | Verdict | None:
        prefix = self.find_prefix(block, positional, arguments)
        if not isinstance(prefix, Prefix):
            return prefix
        image, embedding = map(arguments.get, self.streams)
        shared = tuple(map(arguments.get, self.shared))
        tokens = Tokens(len(image), 0, image.shape[1], image.shape[1])
        make = partial(self.new_step, tokens, image, *shared)
        step = self.kept_step(shared, (tokens, image.dtype), make)
        return BlockInputs(image[:, :0], image, embedding, step._replace(prefix=prefix), False)

    def unchanged(
        self, index: int, positional: tuple, arguments: dict[str, Any], inputs: BlockInputs
    ) -> bool:
        image, embedding = map(arguments.get, self.streams)
        if positional or image is not inputs.image or embedding is not inputs.embedding:
            return False
        prefix, expected = self.prefix_of(arguments), self.prefixes
        # A host may make another view of the same memory for each block.
        return bool(prefix and expected) and (
            prefix.keys.data_ptr() == expected[index].keys.data_ptr()
        )

    def output(self, streams: Streams) -> torch.Tensor:
        _, image = streams
        return image

    def entry(self, embedding: Any, batch: int) -> Entry:
        scale1, gate1, scale2, gate2 = self.parts_of(embedding)
        return shared_entry((scale1, scale2), (gate1, gate2), len(self.blocks), batch)

    def host_block(self, block: torch.nn.Module, arguments: dict[str, Any]) -> Streams:
        name, _ = self.streams
        image = arguments[name]
        # A host's block may write over its input.
        out = type(block).forward(block, **{**arguments, name: image.clone()})
        return image[:, :0], out


# What the check allows, of what a block adds to a stream. The fused bf16 block differs by 0.2 % to
# 0.5 % from the host's, whose roundings it leaves out; a quantized one by what fp8 rounds twice.
EXACT_TOLERANCE = 0.02
ROUNDING_TOLERANCE = 0.15


class FirstBlockCheck:
    """Compares one block by the executor with the host's, for each shape.

    A change of the host, of a weight's layout or of another extension that the executor misses
    would otherwise be a wrong image without a word.
    """

    def __init__(self, rounds: bool) -> None:
        self._most = ROUNDING_TOLERANCE if rounds else EXACT_TOLERANCE
        self._passed: set[tuple] = set()
        self.failed: Verdict | None = None  # why the host's blocks run from here on
        # the largest relative difference of a stream that passed; None before
        self.worst: float | None = None

    def wanted(self, step: Step) -> bool:
        # Rows beside kept ones that are kept as well: those before and behind are compared.
        return _form(step) not in self._passed and not (step.keep and step.prefix)

    def fail(self, reason: str) -> None:
        self.failed = Verdict(reason, final=True)

    def passes(self, before: Streams, ours: Streams, host: Streams, step: Step) -> bool:
        """Compares text and image, and keeps the answer.

        The difference may be a part of what the block added, and the rounding of the result:
        |ours - host| <= most * |host - before| + eps / 2 * |host|, as Euclidean norms.
        """
        norms = torch.stack([_norms(*streams) for streams in zip(before, ours, host, strict=True)])
        # Read at once: each time, the card waits for the CPU afterwards.
        for stream, (change, off, size) in zip(("text", "image"), norms.tolist(), strict=True):
            change = max(change, 1e-30)
            allowance = torch.finfo(before[0].dtype).eps / 2 * size / change
            error = off / change
            if not error <= self._most + allowance:  # NaN fails too
                self.fail(
                    f"the fused block's {stream} stream differs from the reference block's by "
                    f"{error:.2g}, relative to what the block adds, but only {self._most} is "
                    "allowed"
                )
                return False
            self.worst = max(self.worst or 0.0, off / max(size, 1e-30))
        self._passed.add(_form(step))
        return True


def _form(step: Step) -> tuple[Tokens, int, bool, bool]:
    return step.tokens, step.before, step.mask is not None, step.guidance is not None


def _norms(start: torch.Tensor, ours: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """Returns |host - start|, |ours - host| and |host| of streams (batch, tokens, D), as (3,).

    In fp32 and so many tokens at a time, which take little memory.
    """
    found = []
    parts = (stream.split(COMPARED_AT_ONCE, 1) for stream in (start, ours, host))
    for before, mine, theirs in zip(*parts, strict=True):
        theirs = theirs.float()
        # One difference at a time takes the memory that planning counts.
        norms = (theirs - before).norm(), (mine - theirs).norm(), theirs.norm()
        found.append(torch.stack(norms))
    return torch.stack(found).norm(dim=0)


def is_finite(tensor: torch.Tensor) -> bool:
    """Returns whether all is finite, looking at some rows at a time, for little memory."""
    parts = tensor.split(COMPARED_AT_ONCE, -2)  # torch's isfinite takes 2.5 times a bf16 tensor
    return all(bool(part.isfinite().all()) for part in parts)


def _unsupported(host: HostPass) -> list[Verdict | None]:
    forms = [tuple(type(part) for _, part in read_parts(block)) for block in host.blocks]
    usual = next((form for form, _ in Counter(forms).most_common(1)), None)
    return [
        unsupported_block(block, host.dtype) or (None if form == usual else OTHER_CLASSES)
        for block, form in zip(host.blocks, forms, strict=True)
    ]


EXCHANGED = {KEYS: "keys and values", ROWS: "normalized rows"}


@dataclass
class SplitFigures:
    """Counts what several GPUs did in one run."""

    check: FirstBlockCheck  # compares a block on all GPUs with that of ComfyUI or diffusers
    verdicts: Verdicts
    plan: Exchange | None = None  # of the last pass that was split
    passes: int = 0  # how many were split
    gain: float = 0.0  # how many times as fast as one card they were measured
    refusal: Verdict | None = None  # why the passes that come run on one card
    # whether normalized rows can be, and whether in 8 bits; None before anybody looked
    sent: tuple[bool, bool] | None = None

    def refuse(self, reason: Verdict) -> None:
        """Counts a pass on one card, and the rest of the run where that is final."""
        self.verdicts.add("cards", reason)
        if reason.final:
            self.refusal = reason

    def lines(self) -> list[str]:
        lines = []
        if self.passes:
            rows = " + ".join(map(str, self.plan.image_rows))
            lines.append(
                f"GPUs: {len(self.plan.image_rows)} share {self.passes} forward passes, image "
                f"tokens {rows}; they exchange {EXCHANGED[self.plan.name]}; {self.gain:.2f}x as "
                "fast as one GPU, measured"
            )
        return lines + self.verdicts.lines("cards")


class PreparedModel:
    """What is known of one model with one set of weights in one run; it does not hold the model.

    Args:
        earlier: What was known of it with the same weights in the last run: where nothing has
            changed since, the inventory of its code and which shapes were compared are taken over.
    """

    def __init__(
        self, host: HostPass, lossy_attention: bool, earlier: PreparedModel | None = None
    ) -> None:
        # The kernels; a `Verdict` where there are none.
        self.ops: Ops = choose_ops(host.device)  # type: ignore[assignment]
        # why there is no modulation of all blocks; None where there is
        self.unknown = unknown_modulation(host.blocks)
        as_it_was = earlier is not None and earlier.is_unchanged(host.blocks)
        forms = [None] * len(host.blocks) if as_it_was else _unsupported(host)
        # of each block, why the executor does not compute it
        self.unsupported = [
            reason or host.unsupported(block)
            for block, reason in zip(host.blocks, forms, strict=True)
        ]
        pairs = zip(host.blocks, self.unsupported, strict=True)
        read = [layer for block, reason in pairs if not reason for layer in token_layers(block)]
        self.read = list(map(host.layers.kind, read))  # the kinds of their layers
        self.kinds = Counter(self.read)  # with how many layers each
        self._formats = sorted(kind for kind in self.kinds if isinstance(kind, RowFormat))
        storages = dict.fromkeys(format.storage for format in self._formats)
        self._gemms = [host.layers.gemm(storage, host.device) for storage in storages]
        others = (layer for layer, kind in zip(read, self.read, strict=True) if kind != DENSE)
        # whether host and executor round differently
        self.rounds = lossy_attention or any(map(host.layers.rounds, others))
        self.check = FirstBlockCheck(self.rounds)
        self.modulation = host.modulation
        self.passes = self.fused = 0
        self.verdicts = Verdicts()  # what did not run in it, and why
        # what this run had of several cards
        self.split = SplitFigures(FirstBlockCheck(self.rounds), self.verdicts)
        self.quantized = bool(self._formats)  # whether any is
        self.graphs = GraphFigures()  # what this run had of CUDA graphs
        self.exchanged = False  # whether somebody exchanged what blocks were given, unannounced
        self.notes: dict[str, None] = {}  # lines of the report, by the host
        self.dropped = 0  # how often graphs were given up because memory ran out
        self._blocks = tuple(map(weakref.ref, host.blocks))
        self._placement: Hashable = None
        self._known: dict[torch.nn.Module, KnownBlock] = {}
        self._code: Inventory | None = None
        # What a comparison with the host's block speaks for.
        compared = self.read, self.rounds, self.unsupported, self.ops, self._gemms
        self._compared = *compared, host.attention is None
        if as_it_was and self._compared == earlier._compared and not earlier.check.failed:
            self._code, self.check, self.check.worst = earlier._code, earlier.check, None

    def is_unchanged(self, blocks: Sequence[torch.nn.Module]) -> bool:
        """Returns whether all of these blocks ran fused, and none was changed since."""
        there = self._code is not None and self.is_of(blocks) and not any(self.unsupported)
        return there and not self._code.changed()

    def is_of(self, blocks: Sequence[torch.nn.Module]) -> bool:
        same = (ref() is block for ref, block in zip(self._blocks, blocks, strict=False))
        return len(blocks) == len(self._blocks) and all(same)

    def known(self, placement: Hashable | None) -> dict[torch.nn.Module, KnownBlock] | None:
        """Returns what is known of blocks with this placement of their weights."""
        if placement != self._placement:
            self._placement, self._known = placement, {}
        return None if placement is None else self._known

    def code(self, host: HostPass) -> Inventory:
        """Watches the blocks that run fused, from the first run until `let_go`."""
        if self._code is None:
            blocks = {i: it for i, it in enumerate(host.blocks) if not self.unsupported[i]}
            layers = [layer for block in blocks.values() for layer in token_layers(block)]
            kinds = list(map(host.layers.kind, layers))
            # The modulation is computed by its modules, or comes from a table that watches them.
            called = [it.module for it in modulation_layers(list(blocks.values()))]
            called += [layer for layer, kind in zip(layers, kinds, strict=True) if kind is None]
            foreign = host.layers.is_foreign
            self._code = Inventory(blocks, called, layers, foreign, bound=("forward",))
        return self._code

    def let_go(self) -> None:
        self.known(None)
        self._code = None

    def lines(self, host: str) -> list[str]:
        total = self.fused + self.verdicts.of("blocks").total()
        lines = []
        if self.fused:
            check = "checked in an earlier run"
            checks = self.check, self.split.check
            worst = [it.worst for it in checks if it.worst is not None]
            if worst:
                check = f"the check's largest difference was {max(worst):.2g}"
            lines.append(
                f"blocks: fused, {self.fused} of {total} in {self.passes} forward passes "
                f"({self.ops.name}); {check}"
            )
        lines += self.verdicts.lines("blocks", instead=f"{host} code", total=total)
        if not self.fused:
            return lines
        lines += [f"layers: {gemm}" for gemm in self._gemms]
        layers = self.kinds.total()
        for format in self._formats:
            if format.rotation:
                count = f"{self.kinds[format]} of {layers}"
                lines.append(f"layers: {count} rotated, {format.rotation} columns at a time")
        if self.kinds[None]:
            lines.append(f"layers: {self.kinds[None]} of {layers} run {host} code")
        lines += self.split.lines() + list(self.notes) + self.graphs.lines()
        return lines + self.verdicts.lines("graphs") + self.modulation.lines()
