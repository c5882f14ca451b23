"""Compiles kernels in processes of their own.

A compile takes the GIL some 1,600 times. In a thread beside one that runs Python, as a loader or a
text encoder does, it waits for the GIL each time, and the other one waits for it: encoding took
5.5 s in place of 3.2 beside such threads (Qwen-Image-2.1, an H200's host of 16 cores). A process
that compiles puts the kernel into Triton's cache on disk, where this one finds it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

PACKAGE = __name__.rsplit(".", 3)[0]
FOLDER = Path(__file__).parents[2]
# Seconds after which a process ends that waits for a kernel, and one that compiles.
IDLE, MOST_SECONDS = 30.0, 120.0

# What a process runs: this module, without what a host's import of the package begins.
CODE = f"""
import importlib, sys, types
sys.path.pop(0)  # the folder that the host runs in
sys.modules["qwen_l40s"] = package = types.ModuleType("qwen_l40s")
package.__path__ = [sys.argv[1]]
importlib.import_module("qwen_l40s.{__name__.removeprefix(PACKAGE + ".")}").serve()
"""


class Compilation(NamedTuple):
    """A kernel for arguments of these types.

    Attributes:
        module: Where it is defined, within this package.
        target: The card, by the fields of Triton's `GPUTarget`.
        arguments: The dtype of each aligned tensor, numbers, and None for what is left out.
        constants: By name, with Triton's own options among them.
    """

    module: str
    kernel: str
    target: dict[str, Any]
    arguments: list[Any]
    constants: dict[str, Any]

    @classmethod
    def of(cls, kernel: Any, arguments: Sequence[Any], constants: Mapping[str, Any]) -> Compilation:
        from triton.runtime import driver

        return cls(
            kernel.fn.__module__.removeprefix(f"{PACKAGE}."),
            kernel.fn.__name__,
            dict(vars(driver.active.get_current_target())),
            [getattr(it, "dtype", it) for it in arguments],
            dict(constants),
        )

    def to_json(self) -> str:
        def name(dtype: Any) -> dict[str, str]:
            library = "torch" if isinstance(dtype, torch.dtype) else "triton"
            return {library: str(dtype).removeprefix("torch.")}

        return json.dumps(self, default=name)

    @classmethod
    def from_json(cls, line: bytes) -> Compilation:
        import triton.language as tl

        def dtype(found: dict[str, Any]) -> Any:
            if "torch" in found:
                return getattr(torch, found["torch"])
            return tl.dtype(found["triton"]) if "triton" in found else found

        return cls(*json.loads(line, object_hook=dtype))

    def run(self) -> None:
        """Compiles it in this process, for a card that need not be there."""
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver

        card = SimpleNamespace(
            get_current_target=lambda: GPUTarget(**self.target),
            get_current_device=lambda: str(self.target),  # kernels are kept by device
            get_current_stream=lambda device: 0,
        )
        driver.set_active(card)
        kernel = getattr(importlib.import_module(f"{PACKAGE}.{self.module}"), self.kernel)
        kernel.warmup(*self.arguments, grid=(1,), **self.constants)


# What the kernel is that a thread is about to compile.
current: ContextVar[Compilation | None] = ContextVar("current", default=None)


@contextmanager
def compiling(kernel: Compilation) -> Iterator[None]:
    token = current.set(kernel)
    try:
        yield
    finally:
        current.reset(token)


def is_compiled(key: str, kernel: str) -> bool:
    """Tells whether Triton's cache on disk has a kernel.

    Args:
        key: what Triton names the compilation by.
    """
    with suppress(Exception):  # another Triton may keep its files otherwise
        from triton.runtime.cache import get_cache_manager

        manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        return manager.get_group(f"{kernel[:150]}.json") is not None
    return False


_own = threading.local()  # a thread's process


def compile_elsewhere(kernel: Compilation) -> None:
    """Compiles in this thread's process, which its first kernel begins, and waits for it.

    Raises:
        OSError: there is no such process, or it has ended.
    """
    process = getattr(_own, "process", None)
    if process is None or process.poll() is not None:
        process = _own.process = subprocess.Popen(
            [sys.executable, "-c", CODE, str(FOLDER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # no context on a card
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
    late = threading.Timer(MOST_SECONDS, process.kill)
    late.start()
    try:
        process.stdin.write(f"{kernel.to_json()}\n".encode())
        process.stdin.flush()
        process.stdout.readline()
    finally:
        late.cancel()


def serve() -> None:
    """Compiles the kernels that come on the standard input, a line each, and answers each one."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what compilers print
    ends = _end_later()
    for line in sys.stdin.buffer:
        ends.cancel()
        with suppress(Exception):  # it fails again where it is needed, and is told there
            Compilation.from_json(line).run()
        answers.write(b"\n")
        ends = _end_later()


def _end_later() -> threading.Timer:
    ends = threading.Timer(IDLE, os._exit, (0,))
    ends.daemon = True
    ends.start()
    return ends
