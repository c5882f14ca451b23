"""A Triton kernel with its arguments, launched once or again and again.

`kernel[grid](...)` binds and inspects every argument in each launch. What it compiles can be
launched by itself, with addresses in place of tensors: 6 us of the processor in place of 28 (int8
GEMM with 10 arguments and 8 constants, triton 3.6, an H100's host).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime import driver

from ...caches import cached
from . import interpreted, on_card_of

ALIGNMENT = 16  # bytes that an address is a multiple of, in what Triton compiles for it

# Takes the tensors that differ from launch to launch.
PreparedLaunch = Callable[..., None]


class CompiledFor(NamedTuple):
    """A kernel, and what it is compiled for: tensors by their dtypes, numbers and constants."""

    kernel: triton.JITFunction
    arguments: tuple[torch.Tensor | int | None, ...]
    constants: dict[str, Any]


# What a thread compiles in advance.
compiling: ContextVar[CompiledFor | None] = ContextVar("compiling", default=None)


class Launch:
    """One launch of a kernel whose programs are counted in one dimension.

    Args:
        kernel: Its parameters are those of `varying`, of `fixed` and of `constants`, in this order.
        programs: How many run.
        varying: The tensors that may be others in another launch, of the same dtypes and strides;
            None leaves one out.
        fixed: Tensors and numbers.
        constants: What is compiled in, by name.
        options: Triton's own: num_warps, num_stages.
    """

    def __init__(
        self,
        kernel: triton.JITFunction,
        programs: int,
        varying: Sequence[torch.Tensor | None],
        fixed: Sequence[torch.Tensor | int | None],
        constants: dict[str, Any],
        **options: int,
    ) -> None:
        self._kernel = kernel
        self._grid = (programs,)
        self._varying = tuple(varying)
        self._fixed = tuple(fixed)
        self._constants = constants
        self._options = options

    def once(self, *varying: torch.Tensor | None) -> None:
        """Launches it as Triton does, with these tensors or with those that it was made with, on
        their card.
        """
        arguments = *(varying or self._varying), *self._fixed
        with on_card_of(next(x for x in arguments if isinstance(x, torch.Tensor))):
            self._kernel[self._grid](*arguments, **self._constants, **self._options)

    def prepared(self) -> PreparedLaunch:
        """Compiles the kernel; what is returned launches it on the current stream of this card.

        It holds the fixed tensors. With tensors on the meta device it is compiled for aligned ones
        on the current card, and never launched.
        """
        varying, self._varying = self._varying, ()  # which would live as long
        tensors = [x for x in (*varying, *self._fixed) if isinstance(x, torch.Tensor)]
        meta = tensors[0].is_meta
        if not meta and (not_direct() or any(x.data_ptr() % ALIGNMENT for x in tensors)):
            return self.once
        arguments, constants = (*varying, *self._fixed), {**self._constants, **self._options}
        if meta:
            token = compiling.set(CompiledFor(self._kernel, arguments, constants))
            try:
                self._kernel.warmup(*arguments, grid=self._grid, **constants)
            finally:
                compiling.reset(token)
            return lambda *varying: None
        compiled = self._kernel.warmup(*arguments, grid=self._grid, **constants)
        if hasattr(compiled, "result"):  # compiled in another thread
            compiled = compiled.result()
        # Past `compiled[grid]`, which also calls the hooks of profilers.
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        device, stream_of = torch.cuda.current_device(), driver.active.get_current_stream
        rest = (*map(_address, self._fixed), *self._constants.values())
        (programs,) = self._grid

        def launch(*varying: torch.Tensor | None) -> None:
            addresses = [x if x is None else x.data_ptr() for x in varying]
            for address in addresses:
                if address is not None and address % ALIGNMENT:
                    self.once(*varying)
                    return
            stream = stream_of(device)
            run(programs, 1, 1, stream, function, metadata, None, None, None, *addresses, *rest)

        # Triton 3.8 unloads what nobody holds.
        launch.kernel = compiled  # type: ignore[attr-defined]
        return launch


# What is called of Triton's CompiledKernel, as its own `__getitem__` calls it.
KNOWN_CALL = (
    "self.run(grid[0], grid[1], grid[2], stream, self.function, self.packed_metadata, "
    "launch_metadata, knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *args)"
)


@cached
def not_direct() -> str:
    """Why kernels are launched as Triton does, in one clause; empty where they launch directly."""
    if interpreted():
        return "Triton's interpreter runs"
    try:
        source = " ".join(inspect.getsource(CompiledKernel.__getitem__).split())
        known = KNOWN_CALL in source
        known = known and "grid" in inspect.signature(triton.JITFunction.warmup).parameters
    except (AttributeError, OSError, TypeError, ValueError):
        known = False
    return "" if known else f"Triton {triton.__version__} has another launcher than is known here"


def _address(argument: torch.Tensor | int | None) -> int | None:
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
