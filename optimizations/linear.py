"""Computes linear layers with fp8 or int8 weights: which GEMM runs them, why, and the call itself.

A weight has one scale per output row. The tensor-core backends quantize the activations too, one
dynamic scale per token; `dequantize` expands the weight instead and runs on any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..caches import remembered
from ..machine.card import State
from ..machine.packages import check_kitchen
from ..machine.settings import settings
from ..spec.formats import FORMATS, RowFormat
from ..verdict import Verdict, check_asked, is_assumed, try_once
from . import kernels, reference
from .kernels import sm_of

# `scaled_mm` with fast accumulation, for those who ask for it. On Hopper it keeps so few bits of a
# sum that 12288 products of one sign come out 23 % too small, 3072 of them 5 %; without it the
# error is 0.15 % and the product takes 9 to 18 % longer (H200, M = 4296).
FAST = "scaled_mm_fast"

# So few rows that a separate addition of the bias costs nothing.
FEW_ROWS = 64

# In which order auto tries them, and on what ground; None: every card that is not named.
# sm_90: on an H200, torch 2.11+cu130, triton 3.6, comfy-kitchen 0.2.40, from
# bf16 to bf16 at M = 4296 for (K, N) = 3072x3072, 3072x12288, 12288x3072, in ms: bf16 0.111, 0.399,
# 0.397; fp8 scaled_mm 0.088, 0.278, 0.301, triton 0.095, 0.283, 0.319; int8 triton 0.117, 0.346,
# 0.403, kitchen 0.150, 0.429, 0.478, int_mm 0.311, 1.112, 0.650.
# sm_89: no such card has run it. Rowwise _scaled_mm and comfy-kitchen's int8 both go through
# CUTLASS 2.x there, which was written for that generation.
PREFERENCE: dict[tuple[str, tuple[int, int] | None], tuple[tuple[str, ...], str]] = {
    ("fp8", (9, 0)): (("scaled_mm", "triton"), "measured"),
    ("fp8", None): (("scaled_mm", "triton"), "predicted"),
    ("int8", (9, 0)): (("triton", "kitchen", "int_mm"), "measured"),
    ("int8", None): (("kitchen", "triton", "int_mm"), "predicted"),
}


@dataclass(frozen=True)
class Gemm:
    """How linear layers of one format are computed on one device."""

    format: str  # "fp8" (float8_e4m3fn weights) or "int8"
    backend: str  # a key of the format's `gemms`
    reason: str  # why this one, and why not those that would be faster
    row_quantizer: str = "torch"  # "triton" or "torch": what quantizes the activations
    # whether the next choice is the same: not where the card was full in a trial
    lasting: bool = True

    def __str__(self) -> str:
        return f"{self.format} through {self.backend}: {self.reason}"

    @property
    def weight_only(self) -> bool:
        """Whether activations keep their precision: the format then saves memory, not time."""
        return self.backend == "dequantize"

    def takes(self, n: int, k: int) -> bool:
        """Returns whether the backend multiplies an (N, K) weight; else it is expanded."""
        multiple = FORMATS[self.format].gemms[self.backend]
        return n % multiple == 0 and k % multiple == 0

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        rotation: int = 0,
    ) -> torch.Tensor:
        """Computes x @ (weight * scale).T + bias, x rotated as the weight is.

        Args:
            x: (..., K), bf16, fp16 or fp32, of any strides.
            weight: (N, K), contiguous, float8_e4m3fn or int8.
            scale: (N, 1), fp32, contiguous.
            bias: (N,) of any float dtype, or None.
            rotation: Columns that the weight is rotated in, as of `RowFormat`.

        Returns:
            (..., N) in x's dtype.
        """
        n, k = weight.shape
        if x.numel() == 0:  # which not every backend takes
            return x.new_empty((*x.shape[:-1], n))
        if self.backend == "dequantize" or not self.takes(n, k):
            return _expanded(_rotated(x, rotation), weight, scale, bias)
        if self.backend == "kitchen":
            return _kitchen(x, weight, scale, bias, rotation)
        q, x_scale = self.quantize(x.reshape(-1, k), rotation)
        out = self.linear_quantized(q, x_scale, weight, scale, bias, x.dtype)
        return out.view(*x.shape[:-1], n)

    def quantize(self, x: torch.Tensor, rotation: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows for `linear_quantized`, once for all layers that read them.

        Args:
            x: (M, K), bf16, fp16 or fp32.
            rotation: As of `linear`.

        Returns:
            (M, K) in the format's dtype and the rows' scales, (M, 1), fp32.
        """
        format = RowFormat(self.format, rotation)
        if self.row_quantizer == "triton":
            from .kernels.rows import WIDEST_ROW, row_quantize

            if x.shape[1] <= WIDEST_ROW:
                out = reference.QuantizedRows.empty(x, format)
                row_quantize(x if x.stride(1) == 1 else x.contiguous(), format, out).once()
                return out.values, out.scale
        return reference.row_quantize(x, format)

    def linear_quantized(
        self,
        xq: torch.Tensor,
        x_scale: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes `linear` of rows that are quantized already.

        comfy-kitchen has no public call for such rows: Triton or `_int_mm` stands in for it.

        Args:
            xq: (M, K) of weight's dtype, contiguous.
            x_scale: (M, 1), fp32.
            out_dtype: bf16, fp16 or fp32.
            out: Where to write, (M, N), contiguous, in `out_dtype`; None for a new tensor.

        Returns:
            (M, N) in `out_dtype`; `out` where it was given.
        """
        backend = self.backend
        if backend == "kitchen":
            backend = "triton" if self.row_quantizer == "triton" else "int_mm"
        if backend == "dequantize" or not self.takes(*weight.shape):
            x = _expand(xq, x_scale, out_dtype)
            return dense_linear(x, _expand(weight, scale, out_dtype), bias, out=out)
        if backend == "triton":
            from .kernels.scaled_gemm import scaled_gemm

            if out is None:
                out = xq.new_empty(len(xq), len(weight), dtype=out_dtype)
            scaled_gemm(xq, weight, x_scale, scale, bias, out).once()
            return out
        if backend == "int_mm":
            return _int_mm(xq, x_scale, weight, scale, bias, out_dtype, out)
        fast = backend == FAST
        return _scaled_mm(xq, x_scale, weight, scale, bias, out_dtype, out, fast)


def dense_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    gelu: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes x @ weight.T + bias, with a tanh GELU in the GEMM's epilogue where the card has one.

    cuBLASLt's GELU is the tanh form. The same call on a CPU computes the erf form, so that there a
    GELU of its own follows.

    Args:
        x: (M, K), bf16, fp16 or fp32.
        weight: (N, K) in x's dtype.
        bias: (N,), or None.
        gelu: Whether the GELU is applied.
        out: Where to write, (M, N), contiguous, in x's dtype; None for a new tensor.

    Returns:
        (M, N) in x's dtype; `out` where it was given.
    """
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    if bias is None:
        result = torch.mm(x, weight.t(), out=out)
    elif gelu and x.is_cuda:
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True, out=out)
    else:
        result = torch.addmm(bias, x, weight.t(), out=out)
    return torch.ops.aten.gelu_(result, approximate="tanh") if gelu else result


