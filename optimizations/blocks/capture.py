"""Capturing a CUDA graph while other threads go on, on one card or over several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress

import torch

_streams: dict[int, list[torch.cuda.Stream]] = {}  # a card's; each keeps a workspace of cuBLAS


def capture(
    work: Callable[[torch.cuda.Stream], object],
    device: torch.device,
    pool: tuple[int, int],
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
    graph = torch.cuda.CUDAGraph()
    with ExitStack() as stack:
        for card in others:
            stack.enter_context(torch.cuda.stream(_streams_of(card)[0]))
        side.wait_stream(torch.cuda.current_stream(device))
        stack.enter_context(torch.cuda.stream(side))
        _begin(graph, device, pool)
        try:
            with ExitStack() as pools:
                for card, its_pool in others.items():
                    pools.enter_context(torch.cuda.use_mem_pool(its_pool, card))
                    _streams_of(card)[0].wait_stream(side)
                work(beside)
                for card in others:
                    side.wait_stream(_streams_of(card)[0])
        except BaseException:
            with suppress(RuntimeError):  # what has raised is to be seen
                _end(graph, device, pool)
            raise
        _end(graph, device, pool)
    return graph


def pool_on(card: torch.device) -> torch.cuda.MemPool:
    """Memory of a card for the graphs of another.

    Raises:
        RuntimeError: This torch, or its allocator, has none.
    """
    if torch.cuda.get_allocator_backend() != "native":
        raise RuntimeError(
            "a graph over several cards needs PyTorch's own allocator: start ComfyUI with "
            "--disable-cuda-malloc"
        )
    if not hasattr(torch.cuda, "use_mem_pool"):
        raise RuntimeError("a graph over several cards needs torch 2.6")
    with torch.cuda.device(card):
        return torch.cuda.MemPool()


def _streams_of(device: torch.device) -> list[torch.cuda.Stream]:
    streams = _streams.get(device.index)
    if streams is None:
        streams = _streams[device.index] = [torch.cuda.Stream(device) for _ in range(2)]
        one = torch.ones(1, 1, device=device)
        for stream in streams:  # cuBLAS's workspace is not part of a graph's memory
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                torch.mm(one, one)
    return streams


def _begin(graph: torch.cuda.CUDAGraph, device: torch.device, pool: tuple[int, int]) -> None:
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


def _end(graph: torch.cuda.CUDAGraph, device: torch.device, pool: tuple[int, int]) -> None:
    """Ends a capture, also one that the driver has broken off.

    There torch leaves its allocator as in the middle of a capture, where it keeps what is freed.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        with suppress(AttributeError, RuntimeError):
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        raise
