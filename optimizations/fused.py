"""Chooses the fused kernels of a block: Triton on a card, plain torch without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..caches import cached
from ..spec.formats import RowFormat
from ..verdict import Verdict, try_once
from . import kernels, reference
from .reference import Modulation, QKNorm, QuantizedRows, Rotary, Tokens

# Takes the tensors that differ from call to call, of the shapes and strides that it is for.
Prepared = Callable[..., None]


class Ops(NamedTuple):
    """The kernels, each as what prepares it for tensors like those that it is given, and for where
    they are read and written; `reference.py` says what each computes.

    Attributes:
        residual_norm: (x, branch, gates, norms, tokens, eps, format, out, plain=None); what it
            makes takes x, gates and norms, and writes h into `out`.
        qk_norm_rope: (q, k, norm, rotary, tokens, eps, first=0); takes norm and rotary.
        gelu_quantize: (x, format, out, keep=False); takes x.
        row_quantize: (x, format, out); takes x.
        swiglu_quantize: (gate, up, format, out, keep=False); takes nothing.
        low_rank_rows: (x, text_down, image_down, order, out); takes the first three.
        decode_weight: (codes, group_scale, codebook, bits, out); takes the first three.
        guided_rows: `reference.guided_rows` itself or its kernel, which nothing prepares.
        scaled_gemm: (a, b, scale_a, scale_b, bias, out, beside=None, gelu=False, swiglu=False);
            takes b, scale_b, bias, up and a. None where cuBLAS alone multiplies.
    """

    name: str
    residual_norm: Callable[..., Prepared]
    qk_norm_rope: Callable[..., Prepared]
    gelu_quantize: Callable[..., Prepared]
    row_quantize: Callable[..., Prepared]
    swiglu_quantize: Callable[..., Prepared]
    low_rank_rows: Callable[..., Prepared]
    decode_weight: Callable[..., Prepared]
    guided_rows: Callable[..., torch.Tensor]
    scaled_gemm: Callable[..., Prepared] | None = None


def _write(
    out: torch.Tensor | QuantizedRows | None, h: torch.Tensor | None, scale: torch.Tensor | None
) -> None:
    if isinstance(out, QuantizedRows):
        out.write(h, scale)
    elif out is not None:
        out.copy_(h)


def _quantizer(
    quantize: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> Callable[..., Prepared]:
    def prepare(_: torch.Tensor, format: RowFormat, out: QuantizedRows, **how: bool) -> Prepared:
        return lambda x: out.write(*quantize(x, format, **how))

    return prepare


TORCH = Ops(
    "plain torch: no GPU",
    lambda x, branch, gates, norms, tokens, eps, format, out, plain=None: (
        lambda x, gates, norms: _write(
            out, *reference.residual_norm(x, branch, gates, norms, tokens, eps, format, plain)
        )
    ),
    lambda q, k, norm, rotary, *how: (
        lambda norm, rotary: reference.qk_norm_rope(q, k, norm, rotary, *how)
    ),
    _quantizer(reference.gelu_quantize),
    _quantizer(reference.row_quantize),
    lambda gate, up, format, out, keep=False: (
        lambda: _write(out, *(reference.swiglu_quantize(gate, up, format, keep) or (None, None)))
    ),
    lambda x, text, image, order, out: (
        lambda x, text, image: reference.low_rank_rows(x, text, image, order, out)
    ),
    lambda codes, scale, codebook, bits, out: (
        lambda *packed: out.copy_(reference.decode_weight(*packed, bits))
    ),
    reference.guided_rows,
)


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

    return Ops(
        f"Triton; {not_direct()}" if not_direct() else "Triton",
        residual_norm.prepare_residual_norm,
        qk_norm_rope.prepare_qk_norm_rope,
        prepared(rows.gelu_quantize),
        prepared(rows.row_quantize),
        prepared(rows.swiglu_quantize),
        prepared(low_rank.low_rank_rows),
        prepared(scaled_gemm.decode_weight),
        guided_rows.guided_rows,
        prepared(scaled_gemm.scaled_gemm),
    )


def prepare_trial() -> None:
    """Compiles what the trial launches, for the current card and without its memory."""
    _compare(_triton(), torch.device("meta"))


def _compare(ops: Ops, device: torch.device) -> str:
    meta = device.type == "meta"  # nothing is launched there
    generator = None if meta else torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
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
