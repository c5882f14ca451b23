"""Compiles in the background what the blocks of a model launch, while its weights are read.

A pass on the meta device goes through the executor that runs the others: it has no memory, and what
it prepares is compiled. So these kernels are those of the first pass, whichever those are.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from ..caches import remembered
from ..verdict import Verdict, assumed
from . import kernels
from .blocks.block import BlockExecutor, KnownBlock, Layers, Step
from .blocks.block_form import DENSE, BlockForm, query_layer
from .blocks.products import Operand
from .blocks.workspace import Workspace
from .fused import choose_ops
from .modulation import Entry
from .reference import QKNorm, QuantizedRows, Rotary, Tokens, storage_of

# Tokens. A prompt of up to 64 has GEMMs of other tiles than one of up to 512; an image from 736x736
# on has more than 2048.
TEXTS, IMAGE = (200, 40), 4096
# Seconds after which a thread that waits for the GIL gets it; Python's own is 5 ms. A compile takes
# the GIL some 1,600 times. Beside a thread that runs Python, as a loader does, 13 kernels take
# 10.2 s with 5 ms, 4.1 s with this and 2.6 s alone (two cores).
TURN = 0.0005
_rehearsed: set[tuple] = remembered(set())

# No daemon threads: a process that ends while LLVM runs in one is aborted.
_compilers = ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 2)))
_passes = ThreadPoolExecutor(1)


def warm_up(
    device: torch.device, work: Callable[..., object], model: object = None
) -> Future | None:
    """Begins to compile what some work on a card launches or prepares, in the order of the calls.

    Who needs one of these kernels meanwhile waits for it, or compiles it too (Triton 3.6). What
    fails here fails again there, and is told there.

    Args:
        work: Called in another thread, where it takes no memory of the card; what is returned is
            done with it. None: nothing is compiled.
        model: What `work` is called with, if anything. It may go while it waits for its turn, or
            while its kernels are compiled: it is held for the length of the call alone.
    """
    if device.type != "cuda" or kernels.interpreted() or kernels.missing():
        return None
    known = None if model is None else weakref.ref(model)

    def call() -> None:
        if known is None:
            work()
        elif (found := known()) is not None:
            work(found)

    def run() -> None:
        # A trial would wait for its kernels. Memory of the card that a second thread takes can stop
        # both for ever, where comfy-aimdo logs it (in Python, while torch's allocator is locked).
        # Compilers, drivers and packages raise anything.
        with (
            suppress(Exception),
            torch.cuda.device(device),
            _short_turns(),
            _background(),
            assumed(),
        ):
            call()

    return _passes.submit(run)


@contextmanager
def _short_turns() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(min(usual, TURN))
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def _background() -> Any:
    # Triton's mode in which other threads compile.
    from triton import AsyncCompileMode  # since 3.5

    from .kernels.launch import compiling

    class Background(AsyncCompileMode):
        def submit(self, key: str, compile_kernel: Callable, *rest: Callable) -> object:
            line = ""
            with suppress(Exception):  # the registry's copy has no such module
                from .kernels import compiler

                line = compiler.missing(key, compiling.get())
            return super().submit(key, partial(_compile, compile_kernel, line), *rest)

    return Background(_compilers, ignore_errors=True)


def _compile(compile_kernel: Callable, line: str) -> object:
    from triton.runtime import driver

    _passes.submit(int)  # raises once the process ends, which waits for whatever is queued
    if line:
        from .kernels import compiler

        with suppress(Exception):  # where no other process does, this one compiles
            compiler.compile_elsewhere(line)
    kernel = compile_kernel()
    driver.active.launcher_cls(kernel.src, kernel.metadata)  # older Tritons build it with gcc
    return kernel


def rehearse(
    layers: Layers, blocks: Sequence[torch.nn.Module], dtype: torch.dtype, device: torch.device
) -> None:
    """Prepares all launches of a pass through a model, once for all models of its kind."""
    ops, like = choose_ops(device), torch.empty(0, dtype=dtype, device=device)
    if isinstance(ops, Verdict):
        return
    asked, width = BlockExecutor(layers, ops, None), query_layer(blocks[0]).in_features
    rehearse_forms([asked.look(block, like).form for block in blocks], width, dtype, device)


def rehearse_forms(
    forms: Sequence[BlockForm], width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Prepares all launches of a pass through blocks of these forms, which need not be there."""
    ops, what = choose_ops(device), (device, dtype, width, tuple(forms))
    if isinstance(ops, Verdict) or what in _rehearsed:
        return
    spec, head = forms[0].spec, width // forms[0].heads

    def meta(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def operand(kind: Any, n: int, k: int) -> Any:  # as `LayerForm.kind`
        bias = meta(n) if spec.biases else None
        if kind == DENSE:
            return Operand.of(meta(n, k), None, bias)
        rows, weight = (meta(it, k, dtype=storage_of(kind)) for it in (1, n))
        one, scale = (meta(it, 1, dtype=torch.float32) for it in (1, n))
        # As the host's layers do, with which the first block is compared.
        ops.row_quantize(meta(1, k), kind, QuantizedRows(rows, one, 1))
        return Operand.of(weight, scale, bias)

    passes = [(text, IMAGE) for text in TEXTS]
    if not spec.text_layers:  # the text is a pass of its own, which leaves keys and values
        passes = [(0, rows) for rows in (IMAGE, *TEXTS)]
    for text, image in passes:
        tokens = Tokens(1, text, image, image)
        workspace = Workspace(ops)
        known: dict[Any, KnownBlock] = {}
        x = meta(tokens.rows, width)
        for form in forms:
            operands = (
                operand(it.kind, *form.weight_shape(place, width))
                for place, it in enumerate(form.layers)
            )
            norms = QKNorm(*(meta(head) for _ in range(4)))
            known[len(known)] = KnownBlock((), (), form, (), {}, tuple(operands), norms)
        step = Step(tokens, Rotary(*(meta(1, tokens.joint, head // 2) for _ in range(2))), None)
        entry = Entry(*(meta(len(forms), 1, 6 * width) for _ in range(2)))
        mix: Any = lambda q, *_: torch.empty_like(q).flatten(2)  # noqa: E731
        BlockExecutor(None, ops, mix, workspace, known).run_all(list(known), x, step, entry)
    _rehearsed.add(what)  # not before: where this fails, the model that is there may fare better
