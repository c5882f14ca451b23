"""Times calls that run in turns until the card's clocks have settled, and the CPU's time to launch
a block and to replay all. Few tokens are used for that, so that the CPU never waits for the card.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn import Linear, Module, ModuleList

from ..families.qwen_image import BLOCK_GEMMS
from ..loaders.quantize import row_format
from ..optimizations import reference
from ..optimizations.blocks.block import Attend, BlockExecutor, KnownBlock, LayerTensors, Step
from ..optimizations.blocks.block_form import DENSE
from ..optimizations.blocks.workspace import Workspace
from ..optimizations.fused import Ops
from ..optimizations.linear import Gemm, choose_gemm
from ..optimizations.modulation import Halves
from ..optimizations.reference import Modulation, Rotary, Tokens
from ..planning.rates import LAUNCHES, Launches
from ..spec.formats import QUANTIZED, RowFormat
from ..spec.transformer import TransformerShape
from ..verdict import Verdict, first_line

# The part of the time in which clocks settle, which does not count.
SETTLING = 0.3
# The card is waited for after so long, and all the time so that no more launches are ahead of it.
ROUND_SECONDS, MOST_AHEAD = 0.2, 3
TOKENS = Tokens(1, 8, 64, 64)
# Some hundred launches: a driver holds about a thousand before it makes the CPU wait.
LAUNCHED_BLOCKS = 6
WARM_UP, REPEATS = 2, 10
EPS = 1e-6


class MixPart(NamedTuple):
    name: str  # of its figure
    call: Callable[[], Any]
    work: float  # operations, or bytes


class MixSum:
    def __init__(self) -> None:
        self.work = self.seconds = 0.0

    def add(self, work: float, seconds: float) -> None:
        self.work += work
        self.seconds += seconds

    @property
    def rate(self) -> float:
        return self.work / self.seconds


def run_mix(parts: Sequence[MixPart], device: torch.device, seconds: float) -> dict[str, MixSum]:
    """Runs the parts in turn until the time is up; sums by name, without the beginning."""
    for part in parts:  # libraries choose their kernels, Triton compiles
        part.call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    settled = begin + SETTLING * seconds
    sums = {part.name: MixSum() for part in parts}
    while True:
        start = time.perf_counter()
        counts = start >= settled
        for part, taken in _round(parts, device):
            if counts:
                sums[part.name].add(part.work, taken)
        if counts and time.perf_counter() - begin >= seconds:
            return sums


def _round(parts: Sequence[MixPart], device: torch.device) -> Iterable[tuple[MixPart, float]]:
    end = time.perf_counter() + ROUND_SECONDS
    if device.type != "cuda":
        ends = [time.perf_counter()]
        for part in parts:
            part.call()
            ends.append(time.perf_counter())
        return [
            (part, after - before)
            for part, (before, after) in zip(parts, pairwise(ends), strict=True)
        ]
    marks = [torch.cuda.Event(enable_timing=True)]
    marks[0].record()
    while time.perf_counter() < end:
        for part in parts:
            part.call()
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        if len(marks) > MOST_AHEAD * len(parts):
            marks[-MOST_AHEAD * len(parts)].synchronize()
    marks[-1].synchronize()
    times = [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]
    return [(parts[index % len(parts)], taken) for index, taken in enumerate(times)]


class LaunchedBlocks:
    """Holds blocks of `shape` that the executor runs, with one set of random weights."""

    def __init__(
        self,
        shape: TransformerShape,
        precision: str,
        ops: Ops,
        attend: Attend,
        device: torch.device,
    ) -> None:
        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, device=device, dtype=torch.bfloat16)

        dim, head = shape.dim, shape.head_dim
        layers: dict[str, Any] = {}
        for name, (height, depth) in BLOCK_GEMMS.items():
            n, k = height * dim, depth * dim
            weight, scale = random(n, k) * k**-0.5, None
            if precision in QUANTIZED:
                weight, scale = reference.row_quantize(weight, row_format(precision, k))
            layers[name] = Linear(k, n, device="meta")
            layers[name].stored = LayerTensors(weight, scale, random(n))
        norm = torch.ones(head, device=device, dtype=torch.bfloat16)
        self._layers = _Layers(precision)
        self._ops, self._attend, self._workspace = ops, attend, Workspace(ops)
        self._known: dict[Module, KnownBlock] = {}
        self._blocks = [_block(shape, layers, norm) for _ in range(shape.blocks)]
        turned = torch.zeros(1, TOKENS.joint, head // 2, device=device)
        self._step = Step(TOKENS, Rotary(turned.cos(), turned), None)
        rows = (Modulation(random(1, 3 * dim), random(1, 3 * dim)) for _ in range(2))
        self._halves = Halves(*rows)
        self._text, self._image = random(1, TOKENS.text, dim), random(1, TOKENS.image, dim)

    def run(self, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the first `count` blocks, or all."""
        blocks = self._blocks[:count]
        # Nobody asks whether these layers move or are foreign.
        layers: Any = self._layers
        executor = BlockExecutor(layers, self._ops, self._attend, self._workspace, self._known)
        text, image = self._text, self._image
        for block, after in zip(blocks, [*blocks[1:], None], strict=True):
            following = None if after is None else (after, self._halves.attention)
            text, image = executor.run(block, text, image, self._step, self._halves, following)
        return text, image