def _quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    format: str,
    rotation: int = 0,
) -> torch.Tensor:
    """Returns `Gemm.linear` of the GEMM that is chosen for x's device, as one operator.

    torch.compile does not look into it: neither the choice nor the launches can be traced. Eager
    code calls `Gemm.linear` itself, which costs less Python.
    """
    return choose_gemm(format, x.device).linear(x, weight, scale, bias, rotation)


def _shape_alone(x: torch.Tensor, weight: torch.Tensor, *how: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


# `torch.library.custom_op` looks for its caller's source among all modules: 0.2 s of a first load.
_LIBRARY = torch.library.Library("qwen_l40s", "FRAGMENT")
if not hasattr(torch.ops.qwen_l40s, "quantized_linear"):  # by a second import of this package
    _LIBRARY.define(
        "quantized_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias, str format, "
        "SymInt rotation=0) -> Tensor",
        tags=torch.Tag.pt2_compliant_tag,
    )
    _LIBRARY.impl("quantized_linear", _quantized_linear, "CompositeExplicitAutograd")
    _LIBRARY.impl("quantized_linear", _shape_alone, "Meta")
quantized_linear = torch.ops.qwen_l40s.quantized_linear.default


def choose_gemm(format: str, device: torch.device, *, backend: str | None = None) -> Gemm:
    """Returns the GEMM for a format on a device.

    Args:
        format: "fp8" or "int8".
        backend: A key of the format's `gemms`, which has to run here. Without it that of the
            settings counts, and without that the first backend of `PREFERENCE` that runs,
            `dequantize` after all others.

    Raises:
        SettingError: There is no such format or backend.
        UnavailableError: The backend that was asked for cannot run on this device.
    """
    reference.largest_of(format)
    device = _numbered(device)
    asked = backend or getattr(settings(), f"gemm_{format}")
    if asked:
        gemms = FORMATS[format].gemms
        check_asked(
            f"the {format} GEMM", asked, gemms, lambda name: _refusal(name, format, device), device
        )
        reason = "requested" if backend else "requested by the settings"
        return _gemm(asked, format, device, reason)
    if device.type == "cpu":
        return Gemm(format, "dequantize", f"no GPU: {format} saves memory here, not time")
    order, ground = PREFERENCE.get((format, sm_of(device)), PREFERENCE[format, None])
    refused: list[str] = []
    lasting = True
    for name in order:
        refusal = _refusal(name, format, device)
        if not refusal:
            reason = "; ".join([f"{ground} to be the fastest that runs here", *refused])
            return _gemm(name, format, device, reason, lasting)
        refused.append(f"not {name}: {refusal}")
        lasting = lasting and refusal.final
    return Gemm(format, "dequantize", "; ".join(refused), lasting=lasting)


def why_not_int8(device: torch.device) -> str:
    """Says why int8 products that are faster than those in bf16 do not run on an NVIDIA card; empty
    where they do. A card without memory for a trial counts as one on which they do.
    """
    if (asked := settings().gemm_int8) == "dequantize":
        return f"gemm_int8 {asked} is set"
    if asked:
        return ""
    refused = []
    for name in ("kitchen", "triton"):  # the second one compiles; `int_mm` is slower than bf16
        refusal = _refusal(name, "int8", _numbered(device))
        if refusal is None or not refusal.final:
            return ""
        refused.append(f"{name}: {refusal}")
    return f"int8 products do not run ({'; '.join(refused)})"


def _numbered(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


_known: dict[tuple[str, torch.device], Gemm] = remembered({})


def known_gemm(format: str, device: torch.device) -> Gemm:
    """Remembers what `choose_gemm` chose: 720 layers ask for it in every step."""
    gemm = _known.get((format, device))
    if gemm is None:
        gemm = choose_gemm(format, device)
        if gemm.lasting and not is_assumed():
            _known[format, device] = gemm
    return gemm


def _gemm(
    backend: str, format: str, device: torch.device, reason: str, lasting: bool = True
) -> Gemm:
    if backend == "dequantize":
        return Gemm(format, backend, reason)
    refusal = _refusal("triton", format, device)
    quantizer = "torch" if refusal else "triton"
    return Gemm(format, backend, reason, quantizer, lasting and (not refusal or refusal.final))


def _refusal(backend: str, format: str, device: torch.device) -> Verdict | None:
    if backend == "dequantize":
        return None
    if fact := _unsupported(backend, format, device):
        return Verdict(fact, final=True)
    gemm = Gemm(format, backend, "", "triton" if backend == "triton" else "torch")
    return try_once((gemm, device), lambda: _trial(gemm, device))


def _unsupported(backend: str, format: str, device: torch.device) -> str:
    sm, oldest = sm_of(device), FORMATS[format].oldest
    if sm is None and device.type != "cpu":
        return f"{device} is not an NVIDIA GPU that torch can use"
    if sm is not None and sm < oldest:
        return f"sm_{sm[0]}{sm[1]}, needs sm_{oldest[0]}{oldest[1]} or newer"
    interpreted = backend == "triton" and kernels.interpreted()
    if sm is None and backend in ("triton", "kitchen") and not interpreted:
        return "needs an NVIDIA GPU"
    if backend == "kitchen":
        capability = check_kitchen(torch)
        usable = capability.state is State.USABLE
        return "" if usable else f"comfy-kitchen {capability.why.fact}"
    return kernels.missing() if backend == "triton" else ""


def prepare_trial(format: str) -> None:
    """Compiles what a trial of a format launches, for the current card and without its memory."""
    from .kernels.rows import row_quantize
    from .kernels.scaled_gemm import scaled_gemm

    x, weight, scale, bias, rotation = _operands(format, torch.device("meta"))
    rows = reference.QuantizedRows.empty(x, RowFormat(format, rotation))
    row_quantize(x, RowFormat(format, rotation), rows).prepared()
    scaled_gemm(rows.values, weight, rows.scale, scale, bias, x.new_empty(32, 32)).prepared()


def _operands(format: str, device: torch.device) -> tuple[Any, ...]:
    """Makes operands of Qwen-Image's columns and rotation: a trial compiles nothing extra."""
    small = device.type == "cpu"
    columns, rotation = (64, 0) if small else (3072, next(iter(FORMATS[format].rotations), 0))
    # Rotated, ones are ones. Of more than 64 an e4m3 sum may be rounded.
    x = torch.ones(32, columns, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(32, columns, device=device)
    weight[:, :64] = 1
    weight = weight.to(reference.storage_of(RowFormat(format)))
    return x, weight, torch.full((32, 1), 0.5, device=device), x[0, :32], rotation


def _trial(gemm: Gemm, device: torch.device) -> str:
    right = bool((gemm.linear(*_operands(gemm.format, device)) == 33).all())
    return "" if right else "a trial gave a wrong result"


def _expand(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiplies values by their scale in one temporary; the product is rounded once."""
    return values.to(dtype).mul_(scale)


def _rotated(x: torch.Tensor, rotation: int) -> torch.Tensor:
    if not rotation:
        return x
    rows = x.reshape(-1, x.shape[-1]).float()
    return reference.rotate(rows, rotation).to(x.dtype).view(x.shape)


def _expanded(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    bias = None if bias is None else bias.to(x.dtype)
    return F.linear(x, _expand(weight, scale, x.dtype), bias)


def _scaled_mm(xq, x_scale, weight, scale, bias, out_dtype, out, fast):
    rows = len(xq)
    if rows == 1:  # its only scale would be taken for one of the whole matrix
        xq, x_scale = F.pad(xq, (0, 0, 0, 15)), x_scale.expand(16, 1).contiguous()
    if x_scale.data_ptr() % 16:  # cuBLASLt takes no such address
        x_scale = x_scale.clone()
    # Up to 42 rows cuBLASLt has no kernel for K = 12288 with a bias (H200, torch 2.11).
    fused = bias is not None and rows > FEW_ROWS
    direct = out is not None and rows > 1 and out.dtype == torch.bfloat16
    # With a scale for each row CUDA writes bf16 only.
    result = torch._scaled_mm(
        xq,
        weight.t(),
        scale_a=x_scale,
        scale_b=scale.t(),
        bias=bias.to(torch.bfloat16) if fused else None,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
        **({"out": out} if direct else {}),
    )[:rows]
    if not direct:
        result = _deliver(result, out_dtype, out)
    return result if fused or bias is None else result.add_(bias)


def _int_mm(xq, x_scale, weight, scale, bias, out_dtype, out):
    rows = xq.shape[0]
    if rows <= 16:  # CUDA refuses them
        xq = F.pad(xq, (0, 0, 0, 32 - rows))
    result = (torch._int_mm(xq, weight.t())[:rows] * x_scale).mul_(scale.t())
    if bias is not None:
        result.add_(bias)
    return _deliver(result, out_dtype, out)


def _deliver(
    result: torch.Tensor, out_dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    return result.to(out_dtype) if out is None else out.copy_(result)


def _kitchen(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    rotation: int,
) -> torch.Tensor:
    # Past the registry and the operator, whose Python costs more than the launch.
    from comfy_kitchen.backends.cuda import int8_linear

    rotated = {"convrot": True, "convrot_groupsize": rotation} if rotation else {}
    with kernels.on_card_of(x):
        return int8_linear(x, weight, scale, bias, x.dtype, **rotated)
