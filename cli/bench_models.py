"""The random models that benchmark rows run, each built when the first row asks for it."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from .bench_rows import COMFYUI, Row

if TYPE_CHECKING:
    import torch

    from ..optimizations.measure_forward import InputTensors, Output, Repeats
    from ..planning.memory import TransformerShape

# Which function of hosts/comfyui/bench_forward.py prepares the patcher of a variant.
PREPARED_BY = {
    "stock": "stock",
    "stock_cudnn": "stock_cudnn",
    "attention": "ours_attention",
    "unscheduled": "ours",
    "ours": "ours",
}
DENSE = "bf16"


class Models:
    """The models over one set of weights; close them before the next are built.

    Args:
        weights: "bf16", which both hosts share, or a program and a precision: "ours fp8".
        edit: whether it is an Edit-2511.
    """

    def __init__(
        self, weights: str, shape: TransformerShape, device: torch.device, edit: bool
    ) -> None:
        self._weights, self._shape, self._device, self._edit = weights, shape, device, edit
        self._tensors: dict[str, torch.Tensor] | None = None
        self._patcher: Any = None
        self._transformer: Any = None
        self._compiled = False

    def measure(
        self, row: Row, tensors: InputTensors, repeats: Repeats
    ) -> tuple[dict[str, Any], Output | None]:
        """One row at one size: what results have of it, and the output, if it has one."""
        if row.host != COMFYUI:
            return self._measure_diffusers(row, tensors, repeats)
        from ..hosts.comfyui import bench_forward

        if row.variant == "table":
            patcher = self.patcher()
            return bench_forward.measure_table(patcher, tensors, repeats, self._device), None
        patcher = getattr(bench_forward, PREPARED_BY[row.variant])(self.patcher())
        scheduled = row.variant != "unscheduled"
        return bench_forward.measure_pass(
            patcher, tensors, repeats, self._device, scheduled=scheduled
        )

    def patcher(self) -> Any:
        """ComfyUI's model."""
        if self._patcher is None:
            from ..hosts.comfyui.bench_model import bf16_model, quantized_model

            place = self._device, self._edit
            if self._weights == DENSE:
                self._patcher = bf16_model(self._shape, self._dense(), *place)
            else:
                program, precision = self._weights.split()
                stock = program == "comfyui"
                self._patcher = quantized_model(self._shape, precision, *place, stock=stock)
        return self._patcher

    def close(self) -> None:
        """Frees everything."""
        had_patcher = self._patcher is not None
        self._patcher = self._transformer = self._tensors = None
        if self._compiled:
            from ..hosts.diffusers.bench_forward import forget_compiled

            forget_compiled()
        if had_patcher:
            from ..hosts.comfyui.bench_model import forget_models

            forget_models()
        gc.collect()
        if self._device.type == "cuda":
            import torch

            torch.cuda.empty_cache()

    def _measure_diffusers(
        self, row: Row, tensors: InputTensors, repeats: Repeats
    ) -> tuple[dict[str, Any], Output]:
        from ..hosts.diffusers import bench_forward

        if self._transformer is None:
            weights = self._dense()
            self._transformer = bench_forward.build_transformer(self._shape, weights, self._edit)
        if row.variant == "ours":
            return bench_forward.measure_ours(self._transformer, tensors, repeats, self._device)
        if row.variant == "compiled" and not self._compiled:
            bench_forward.compile_blocks(self._transformer)
            self._compiled = True
        if self._compiled:
            bench_forward.forget_compiled()
        return bench_forward.measure_pass(self._transformer, tensors, repeats, self._device)

    def _dense(self) -> dict[str, torch.Tensor]:
        if self._tensors is None:
            from ..loaders.random_weights import random_tensors

            self._tensors = dict(random_tensors(self._shape, self._device))
        return self._tensors
