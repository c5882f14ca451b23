"""Chooses the fused kernels of a block: Triton on a card, plain torch without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..caches import cached
from ..spec.formats import RowFormat
from ..verdict import Verdict, try_once
from . import kernels, reference
from .reference import (
    AttentionPart,
    Guidance,
    Modulation,
    QKNorm,
    QuantizedRows,
    Rotary,
    RowOrder,
    Tokens,
)

# Takes the tensors that differ from call to call, of the shapes and strides that it is for.
Prepared = Callable[..., None]


class GuidedRows(Protocol):
    """`reference.guided_rows` itself or its kernel, which nothing prepares."""

    def __call__(
        self, guidance: Guidance, parts: Sequence[AttentionPart], first: int = 0, second: int = 0
    ) -> Tensor: ...


class ScaledGemm(Protocol):
    """Prepares `reference.scaled_gemm` into `out`."""

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor | None,
        scale_b: Tensor | None,
        bias: Tensor | None,
        out: Tensor,
        beside: tuple[Tensor, Tensor] | None = None,
        gelu: bool = False,
        swiglu: bool = False,
    ) -> Prepared:
        """Takes b, scale_b, bias, the second matrix of `beside`, and a."""


class Ops(Protocol):
    """The kernels: each method prepares one for tensors like those that it is given, and for where
    they are read and written; `reference.py` says what each computes.
    """

    name: str
    guided_rows: GuidedRows
    scaled_gemm: ScaledGemm | None  # None where cuBLAS alone multiplies

    def residual_norm(
        self,
        x: Tensor,
        branch: Tensor | None,
        gates: Modulation | None,
        norms: Modulation | None,
        tokens: Tokens,
        eps: float,
        format: RowFormat | None,
        out: Tensor | QuantizedRows | None,
        plain: Tensor | None = None,
    ) -> Callable[[Tensor, Modulation | None, Modulation | None], None]:
        """Takes x, gates and norms, and writes h into `out`."""

    def qk_norm_rope(
        self,
        q: Tensor,
        k: Tensor,
        norm: QKNorm | None,
        rotary: Rotary | None,
        tokens: Tokens,
        eps: float,
        first: int = 0,
    ) -> Callable[[QKNorm | None, Rotary | None], None]:
        """Takes norm and rotary."""

    def gelu_quantize(
        self, x: Tensor, format: RowFormat, out: QuantizedRows, keep: bool = False
    ) -> Callable[[Tensor], None]:
        """Takes x."""

    def row_quantize(
        self, x: Tensor, format: RowFormat, out: QuantizedRows
    ) -> Callable[[Tensor], None]:
        """Takes x."""

    def swiglu_quantize(
        self,
        gate: Tensor,
        up: Tensor,
        format: RowFormat | None,
        out: QuantizedRows | None,
        keep: bool = False,
    ) -> Callable[[], None]:
        """Takes nothing."""

    def low_rank_rows(
        self,
        x: Tensor,
        text_down: Tensor | None,
        image_down: Tensor | None,
        order: RowOrder,
        out: Tensor,
    ) -> Prepared:
        """Takes x, text_down and image_down."""

    def decode_weight(
        self, codes: Tensor, group_scale: Tensor, codebook: Tensor | None, bits: int, out: Tensor
    ) -> Prepared:
        """Takes codes, group_scale and codebook."""


def _write(out: Tensor | QuantizedRows | None, h: Tensor | None, scale: Tensor | None) -> None:
    if isinstance(out, QuantizedRows):
        out.write(h, scale)
    elif out is not None:
        out.copy_(h)


class _Torch:
    name = "plain torch: no GPU"
    scaled_gemm: Any = None
    guided_rows = staticmethod(reference.guided_rows)

    def residual_norm(self, x, branch, gates, norms, tokens, eps, format, out, plain=None):
        return lambda x, gates, norms: _write(
            out, *reference.residual_norm(x, branch, gates, norms, tokens, eps, format, plain)
        )

    def qk_norm_rope(self, q, k, norm, rotary, *how):
        return lambda norm, rotary: reference.qk_norm_rope(q, k, norm, rotary, *how)

    def gelu_quantize(self, x, format, out, keep=False):
        return lambda x: out.write(*reference.gelu_quantize(x, format, keep))

    def row_quantize(self, x, format, out):
        return lambda x: out.write(*reference.row_quantize(x, format))

    def swiglu_quantize(self, gate, up, format, out, keep=False):
        return lambda: _write(
            out, *(reference.swiglu_quantize(gate, up, format, keep) or (None, None))
        )

    def low_rank_rows(self, x, text_down, image_down, order, out):
        return lambda *given: reference.low_rank_rows(*given, order, out)

    def decode_weight(self, codes, group_scale, codebook, bits, out):
        return lambda *packed: out.copy_(reference.decode_weight(*packed, bits))


class _Triton:
    def __init__(self, name: str, **kernels: Callable[..., Any]) -> None:
        self.name = name
        vars(self).update(kernels)


TORCH: Ops = _Torch()


def choose_ops(device: torch.device) -> Ops | Verdict:
    """Gives the kernels for a device, or why there are none."""
    if device.type == "cpu" and not kernels.interpreted():
        return TORCH
    if device.type != "cpu" and (device.type != "cuda" or torch.version.hip is not None):
        return Verdict(f"{device.type} is not an NVIDIA GPU", final=True)
    if kernels.missing():
        return Verdict(kernels.missing(), final=True)
    ops = _triton()

    def trial() -> str:
        with kernels.on_card_of(torch.empty(0, device=device)):
            return _compare(ops, device)

    found = try_once((choose_ops, device), trial)
    return replace(found, fact=f"Triton: {found}") if found else ops


@cached  # equal in each run: what a run keeps is for these kernels
def _triton() -> Ops:
    from .kernels import guided_rows, low_rank, qk_norm_rope, residual_norm, rows, scaled_gemm
    from .kernels.launch import not_direct

    def prepared(launch: Callable[..., Any]) -> Callable[..., Prepared]:
        return lambda *like, **how: launch(*like, **how).prepared()

    ops: Any = _Triton(
        f"Triton; {not_direct()}" if not_direct() else "Triton",
        residual_norm=residual_norm.prepare_residual_norm,
        qk_norm_rope=qk_norm_rope.prepare_qk_norm_rope,
        gelu_quantize=prepared(rows.gelu_quantize),
        row_quantize=prepared(rows.row_quantize),
        swiglu_quantize=prepared(rows.swiglu_quantize),
        low_rank_rows=prepared(low_rank.low_rank_rows),
        decode_weight=prepared(scaled_gemm.decode_weight),
        guided_rows=guided_rows.guided_rows,
        scaled_gemm=prepared(scaled_gemm.scaled_gemm),
    )
    return ops


def prepare_trial() -> None:
    """Compiles what the trial launches, for the current card and without its memory."""
    _compare(_triton(), torch.device("meta"))


def _compare(ops: Ops, device: torch.device) -> str:
    meta = device.type == "meta"  # nothing is launched there
    generator = None if meta else torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    tokens = Tokens(1, 3, 5, 4)
    x, branch = random(8, 64), random(8, 64)
    halves = Modulation(random(1, 192), random(2, 192))
    twin, h = x.clone(), torch.empty_like(x)
    like = x, branch, halves, halves, tokens, 1e-6, None, h
    ops.residual_norm(*like)(x, halves, halves)
    expected, _ = reference.residual_norm(twin, branch, halves, halves, tokens, 1e-6)
    q, k = random(1, 8, 2, 32), random(1, 8, 2, 32)
    weights = QKNorm(random(32), random(32), random(32), random(32))
    rotary = Rotary(random(1, 8, 16), random(1, 8, 16))
    twins = q.clone(), k.clone()
    ops.qk_norm_rope(q, k, weights, rotary, tokens, 1e-6)(weights, rotary)
    reference.qk_norm_rope(*twins, weights, rotary, tokens, 1e-6)
    pairs = ((x, twin), (h, expected), (q, twins[0]), (k, twins[1]))
    right = meta or all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in pairs)
    return "" if right else "a trial gave a wrong result"
