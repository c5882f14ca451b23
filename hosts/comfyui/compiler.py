"""The Comfy Compiler, which a ComfyUI since 0.34 has: it records what a loop over blocks allocates
from CUDA's asynchronous allocator in one block, and gives the same addresses to the next.

What outlives a block has to come from elsewhere: a tensor that is recorded and still there when the
block ends is a rogue, and a block that allocates something else than the one before is a break.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import comfy.model_prefetch

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


def clean_up() -> None:
    """Ends what a call of the transformer that raised has left open on this thread."""
    # Not cleanup_prefetch_queues, which takes the queues of cards at work in other threads too.
    if hasattr(comfy.model_prefetch, "cleanup_malloc_graph"):
        comfy.model_prefetch.cleanup_malloc_graph()


def failed(error: RuntimeError) -> Fallback | None:
    """Why ComfyUI's blocks run after this error; None of one that is not the compiler's."""
    return FAILED if "aimdo memory compile error" in str(error) else None
