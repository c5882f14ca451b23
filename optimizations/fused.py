"""The fused kernels of a block, as one choice: Triton on a card, plain torch without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from ..machine.card import first_line
from ..spec.formats import RowFormat
from . import attention_8bit, kernels, reference
from .attention_8bit import Heads
from .fallback import Fallback
from .reference import HEAD_DIMS, Modulation, QKNorm, QuantizedRows, Rotary, RowOrder, Tokens

# What the Triton kernels hold in registers, and how `tl.split` pairs a head.
WIDEST = 16384


class Ops(NamedTuple):
    """The kernels; `reference.py` says what each computes.

    Attributes:
        prepared: {name of a kernel: what prepares its launch}, as in the kernels' own files; empty
            where each call looks at its arguments.
    """

    name: str
    residual_norm: Callable[..., tuple[torch.Tensor | None, torch.Tensor | None]]
    qk_norm_rope: Callable[..., None]
    gelu_quantize: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    row_quantize: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    swiglu_quantize: Callable[..., tuple[torch.Tensor, torch.Tensor] | None]
    low_rank_rows: Callable[..., torch.Tensor]
    decode_weight: Callable[..., torch.Tensor]
    quantize_values: Callable[..., None]
    attention_8bit: Callable[..., None]
    prepared: Mapping[str, Callable[..., Callable[..., None]]] = MappingProxyType({})

    def prepare_norm(
        self,
        x: torch.Tensor,
        branch: torch.Tensor | None,
        gates: Modulation | None,
        norms: Modulation | None,
        tokens: Tokens,
        eps: float,
        format: RowFormat | None,
        out: torch.Tensor | QuantizedRows | None,
        plain: torch.Tensor | None = None,
    ) -> Callable[[torch.Tensor, Modulation | None, Modulation | None], None]:
        """`residual_norm` of a branch into `out`, for x, gates and norms like these."""
        if prepare := self.prepared.get("residual_norm"):
            return prepare(x, branch, gates, norms, tokens, eps, format, out, plain)

        also = {} if plain is None else {"plain": plain}

        def run(x: torch.Tensor, gates: Modulation | None, norms: Modulation | None) -> None:
            h, scale = self.residual_norm(x, branch, gates, norms, tokens, eps, format, **also)
            if format is not None:
                out.write(h, scale)
            elif out is not None:
                out.copy_(h)

        return run

    def prepare_rope(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        norm: QKNorm | None,
        rotary: Rotary | None,
        tokens: Tokens,
        eps: float,
        into: Heads | None = None,
        first: int = 0,
    ) -> Callable[[QKNorm | None, Rotary | None], None]:
        """`qk_norm_rope` of these q and k, for a norm and a rotary like these."""
        if prepare := self.prepared.get("qk_norm_rope"):
            return prepare(q, k, norm, rotary, tokens, eps, into, first)
        return lambda norm, rotary: self.qk_norm_rope(q, k, norm, rotary, tokens, eps, into, first)

    def prepare_attention(
        self, heads: Heads, v: torch.Tensor, mask: torch.Tensor | None, out: torch.Tensor
    ) -> Callable[[torch.Tensor | None], None]:
        """`attention_8bit` of these heads and values into `out`, for a mask like this."""
        if prepare := self.prepared.get("attention_8bit"):
            attend = prepare(heads, v, mask, out)
        else:

            def attend(mask: torch.Tensor | None) -> None:
                self.attention_8bit(heads, v, mask, out)

        if heads.v is None:
            return attend
        if prepare := self.prepared.get("quantize_values"):
            quantize = prepare(v, heads)
        else:

            def quantize() -> None:
                self.quantize_values(v, heads)

        def run(mask: torch.Tensor | None) -> None:
            quantize()
            attend(mask)

        return run

    def prepare_quantizer(
        self, name: str, x: torch.Tensor, format: RowFormat, out: QuantizedRows, **how: bool
    ) -> Callable[[torch.Tensor], None]:
        """`gelu_quantize` or `row_quantize` into `out`, of tensors like x; `how` is its own."""
        if prepare := self.prepared.get(name):
            return prepare(x, format, out, **how)
        quantize = getattr(self, name)
        return lambda x: out.write(*quantize(x, format, **how))

    def prepare_swiglu(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        format: RowFormat | None,
        out: QuantizedRows | None,
        keep: bool,
    ) -> Callable[[], None]:
        """`swiglu_quantize` of gate and up into `out`."""
        if prepare := self.prepared.get("swiglu_quantize"):
            return prepare(gate, up, format, out, keep)

        def run() -> None:
            found = self.swiglu_quantize(gate, up, format, keep)
            if out is not None:
                out.write(*found)

        return run

    def prepare_decoder(
        self,
        codes: torch.Tensor,
        group_scale: torch.Tensor,
        codebook: torch.Tensor | None,
        bits: int,
        out: torch.Tensor,
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], None]:
        """`decode_weight` into `out`, of codes, scales and a codebook like these."""
        if prepare := self.prepared.get("decode_weight"):
            return prepare(codes, group_scale, codebook, bits, out)
        return lambda *packed: out.copy_(self.decode_weight(*packed, bits))

    def prepare_low_rank(
        self,
        x: torch.Tensor,
        text_down: torch.Tensor | None,
        image_down: torch.Tensor | None,
        order: RowOrder,
        out: torch.Tensor,
    ) -> Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], None]:
        """`low_rank_rows` into `out`, of tensors like these."""
        if prepare := self.prepared.get("low_rank_rows"):
            return prepare(x, text_down, image_down, order, out)
        return lambda x, *downs: self.low_rank_rows(x, *downs, order, out)


TORCH = Ops(
    "plain torch: no card",
    reference.residual_norm,
    attention_8bit.qk_norm_rope,
    reference.gelu_quantize,
    reference.row_quantize,
    reference.swiglu_quantize,
    reference.low_rank_rows,
    reference.decode_weight,
    attention_8bit.quantize_values,
    attention_8bit.attention_8bit,
)


def choose_ops(device: torch.device) -> Ops | Fallback:
    """The kernels for a device, or why there are none."""
    if device.type == "cpu" and not kernels.interpreted():
        return TORCH
    if device.type != "cpu" and (device.type != "cuda" or torch.version.hip is not None):
        return Fallback(f"{device.type} is not an NVIDIA card", final=True)
    if kernels.missing():
        return Fallback(kernels.missing(), final=True)
    ops = _triton()
    return _trial(ops, device) or ops


def unsupported_shape(dim: int, head_dim: int, dtype: torch.dtype) -> Fallback | None:
    """Why the kernels do not take a model; None when they do."""
    if dtype not in (torch.bfloat16, torch.float32):
        # Residuals of Qwen-Image exceed what fp16 holds: both hosts clip or refuse it.
        return Fallback(f"{dtype}: the fused blocks take bf16 and fp32")
    if dim > WIDEST:
        return Fallback(f"a width of {dim}, more than {WIDEST}", final=True)
    if head_dim not in HEAD_DIMS:
        return Fallback(f"heads of {head_dim}, not {', '.join(map(str, HEAD_DIMS))}", final=True)
    return None


def _triton() -> Ops:
    from .kernels import attention_8bit as attention
    from .kernels import (
        decode_weight,
        low_rank,
        qk_norm_rope,
        residual_norm,
        rows,
        scaled_gemm,
        swiglu,
    )
    from .kernels.launch import not_direct

    prepared = {
        "residual_norm": residual_norm.prepare_residual_norm,
        "qk_norm_rope": qk_norm_rope.prepare_qk_norm_rope,
        "gelu_quantize": rows.prepare_gelu_quantize,
        "row_quantize": rows.prepare_row_quantize,
        "swiglu_quantize": swiglu.prepare_swiglu_quantize,
        "low_rank_rows": low_rank.prepare_low_rank_rows,
        "scaled_gemm": scaled_gemm.prepare_scaled_gemm,
        "decode_weight": decode_weight.prepare_decode_weight,
        "quantize_values": attention.prepare_quantize_values,
        "attention_8bit": attention.prepare_attention_8bit,
    }
    return Ops(
        f"Triton; {not_direct()}" if not_direct() else "Triton",
        residual_norm.residual_norm,
        qk_norm_rope.qk_norm_rope,
        rows.gelu_quantize,
        rows.row_quantize,
        swiglu.swiglu_quantize,
        low_rank.low_rank_rows,
        decode_weight.decode_weight,
        attention.quantize_values,
        attention.attention_8bit,
        prepared,
    )


_TRIED: dict[torch.device, Fallback | None] = {}


def _trial(ops: Ops, device: torch.device) -> Fallback | None:
    """Runs the two kernels of every block once: compilers and drivers fail in ways that nobody
    declares.
    """
    if device in _TRIED:
        return _TRIED[device]
    found = None
    try:
        if not _compare(ops, device):
            found = Fallback("Triton failed a trial: a wrong result", final=True)
    except torch.OutOfMemoryError:  # another time the card has room
        found = Fallback("Triton failed a trial: the card is full")
    except Exception as error:  # Triton and C compilers raise anything
        found = Fallback(f"Triton failed a trial: {first_line(error)}", final=True)
    if found is None or found.final:
        _TRIED[device] = found
    return found


def _compare(ops: Ops, device: torch.device) -> bool:
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    tokens = Tokens(1, 3, 5, 4)
    x, branch = random(8, 64), random(8, 64)
    halves = Modulation(random(1, 192), random(2, 192))
    twin = x.clone()
    h, _ = ops.residual_norm(x, branch, halves, halves, tokens, 1e-6)
    expected, _ = reference.residual_norm(twin, branch, halves, halves, tokens, 1e-6)
    q, k = random(1, 8, 2, 32), random(1, 8, 2, 32)
    weights = QKNorm(random(32), random(32), random(32), random(32))
    rotary = Rotary(random(1, 8, 16), random(1, 8, 16))
    twins = q.clone(), k.clone()
    ops.qk_norm_rope(q, k, weights, rotary, tokens, 1e-6)
    reference.qk_norm_rope(*twins, weights, rotary, tokens, 1e-6)
    pairs = ((x, twin), (h, expected), (q, twins[0]), (k, twins[1]))
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in pairs)
