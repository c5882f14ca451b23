"""Captures CUDA graphs of all blocks of a pass: one launch of the executor's kernels instead of a
thousand, with inputs copied into tensors of the graph, held weights and one workspace's buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from traceback import clear_frames
from typing import Any, NamedTuple, TypeVar

import torch

from ...caches import remembered
from ...spec.sizes import REPAID_BY
from ...verdict import Verdict, first_line
from ..fused import Ops
from ..modulation import Entry
from ..reference import Rotary
from .block import BlockExecutor, Step
from .products import streams_of
from .workspace import BufferMissingError, Prefix, Workspace

_Kept = TypeVar("_Kept")

# Graphs of one model on one card; with CFG a run has two shapes.
MOST_GRAPHS = 3
# Shapes of which something is kept: each length of a prompt is one.
MOST_SEEN = 64
# What buffers may take between two runs for the sake of their graphs: those of 1024x1024.
KEPT_BYTES = 256 * 2**20
# Of a pass, before whose last fifth an event is recorded: once the CPU has launched the last
# block, a card that has come past it was waiting, or soon will.
LAST_PART = 5


class Given(NamedTuple):
    """What the first block of a pass gets, with the modulation of all."""

    text: torch.Tensor
    image: torch.Tensor
    step: Step
    entry: Entry


class Inputs(NamedTuple):
    x: torch.Tensor  # both streams in stream order, (rows, D); the result is written over it
    entry: Entry
    step: Step

    def copy(self, given: Given) -> None:
        text, image, step, entry = given
        for mine, theirs in zip(streams_of(self.x, step.tokens), (text, image), strict=True):
            mine.copy_(theirs)
        self.entry.image.copy_(entry.image)
        self.entry.text.copy_(entry.text)
        for mine, theirs in zip(self.step.rotary, step.rotary, strict=True):
            mine.copy_(theirs)
        if step.mask is not None:
            self.step.mask.copy_(step.mask)


class Work(NamedTuple):
    key: Hashable  # what two passes have in common that one graph can compute
    placement: Hashable  # of the weights
    # what launches blocks of which model
    parts: Sequence[tuple[BlockExecutor, Sequence[torch.nn.Module]]]
    beside: bool  # whether text and image are computed side by side
    # Is called before a capture. What it returns launches the work in place of the inputs' `x`,
    # with another stream on their card.
    launch: Callable[[], Callable[[Inputs, torch.cuda.Stream], None]]
    # others that take part, each with its memory
    cards: Sequence[tuple[torch.device, PassMemory]] = ()
    # the host's tensors that it reads where they are, until the run ends
    borrowed: Sequence[Prefix] | None = None


class PassGraph:
    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        pool: Any,
        inputs: Inputs,
        work: Work,
        workspaces: Sequence[Workspace],
    ) -> None:
        self._graph, self._inputs = graph, inputs
        self.pool, self.placement, self.borrowed = pool, work.placement, work.borrowed
        self._buffers = [(workspace, workspace.changes) for workspace in workspaces]

    @property
    def void(self) -> bool:
        return not self._buffers or any(it.changes != changes for it, changes in self._buffers)

    def replay(self, given: Given) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives text and image after all blocks, new tensors."""
        self._inputs.copy(given)
        self._graph.replay()
        return streams_of(self._inputs.x.clone(), given.step.tokens)

    def reset(self) -> None:
        if self._buffers:
            self._buffers, self.borrowed = [], None
            self._graph.reset()


CARD = Verdict("the GPU, not the CPU, limits the speed")
FEW = Verdict("too few steps are left for a capture to save time")
FIRST = Verdict("the first forward passes of a shape run without graphs")


@dataclass
class Seen:
    """The passes of one shape."""

    passes: int = 0  # in this run
    runs: int = 0  # before this one
    # whether the card waited for the CPU in the last pass that was looked at; None before
    waited: bool | None = None
    refusal: Verdict | None = None  # why no graph is captured in this run

    def not_worth(self, steps: int | None, beside: bool) -> Verdict | None:
        """Returns why no graph is captured for the pass that is coming; None when one is."""
        if self.refusal:
            return self.refusal
        if self.waited is None:
            return FIRST
        if not self.waited and not beside:
            return CARD
        left = self.passes if steps is None else steps - self.passes + 1
        if self.runs:  # one more is likely
            left += self.passes if steps is None else steps
        return FEW if left < REPAID_BY[self.waited] else None


