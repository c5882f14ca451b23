"""The Linear of quantized models, handed to ComfyUI through its `custom_operations`.

Storage stays ComfyUI's: a `QuantizedTensor` that the host moves, offloads, faults in under dynamic
VRAM, and patches with LoRAs. Only the multiplication is ours, on the plain tensors behind it:
dispatching through `QuantizedTensor` took 217 ms for 144 ms of kernels (NVIDIA H200, 1024x1024).
"""

from __future__ import annotations

import functools
import json
from typing import Any

import comfy.ops
import torch
from comfy.quant_ops import QuantizedTensor
from torch.nn import functional as F

from ...loaders.quantize import COMFY_QUANT
from ...optimizations.linear import choose_gemm, quantized_linear
from .fp8_rows import LAYOUT, FP8RowsLayout

FORMAT_OF_LAYOUT = {LAYOUT: "fp8", "TensorWiseINT8Layout": "int8"}


def quantized_operations(compute_dtype: torch.dtype) -> type:
    """Returns the operations class for a model whose state dict holds `.comfy_quant` entries.

    Args:
        compute_dtype: of the activations, and of every weight that is not quantized.
    """
    base = comfy.ops.mixed_precision_ops({"mixed_ops": True}, compute_dtype)

    class Operations(base):
        class Linear(base.Linear):
            def _load_from_state_dict(
                self, state_dict: dict[str, Any], prefix: str, *rest: Any
            ) -> None:
                if _format(state_dict.get(f"{prefix}comfy_quant")) == COMFY_QUANT["fp8"]:
                    _load_fp8_rows(self, state_dict, prefix, compute_dtype)
                    missing = rest[2]
                    torch.nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)
                    missing.remove(f"{prefix}weight")
                else:
                    super()._load_from_state_dict(state_dict, prefix, *rest)

            def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
                format = FORMAT_OF_LAYOUT.get(getattr(self, "layout_type", None))
                if format is None or _is_rotated(self.weight):
                    return super().forward(input, *args, **kwargs)
                comfy.ops.run_every_op()
                # want_requant: a LoRA that is merged while the weight is faulted in leaves it
                # quantized.
                with comfy.ops.CastBiasWeightContext(
                    self, input, offloadable=True, compute_dtype=input.dtype, want_requant=True
                ) as (weight, bias):
                    if not isinstance(weight, QuantizedTensor):
                        return F.linear(input, weight, bias)
                    if self._computes_in_full_precision(input):
                        return F.linear(input, weight.dequantize(), bias)
                    values, scale = weight._qdata, weight._params.scale
                    if torch.compiler.is_compiling():
                        return quantized_linear(input, values, scale, bias, format)
                    return _gemm(format, input.device).linear(input, values, scale, bias)

            def _computes_in_full_precision(self, input: torch.Tensor) -> bool:
                return (
                    self._full_precision_mm
                    or getattr(self, "comfy_force_cast_weights", False)
                    or input.requires_grad
                )

    return Operations


# One choice for each format and device: 720 layers ask for it in every step.
_gemm = functools.cache(choose_gemm)


def _format(marker: torch.Tensor | None) -> str | None:
    return None if marker is None else json.loads(marker.numpy().tobytes()).get("format")


def _is_rotated(weight: torch.Tensor) -> bool:
    """ConvRot rotates activations too: ComfyUI's own operation does it in one kernel."""
    return isinstance(weight, QuantizedTensor) and getattr(weight._params, "convrot", False)


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
    module.quant_format = settings["format"]
    module.layout_type = LAYOUT
    module._full_precision_mm_config = settings.get("full_precision_matrix_mult", False)
    module._full_precision_mm = module._full_precision_mm_config
    module.weight = torch.nn.Parameter(QuantizedTensor(weight, LAYOUT, params), requires_grad=False)
