"""The kernels in plain torch: what each one computes, and what runs where Triton does not.

Every function has the name and the signature of the Triton kernel in `kernels/<name>.py`.
"""

from __future__ import annotations

import torch

from ..errors import SettingError
from ..planning.formats import LARGEST

# What a format is stored as.
STORAGE = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}

# A row that holds nothing larger counts as zero: the reciprocal of its scale would overflow.
SMALLEST_ROW = 2.0**-100


def row_quantize(x: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes each row by its own largest magnitude.

        scale = max(|row|) / L, or 1 for a zero row;  q = round_to_even(row * (1 / scale))

    with L = 448 for fp8 and 127 for int8. NaN or inf in a row makes its scale NaN or inf, so that
    it shows in whatever is computed from the row.

    Args:
        x: Rows, (M, K), bf16, fp16 or fp32.
        format: "fp8" or "int8".

    Returns:
        q: (M, K), float8_e4m3fn or int8.
        scale: (M, 1), fp32; a row is about q * scale.
    """
    largest = largest_of(format)
    wide = x.float()
    magnitude = wide.abs().amax(dim=-1, keepdim=True)
    # By a tensor: by a number, a card multiplies with the reciprocal, which is not the same.
    exact = magnitude / torch.full((), largest, device=x.device)
    scale = torch.where(magnitude < SMALLEST_ROW, 1.0, exact)
    steps = (wide * scale.reciprocal()).clamp_(-largest, largest)
    if format == "int8":
        steps.round_()
    return steps.to(STORAGE[format]), scale


def scaled_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Multiplies quantized rows and gives back real numbers.

        out[m, n] = (sum over k of a[m, k] * b[n, k]) * scale_a[m] * scale_b[n] + bias[n]

    Sums of int8 are exact, sums of fp8 are fp32; scales and bias are applied in fp32.

    Args:
        a: Activations, (M, K), int8 or float8_e4m3fn.
        b: Weights, (N, K), of a's dtype.
        scale_a: (M, 1), fp32.
        scale_b: (N, 1), fp32.
        bias: (N,) of any float dtype, or None.
        out_dtype: bf16, fp16 or fp32.

    Returns:
        (M, N) in `out_dtype`.
    """
    # int8: K * 127 * 127 stays far below 2**53, and CUDA has no integer matmul in every shape.
    wide = torch.float64 if a.dtype == torch.int8 else torch.float32
    total = (a.to(wide) @ b.to(wide).t()).float()
    total = total.mul_(scale_a).mul_(scale_b.t())
    if bias is not None:
        total = total.add_(bias)
    return total.to(out_dtype)


def largest_of(format: str) -> float:
    """The largest magnitude of a format; SettingError for a name that is none."""
    if format not in LARGEST:
        raise SettingError(f"there is no quantized format {format!r}: use {' or '.join(LARGEST)}")
    return LARGEST[format]
