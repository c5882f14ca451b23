"""A Triton kernel with its arguments, launched once or again and again.

`kernel[grid](...)` binds and inspects every argument in each launch. What it compiles can be
launched by itself, as Triton's own tutorial on fused softmax does, with addresses in place of
tensors: N us in place of M of the processor (CARD's host).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from . import interpreted

ALIGNMENT = 16  # bytes that an address is a multiple of, in what Triton compiles for it

# Takes the tensors that differ from launch to launch.
PreparedLaunch = Callable[..., None]


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
        """Launches it as Triton does, with these tensors or with those that it was made with."""
        self._kernel[self._grid](
            *(varying or self._varying), *self._fixed, **self._constants, **self._options
        )

    def prepared(self) -> PreparedLaunch:
        """Compiles the kernel; what is returned launches it on the current card and stream.

        The fixed tensors have to live as long as that.
        """
        tensors = [x for x in (*self._varying, *self._fixed) if isinstance(x, torch.Tensor)]
        if not_direct() or any(x.data_ptr() % ALIGNMENT for x in tensors):
            return self.once
        compiled = self._kernel.warmup(
            *self._varying, *self._fixed, grid=self._grid, **self._constants, **self._options
        )
        run = compiled[(*self._grid, 1, 1)]
        rest = (*map(_address, self._fixed), *self._constants.values())

        def launch(*varying: torch.Tensor | None) -> None:
            addresses = [x if x is None else x.data_ptr() for x in varying]
            for address in addresses:
                if address is not None and address % ALIGNMENT:
                    self.once(*varying)
                    return
            run(*addresses, *rest)

        return launch


@functools.cache
def not_direct() -> str:
    """Why kernels are launched as Triton does, in one clause; empty where they launch directly."""
    if interpreted():
        return "Triton's interpreter runs"
    from triton.compiler import CompiledKernel

    try:
        known = "grid" in inspect.signature(triton.JITFunction.warmup).parameters
        known = known and "grid" in inspect.signature(CompiledKernel.__getitem__).parameters
    except (AttributeError, ValueError):
        known = False
    return "" if known else f"Triton {triton.__version__} has another launcher than is known here"


def _address(argument: torch.Tensor | int | None) -> int | None:
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