class Launched(NamedTuple):
    """Holds the seconds that the CPU needed."""

    block: float  # to launch one block kernel by kernel
    graph: float | Verdict  # to replay all blocks as a CUDA graph, or why there is none


def time_launches(blocks: LaunchedBlocks, device: torch.device) -> Launched:
    seconds = _median_seconds(lambda: blocks.run(LAUNCHED_BLOCKS), device)
    return Launched(seconds / LAUNCHED_BLOCKS, _replay_seconds(blocks, device))


def launches_of(launched: Mapping[str, Launched]) -> Launches:
    """Joins what was timed in each precision with `LAUNCHES` for the rest."""
    block = {precision: found.block for precision, found in launched.items()}
    graphs = [found.graph for found in launched.values() if not isinstance(found.graph, Verdict)]
    return replace(
        LAUNCHES, block={**LAUNCHES.block, **block}, graph=max(graphs, default=LAUNCHES.graph)
    )


def _replay_seconds(blocks: LaunchedBlocks, device: torch.device) -> float | Verdict:
    if device.type != "cuda":
        return Verdict(f"{device.type} has no CUDA graphs")
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            blocks.run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # an old driver, or a kernel that cannot be captured
        return Verdict(first_line(error))
    return _median_seconds(graph.replay, device)


def _median_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Times the CPU alone: the card starts idle, and is not waited for."""
    seconds = []
    for _ in range(WARM_UP + REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[WARM_UP:])


class _Layers:
    """Implements `optimizations.blocks.block.Layers` for layers whose tensors are on the card."""

    def __init__(self, precision: str) -> None:
        self._precision = precision
        self._gemms: dict[str, Gemm] = {}

    def kind(self, layer: Any) -> str | RowFormat:
        if self._precision not in QUANTIZED:
            return DENSE
        return row_format(self._precision, layer.in_features)

    def tensors(self, layer: Any, like: torch.Tensor) -> AbstractContextManager[LayerTensors]:
        return nullcontext(layer.stored)

    def low_rank(self, layer: Module) -> None:
        return None

    def hold(self, blocks: Sequence[Module]) -> AbstractContextManager[Hashable | None]:
        return nullcontext(0)

    def rounds(self, layer: Module) -> bool:
        return self._precision in QUANTIZED

    def norm_weight(self, norm: Any, like: torch.Tensor) -> torch.Tensor:
        return norm.weight

    def gemm(self, format: str, device: torch.device) -> Gemm:
        if format not in self._gemms:
            self._gemms[format] = choose_gemm(format, device)
        return self._gemms[format]


def _block(shape: TransformerShape, layers: dict[str, Linear], weight: torch.Tensor) -> Module:
    """Makes what the executor reads of a host's block."""
    block: Any = Module()
    norm: Any = Module()
    norm.weight, norm.eps = weight, EPS
    block.img_norm1 = norm
    block.attn = Module()
    block.attn.heads = shape.heads
    for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
        setattr(block.attn, name, norm)
    block.attn.to_out = ModuleList([Module()])
    for stream in ("img_mlp", "txt_mlp"):
        mlp = Module()
        mlp.net = ModuleList([Module(), Module(), Module()])
        setattr(block, stream, mlp)
    for name, layer in layers.items():
        where, _, last = name.rpartition(".")
        block.get_submodule(where).register_module(last, layer)
    return block