@dataclass
class GraphFigures:
    replayed: int = 0  # passes that replayed one
    captured: int = 0
    seconds: float = 0.0

    def lines(self) -> list[str]:
        if not self.replayed:
            return []
        return [
            f"CUDA graphs: {self.replayed} forward passes replayed one, {self.captured} captured "
            f"in {self.seconds:.2f} s"
        ]


def recent(kept: dict[Hashable, _Kept], shape: Hashable, new: Callable[[], _Kept]) -> _Kept:
    """Gives what is kept of a shape; where it is one too many, drops the least recently used."""
    found = kept.pop(shape, None) or new()
    kept[shape] = found
    for old in list(kept)[:-MOST_SEEN]:  # a copy: threads of other cards add some
        kept.pop(old, None)
    return found


class PassMemory:
    """What the passes of one model on one card and stream use again: buffers, and graphs."""

    def __init__(self, ops: Ops) -> None:
        self.workspace = Workspace(ops)
        self.taken = False
        self._graphs: dict[Hashable, PassGraph] = {}  # the least recently used first
        self._seen: dict[Hashable, Seen] = {}
        self._pool: Any = None
        self._lent: torch.cuda.MemPool | None = None

    @property
    def has_graphs(self) -> bool:
        return bool(self._graphs)

    def start_run(self) -> None:
        for seen in self._seen.values():
            seen.runs += bool(seen.passes)
            seen.passes, seen.refusal = 0, None

    def free_buffers(self) -> None:
        """Frees buffers that no graph needs, and large ones with their graphs."""
        for key in [key for key, graph in self._graphs.items() if graph.borrowed is not None]:
            self._graphs.pop(key).reset()
        self.drop_void()
        if not self._graphs or self.workspace.bytes > KEPT_BYTES:
            self.release()

    def release(self) -> None:
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._pool = self._lent = None
        self.workspace = Workspace(self.workspace.ops)

    def seen(self, key: Hashable) -> Seen:
        return recent(self._seen, key, Seen)

    def graph(self, work: Work) -> PassGraph | None:
        """Gives the graph of some work, where what it reads is where it was; drops others."""
        self.drop_void()
        found = self._graphs.pop(work.key, None)
        if found is None:
            return None
        if found.placement != work.placement:
            found.reset()
            return None
        self._graphs[work.key] = found
        return found

    def capture(self, work: Work, given: Given, figures: GraphFigures) -> PassGraph | Verdict:
        """Captures work that has run before; why not, where that fails."""
        start = time.perf_counter()
        memories = [self, *(memory for _, memory in work.cards)]
        for memory in memories:
            memory._make_room()
        spaces = [memory.workspace for memory in memories]
        changes = [space.changes for space in spaces]
        try:
            inputs, pool, launch = self._inputs(given), self._own_pool(), work.launch()
            self.workspace.closed = not work.cards  # several need torch's own allocator
            graph = capture(
                lambda stream: launch(inputs, stream),
                given.text.device,
                pool,
                {card: memory._pool_of(card) for card, memory in work.cards},
            )
        except BufferMissingError:
            return FIRST
        except torch.OutOfMemoryError:
            return Verdict("too little VRAM is free for a graph")
        # Drivers, and what cannot be captured: of cudaMallocAsync Triton takes no new address.
        except (RuntimeError, ValueError) as error:
            return Verdict(f"capturing a graph failed: {first_line(error)}")
        finally:
            self.workspace.closed = False
        if [space.changes for space in spaces] != changes:
            graph.reset()
            return FIRST
        found = PassGraph(graph, pool, inputs, work, spaces)
        for memory in memories:  # each keeps the buffers as long as the graph is there
            memory._graphs[work.key] = found
        figures.captured += 1
        figures.seconds += time.perf_counter() - start
        return found

    def drop_void(self) -> None:
        for void in [key for key, graph in self._graphs.items() if graph.void]:
            self._graphs.pop(void).reset()

    def _make_room(self) -> None:
        self.drop_void()
        while len(self._graphs) >= MOST_GRAPHS:
            self._graphs.pop(next(iter(self._graphs))).reset()

    def _inputs(self, given: Given) -> Inputs:
        text, _, step, entry = given
        tokens = step.tokens
        with torch.inference_mode(False):
            x = self.workspace.take("x", (tokens.rows, text.shape[-1]), text[:0])
            own = Entry(torch.empty_like(entry.image), torch.empty_like(entry.text))
            rotary = Rotary(*map(torch.empty_like, step.rotary))
            mask = None if step.mask is None else torch.empty_like(step.mask)
        fixed = Step(tokens, rotary, mask, segments=step.segments, guidance=step.guidance)
        return Inputs(x, own, fixed)

    def _own_pool(self) -> Any:
        # torch takes no pool whose graphs are all gone.
        if all(graph.pool != self._pool for graph in self._graphs.values()):
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _pool_of(self, card: torch.device) -> torch.cuda.MemPool:
        if self._lent is None:
            self._lent = pool_on(card)
        return self._lent


