"""The layout of an fp8 weight with one scale for each output row, in ComfyUI's tensor protocol.

Core's own fp8 layout has one scale for the whole weight. A layout class is how ComfyUI moves,
pins, casts, patches and saves a quantized weight; the multiplication is `operations.Linear`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from comfy.quant_ops import QuantizedLayout, register_layout_class
from comfy_kitchen.tensor.base import BaseLayoutParams

from ...loaders.quantize import dequantize_rows, quantize_rows

LAYOUT = "QwenL40S_FP8Rows"


class FP8RowsLayout(QuantizedLayout):
    """e4m3 values [N, K] and float32 scales [N, 1]; a row's largest value becomes 448."""

    MIN_SM_VERSION = (8, 9)

    @dataclass(frozen=True)
    class Params(BaseLayoutParams):
        """scale [N, 1] float32, orig_dtype, orig_shape (N, K)."""

    @classmethod
    def quantize(
        cls,
        tensor: torch.Tensor,
        scale: object = None,
        stochastic_rounding: int | None = 0,
        inplace_ops: bool = False,
        **options: object,
    ) -> tuple[torch.Tensor, FP8RowsLayout.Params]:
        """Quantizes a weight [N, K]; scales are always computed anew.

        ComfyUI asks for stochastic rounding, with a seed above 0, when it merges a LoRA: a change
        smaller than a step of the format then survives on average.
        """
        values, row_scale = quantize_rows(tensor, "fp8", seed=stochastic_rounding or None)
        return values, cls.Params(row_scale, tensor.dtype, tuple(tensor.shape))

    @classmethod
    def dequantize(cls, qdata: torch.Tensor, params: FP8RowsLayout.Params) -> torch.Tensor:
        """Returns [N, K] in the dtype that the weight stands for."""
        return dequantize_rows(qdata, params.scale, params.orig_dtype)

    @classmethod
    def get_plain_tensors(cls, qtensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the values and the scales."""
        return qtensor._qdata, qtensor._params.scale

    @classmethod
    def state_dict_tensors(
        cls, qdata: torch.Tensor, params: FP8RowsLayout.Params
    ) -> dict[str, torch.Tensor]:
        """Returns {suffix of the weight's name: tensor}, as files hold them."""
        return {"": qdata, "_scale": params.scale}


register_layout_class(LAYOUT, FP8RowsLayout)
