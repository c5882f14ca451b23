"""What tensor cores compute of 8-bit weights and 8-bit activations, in plain torch on any device.

On a CPU `choose_gemm` expands the weights and leaves the activations alone. A Gaussian layer of
3072 x 3072 is then off by 0.026 in fp8 and not by 0.037, in int8 by 0.0085 and not by 0.0120. So
whatever judges fidelity multiplies through here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ..errors import UnavailableError
from ..spec import LARGEST
from . import reference
from .linear import Gemm, choose_gemm


class Product(Protocol):
    """What multiplies the activations of a layer with its quantized weight."""

    format: str

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `Gemm.linear`: (..., K) and (N, K) to (..., N)."""


@dataclass(frozen=True)
class W8A8:
    """A way to round both operands of a linear layer; the defaults are this package's own.

    Attributes:
        format: "fp8" (e4m3) or "int8".
        weights: "rows" for a scale for each output row, "tensor" for one.
        activations: "rows" for a scale for each token, "tensor" for one, "unit" for none: values
            beyond the format's largest are cut off. ComfyUI's core has one scale for an fp8 weight
            and none for activations, unless the file brings one (comfy/quant_ops.py, 0.33).
    """

    format: str
    weights: str = "rows"
    activations: str = "rows"

    def __str__(self) -> str:
        return f"{self.format} in plain torch, weights by {self.weights}, activations by " + (
            self.activations if self.activations != "unit" else "no scale"
        )

    def quantize_weight(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns values (N, K) and scale (N, 1), fp32, of a weight (N, K)."""
        return _rounded(weight, self.format, self.weights)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x @ (weight * scale).T + bias with x rounded too.

        Args:
            x: (..., K), bf16, fp16 or fp32.
            weight: (N, K), float8_e4m3fn or int8.
            scale: (N, 1), fp32.
            bias: (N,) of any float dtype, or None.

        Returns:
            (..., N) in x's dtype.
        """
        n, k = weight.shape
        rows, row_scale = _rounded(x.reshape(-1, k), self.format, self.activations)
        out = reference.scaled_gemm(rows, weight, row_scale, scale, bias, x.dtype)
        return out.view(*x.shape[:-1], n)


def plain_product(format: str, device: torch.device) -> Product:
    """Rows of scales for both operands, without a card's kernels."""
    if format == "int8" and device.type == "cpu":
        try:  # exact sums too, in a third of the reference's time
            gemm = choose_gemm(format, device, backend="int_mm")
            return replace(gemm, reason="the numbers of tensor cores, on the CPU")
        except UnavailableError:  # a torch without it
            pass
    reference.largest_of(format)
    return W8A8(format)


def tensor_core_product(format: str, device: torch.device) -> Product:
    """What runs on a card, or the same numbers in plain torch where nothing multiplies 8 bits."""
    gemm: Gemm = choose_gemm(format, device)
    return plain_product(format, device) if gemm.weight_only else gemm


def _rounded(x: torch.Tensor, format: str, scales: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of x's shape (M, K) and their scales, (M, 1), fp32."""
    if scales == "rows":
        return reference.row_quantize(x, format)
    if scales == "tensor":
        values, scale = reference.row_quantize(x.reshape(1, -1), format)
        return values.view(x.shape), scale.expand(len(x), 1)
    limit = LARGEST[format]
    values = x.float().clamp(-limit, limit).to(reference.STORAGE[format])
    return values, torch.ones((len(x), 1), device=x.device)
