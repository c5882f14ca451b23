"""The Comfy Compiler, which a ComfyUI since 0.34 has: it records what a loop over blocks allocates
from CUDA's asynchronous allocator in one block, and gives the same addresses to the next.

What outlives a block has to come from elsewhere: a tensor that is recorded and still there when the
block ends is a rogue, and a block that allocates something else than the one before is a break.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import comfy.model_prefetch
import torch

from ...optimizations.fallback import Fallback

FAILED = Fallback(
    "ComfyUI's compiler stopped with an aimdo memory compile error: --disable-comfy-compiler "
    "starts ComfyUI without it",
    final=True,
)

_pauses = threading.local()


@contextmanager
def unrecorded(capturing: bool = False) -> Iterator[None]:
    """Keeps the compiler from recording what is allocated meanwhile; where there is none, nothing.

    Args:
        capturing: Whether a CUDA graph is captured, in which nothing may wait for the card.
    """
    pause = getattr(comfy.model_prefetch, "pause_malloc_graph", None)
    if pause is None:
        yield
        return
    outer = getattr(_pauses, "depth", 0)
    _pauses.depth = outer + 1
    try:
        with pause(sync=capturing):
            yield
    finally:
        _pauses.depth = outer
        if outer:  # ComfyUI's pauses do not count: the inner one has ended both
            pause().__enter__()


def clean_up(blocks: Collection[torch.nn.Module]) -> None:
    """Ends what a loop over these blocks that raised has left open: what the compiler records in
    this thread, and the pages of weights that ComfyUI has pinned for a block.
    """
    prefetch = comfy.model_prefetch
    if hasattr(prefetch, "cleanup_malloc_graph"):
        prefetch.cleanup_malloc_graph()
    # Not cleanup_prefetch_queues, which takes the queues of cards at work in other threads too.
    for queue in prefetch.PREFETCH_QUEUES:
        states = [entry[1] for entry in queue if isinstance(entry, tuple)]
        if any(module in blocks for module, _ in states):
            for module, layers in states:
                prefetch.cleanup_prefetched_modules(module, layers or ())
            queue.clear()


def failed(error: RuntimeError) -> Fallback | None:
    """Why ComfyUI's blocks run after this error; None of one that is not the compiler's."""
    return FAILED if "aimdo memory compile error" in str(error) else None
