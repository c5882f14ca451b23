"""Compiles kernels in processes of their own.

A compile takes the GIL some 1,600 times. In a thread beside one that runs Python, as a loader or a
text encoder does, it waits for the GIL each time, and the other one waits for it: encoding took
5.5 s in place of 3.2 beside such threads (Qwen-Image-2.1, an H200's host of 16 cores). A process
that compiles puts the kernel into Triton's cache on disk, where this one finds it.

The Comfy registry's copy has no such file, as nothing there may start a process.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

from .launch import CompiledFor

PACKAGE = __name__.rsplit(".", 3)[0]
FOLDER = Path(__file__).parents[2]
# Seconds after which a process ends that waits for a kernel, and one that compiles.
IDLE, MOST_SECONDS = 30.0, 120.0

# What a process runs: this module, without what a host's import of the package begins.
CODE = f"""
import importlib, sys, types
sys.path[:] = [it for it in sys.path if it]  # without the folder that the host runs in
sys.modules["qwen_l40s"] = package = types.ModuleType("qwen_l40s")
package.__path__ = [sys.argv[1]]
importlib.import_module("qwen_l40s.{__name__.removeprefix(PACKAGE + ".")}").serve()
"""


def missing(key: str, what: CompiledFor) -> str:
    """Describes a kernel for the current card in a line; empty where Triton's cache has it.

    Args:
        key: what Triton names the compilation by.
    """
    function, arguments, constants = what
    name = function.fn.__name__
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    if manager.get_group(f"{name[:150]}.json") is not None:
        return ""

    def named(dtype: Any) -> dict[str, str]:
        library = "torch" if isinstance(dtype, torch.dtype) else "triton"
        return {library: str(dtype).removeprefix("torch.")}

    module = function.fn.__module__.removeprefix(f"{PACKAGE}.")
    target = vars(driver.active.get_current_target())
    types = [getattr(it, "dtype", it) for it in arguments]
    return json.dumps([module, name, target, types, constants], default=named)


_own = threading.local()  # a thread's process


def compile_elsewhere(line: str) -> None:
    """Compiles in this thread's process, which its first kernel begins, and waits for it.

    Args:
        line: of `missing`.

    Raises:
        OSError: there is no such process, or it has ended.
    """
    process = getattr(_own, "process", None)
    if process is not None and process.poll() is not None:
        process.communicate()  # closes its pipes
        process = None
    if process is None:
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
        process.stdin.write(f"{line}\n".encode())
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
        with suppress(Exception):  # it fails again where it is needed, and is reported there
            _compile(line)
        answers.write(b"\n")
        ends = _end_later()


def _compile(line: bytes) -> None:
    def dtype(found: dict[str, Any]) -> Any:
        if "torch" in found:
            return getattr(torch, found["torch"])
        return tl.dtype(found["triton"]) if "triton" in found else found

    module, name, target, types, constants = json.loads(line, object_hook=dtype)
    card = SimpleNamespace(  # which need not be there
        get_current_target=lambda: GPUTarget(**target),
        get_current_device=lambda: str(target),  # kernels are kept by device
        get_current_stream=lambda device: 0,
    )
    driver.set_active(card)
    kernel = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)
    kernel.warmup(*types, grid=(1,), **constants)


def _end_later() -> threading.Timer:
    ends = threading.Timer(IDLE, os._exit, (0,))
    ends.daemon = True
    ends.start()
    return ends