# Each keeps a workspace of cuBLAS.
_streams: dict[int, list[torch.cuda.Stream]] = remembered({})  # by the card's index


def capture(
    work: Callable[[torch.cuda.Stream], object],
    device: torch.device,
    pool: Any,
    others: Mapping[torch.device, torch.cuda.MemPool],
) -> torch.cuda.CUDAGraph:
    """Captures what `work` launches, also on the stream that it is given; other threads go on.

    Not through `torch.cuda.graph`, which collects garbage and empties the allocator's cache first.

    Args:
        device: Whose current stream replays it.
        pool: What it allocates there comes from.
        others: Cards that `work` launches on too, in their current streams, and where what it
            allocates comes from.
    """
    side, beside = _streams_of(device)
    sides = [its_side for its_side, _ in map(_streams_of, others)]
    graph = torch.cuda.CUDAGraph()
    with ExitStack() as stack:
        for its_side in sides:
            stack.enter_context(torch.cuda.stream(its_side))
        side.wait_stream(torch.cuda.current_stream(device))
        stack.enter_context(torch.cuda.stream(side))
        _begin(graph, device, pool)
        try:
            with ExitStack() as pools:
                for its_side, (card, its_pool) in zip(sides, others.items(), strict=True):
                    pools.enter_context(torch.cuda.use_mem_pool(its_pool, card))
                    its_side.wait_stream(side)
                work(beside)
                for its_side in sides:
                    side.wait_stream(its_side)
        except BaseException as error:
            # What was allocated here is freed here: outside, cudaMallocAsync ends the process.
            clear_frames(error.__traceback__)
            with suppress(RuntimeError):  # what has raised is to be seen
                _end(graph, device, pool)
            raise
        _end(graph, device, pool)
    return graph


def pool_on(card: torch.device) -> torch.cuda.MemPool:
    """Returns memory of a card for the graphs of another."""
    if torch.cuda.get_allocator_backend() != "native":
        raise RuntimeError(
            "a graph over several GPUs needs PyTorch's allocator: start ComfyUI with "
            "--disable-cuda-malloc"
        )
    if not hasattr(torch.cuda, "use_mem_pool"):
        raise RuntimeError("a graph over several GPUs needs torch 2.6")
    with torch.cuda.device(card):
        return torch.cuda.MemPool()


def _streams_of(device: torch.device) -> list[torch.cuda.Stream]:
    streams = _streams.get(device.index)
    if streams is None:
        streams = _streams[device.index] = [torch.cuda.Stream(device) for _ in range(2)]
        some = torch.ones(2, 2, device=device)
        for stream in streams:  # cuBLAS's and Lt's workspaces are no part of a graph's memory
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                torch.mm(some, some)
                torch.addmm(some[0], some, some)
    return streams


def _begin(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """Begins a capture with a generator of random numbers of its own.

    The one that takes part raises in other threads ("Offset increment outside graph capture"), as
    long as a capture lasts and after one that failed. torch takes the default one; here that is
    over when this returns.
    """
    generator = torch.cuda.default_generators[device.index]
    everybodys = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    finally:
        generator.graphsafe_set_state(everybodys)


def _end(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """Ends a capture, also one that the driver has broken off.

    There torch leaves its allocator as in the middle of a capture, where it keeps what is freed.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        with suppress(AttributeError, RuntimeError):
            for end in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
                getattr(torch._C, end)(device.index, pool)
        raise
