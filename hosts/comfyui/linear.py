"""Defines quantized linear layers in ComfyUI: the fp8 layout with a scale for each row, where
ComfyUI's has one for the weight, and the Linear. A layout is how ComfyUI moves, pins, casts,
patches and saves a quantized weight; `operations.Linear` multiplies it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import comfy.ops
import torch
from comfy.quant_ops import (
    QuantizedLayout,
    QuantizedTensor,
    TensorWiseINT8Layout,
    register_layout_class,
)
from comfy_kitchen.tensor.base import BaseLayoutParams
from torch.nn import functional as F

from ...caches import cached
from ...errors import UnavailableError
from ...loaders.quantize import dequantize_rows, quantize_rows
from ...optimizations import reference
from ...optimizations.blocks.products import PackedWeight
from ...optimizations.fused import TORCH, choose_ops
from ...optimizations.linear import known_gemm, quantized_linear
from ...optimizations.patches import put
from ...spec.formats import FORMATS
from ...verdict import Verdict

FP8_ROWS, INT8_ROWS = FORMATS["fp8"], FORMATS["int8"]
# {ComfyUI's class: the format of its values}
LAYOUTS = {it: name for name, form in FORMATS.items() for it in (form.layout, *form.one_scale)}


class FP8RowsLayout(QuantizedLayout):
    """e4m3 values [N, K] and float32 scales [N, 1]; a row's largest value becomes 448."""

    MIN_SM_VERSION = FP8_ROWS.oldest

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
    def get_plain_tensors(cls, qtensor: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return qtensor._qdata, qtensor._params.scale

    @classmethod
    def state_dict_tensors(
        cls, qdata: torch.Tensor, params: FP8RowsLayout.Params
    ) -> dict[str, torch.Tensor]:
        """Returns {suffix of the weight's name: tensor}, as files hold them."""
        return {"": qdata, "_scale": params.scale}


# QuantizedTensor finds a layout by its name.
register_layout_class(FP8_ROWS.layout, FP8RowsLayout)


# The Linear of quantized models, handed to ComfyUI through its `custom_operations`.
#
# Storage stays ComfyUI's: a `QuantizedTensor` that the host moves, offloads, faults in under
# dynamic VRAM, and patches with LoRAs. Only the multiplication is ours, on the plain tensors behind
# it: dispatching through `QuantizedTensor` took 217 ms for 144 ms of kernels (NVIDIA H200,
# 1024x1024).


class AroundLinear(NamedTuple):
    """What ComfyUI 0.40 and newer ask of a linear layer beside its product:
    `residual + residual_scale * linear(input_act(x))`, with ComfyUI's names of the activations.
    """

    input_act: str | None = None
    act_weight: torch.Tensor | torch.nn.Module | None = None
    residual: torch.Tensor | None = None
    residual_scale: torch.Tensor | None = None

    def given(self) -> dict[str, Any]:
        """Returns the arguments that are there, by name; ComfyUI 0.33 would drop them in silence.

        Raises:
            UnavailableError: this ComfyUI's linear layers take none of them.
        """
        if self.input_act is None and self.residual is None:
            return {}
        given = {name: value for name, value in self._asdict().items() if value is not None}
        if not hasattr(comfy.ops, "_eager_input_act"):
            raise UnavailableError(
                f"A linear layer was called with {', '.join(given)}, which quantized layers do "
                "not support: update ComfyUI, or remove the node that passes it."
            )
        return given

    def run(self, product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Computes the product with what is around it, by ComfyUI's functions.

        Args:
            product: from [..., K] to [..., N].
        """
        if not self.given():
            return product(x)
        y = product(comfy.ops._eager_input_act(x, self.input_act, self.act_weight))
        return comfy.ops._linear_residual(y, self.residual, self.residual_scale)


# Operations whose `forward` is a product with the weight that ComfyUI's cast context gives.
DENSE_CLASSES = (comfy.ops.disable_weight_init.Linear, comfy.ops.manual_cast.Linear)


def is_mixed(kind: type) -> bool:
    """Returns whether layers of a class are ComfyUI's, or ours, of a model with quantized ones."""
    core = "mixed_precision_ops.<locals>.MixedPrecisionOps.Linear"
    return kind.__module__ == __name__ or (
        (kind.__module__, kind.__qualname__) == ("comfy.ops", core)
    )


def quantized_operations(compute_dtype: torch.dtype) -> type:
    """Returns the operations class for a model whose state dict holds `.comfy_quant` entries."""
    base: Any = comfy.ops.mixed_precision_ops({"mixed_ops": True}, compute_dtype)

    class Operations(base):
        class Linear(base.Linear):
            def _load_from_state_dict(
                self, state_dict: dict[str, Any], prefix: str, *rest: Any
            ) -> None:
                if _format(state_dict.get(f"{prefix}comfy_quant")) == FP8_ROWS.marker:
                    _load_fp8_rows(self, state_dict, prefix, compute_dtype)
                    missing = rest[2]
                    torch.nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)
                    missing.remove(f"{prefix}weight")
                else:
                    super()._load_from_state_dict(state_dict, prefix, *rest)

            def forward(
                self,
                input: torch.Tensor,
                input_act: str | None = None,
                act_weight: torch.Tensor | torch.nn.Module | None = None,
                residual: torch.Tensor | None = None,
                residual_scale: torch.Tensor | None = None,
                **others: Any,
            ) -> torch.Tensor:
                around = AroundLinear(input_act, act_weight, residual, residual_scale)
                format = _format_of_product(self)
                if others or format is None:
                    # An argument that is unknown here, as well: ComfyUI's own code knows it.
                    return super().forward(input, **around.given(), **others)
                comfy.ops.run_every_op()
                # want_requant: a LoRA that is merged while the weight is faulted in leaves it
                # quantized.
                with comfy.ops.CastBiasWeightContext(
                    self, input, offloadable=True, compute_dtype=input.dtype, want_requant=True
                ) as (weight, bias):
                    return around.run(lambda x: self._product(x, weight, bias, format), input)

            def _product(
                self,
                input: torch.Tensor,
                weight: Any,
                bias: torch.Tensor | None,
                format: str,
            ) -> torch.Tensor:
                if not isinstance(weight, QuantizedTensor):
                    return F.linear(input, weight, bias)
                if weight._layout_cls == INT8_ROWS.packed:
                    weight = _as_int8(weight)
                if self._computes_in_full_precision(input):
                    return F.linear(input, weight.dequantize(), bias)
                values, scale = weight._qdata, weight._params.scale
                rotation = rotation_of(weight._params)
                if torch.compiler.is_compiling():
                    return quantized_linear(input, values, scale, bias, format, rotation)
                gemm = known_gemm(format, input.device)
                return gemm.linear(input, values, scale, bias, rotation)

            def _computes_in_full_precision(self, input: torch.Tensor) -> bool:
                return (
                    getattr(self, "_full_precision_mm", True)
                    or getattr(self, "comfy_force_cast_weights", False)
                    or input.requires_grad
                )

    return Operations


def _format(marker: torch.Tensor | None) -> str | None:
    return None if marker is None else json.loads(marker.numpy().tobytes()).get("format")


def _format_of_product(layer: Any) -> str | None:
    """Returns "fp8" or "int8" where the product is ours."""
    layout = getattr(layer, "layout_type", None)
    if layout == INT8_ROWS.packed:
        return "int8" if is_packed_int8(layer.weight._params) else None
    format = LAYOUTS.get(layout)
    return format if format and layout == FORMATS[format].layout else None


def is_packed_int8(params: Any) -> bool:
    """Returns whether a weight in 4 or 6 bits stands for int8 alone, in the order of files: newer
    versions of comfy-kitchen may have another on the card.
    """
    return params.correction is None and not getattr(params, "mma_packed", False)


def packed_parts(weight: QuantizedTensor) -> tuple[PackedWeight, torch.Tensor]:
    """Returns a weight in 4 or 6 bits and its rows' scales, (N, 1), without copies."""
    codes, params = weight._qdata, weight._params
    scale = params.scale.view(torch.uint8) if params.scale.itemsize == 1 else params.scale
    bits = codes.shape[1] * 8 // params.orig_shape[1]
    return PackedWeight(codes, scale, params.codebook, bits), params.s_channel.view(-1, 1)


def _as_int8(weight: QuantizedTensor) -> QuantizedTensor:
    packed, scale = packed_parts(weight)
    own = weight._params
    params = TensorWiseINT8Layout.Params(
        scale=scale,
        orig_dtype=own.orig_dtype,
        orig_shape=own.orig_shape,
        convrot=True,
        convrot_groupsize=own.convrot_groupsize,
    )
    compiling = torch.compiler.is_compiling()  # which cannot trace a launch
    if compiling or not _launches(scale.device):
        return QuantizedTensor(reference.decode_weight(*packed), INT8_ROWS.layout, params)
    from ...optimizations.kernels.scaled_gemm import decode_weight

    values = torch.empty(own.orig_shape, dtype=torch.int8, device=scale.device)
    decode_weight(*packed, values).once()
    return QuantizedTensor(values, INT8_ROWS.layout, params)


@cached
def _launches(device: torch.device) -> bool:
    ops = choose_ops(device)
    return not isinstance(ops, Verdict) and ops is not TORCH


def rotation_of(params: Any) -> int:
    """Returns ConvRot's group size in a quantized weight's params; 0 where nothing is rotated."""
    return params.convrot_groupsize if getattr(params, "convrot", False) else 0


def _load_fp8_rows(
    module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, compute_dtype: torch.dtype
) -> None:
    """Takes weight, scale and marker out of the state dict, as core does for its own formats."""
    settings = json.loads(state_dict.pop(f"{prefix}comfy_quant").numpy().tobytes())
    weight = state_dict.pop(f"{prefix}weight")
    params = FP8RowsLayout.Params(
        scale=state_dict.pop(f"{prefix}weight_scale"),
        orig_dtype=compute_dtype,
        orig_shape=tuple(weight.shape),
    )
    quantized = QuantizedTensor(weight, FP8_ROWS.layout, params)
    full_precision = settings.get("full_precision_matrix_mult", False)
    put(
        module,
        quant_format=settings["format"],
        layout_type=FP8_ROWS.layout,
        _full_precision_mm_config=full_precision,
        _full_precision_mm=full_precision,
        weight=torch.nn.Parameter(quantized, requires_grad=False),
    )
