"""The fused kernels of a block, as one choice, and the rows that pass between them.

Triton on a card, plain torch without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..machine.card import first_line
from . import kernels, reference
from .fallback import Fallback
from .reference import HEAD_DIMS, Modulation, QKNorm, Rotary, Tokens

ALIGNED_SCALES = 4  # fp32 scales in 16 bytes
# What the Triton kernels hold in registers, and how `tl.split` pairs a head.
WIDEST = 16384


class Ops(NamedTuple):
    """The kernels; `reference.py` says what each computes."""

    name: str
    residual_norm: Callable[..., tuple[torch.Tensor | None, torch.Tensor | None]]
    qk_norm_rope: Callable[..., None]
    gelu_quantize: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    row_quantize: Callable[..., tuple[torch.Tensor, torch.Tensor]]


TORCH = Ops(
    "plain torch: no card",
    reference.residual_norm,
    reference.qk_norm_rope,
    reference.gelu_quantize,
    reference.row_quantize,
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
    from .kernels.qk_norm_rope import qk_norm_rope
    from .kernels.residual_norm import residual_norm
    from .kernels.rows import gelu_quantize, row_quantize

    return Ops("Triton", residual_norm, qk_norm_rope, gelu_quantize, row_quantize)


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


class StreamSlice(NamedTuple):
    """One stream's rows in a matrix: `items` runs of `length` rows, one every `step` rows."""

    start: int
    items: int
    length: int
    step: int

    @property
    def together(self) -> bool:
        """Whether the runs follow one another without a gap."""
        return self.items == 1 or self.step == self.length


def in_stream_order(tokens: Tokens) -> tuple[StreamSlice, StreamSlice]:
    """Text and image in a matrix of `tokens.rows` rows in stream order."""
    return (
        StreamSlice(0, tokens.batch, tokens.text, tokens.text),
        StreamSlice(tokens.text_rows, tokens.batch, tokens.image, tokens.image),
    )


def in_joint_order(tokens: Tokens) -> tuple[StreamSlice, StreamSlice]:
    """Text and image in a matrix of `tokens.rows` rows, item by item."""
    return (
        StreamSlice(0, tokens.batch, tokens.text, tokens.joint),
        StreamSlice(tokens.text, tokens.batch, tokens.image, tokens.joint),
    )


class LayerInput:
    """(rows, K) as plain numbers, quantized, or both.

    Args:
        ops: The kernels.
        plain: bf16, fp16 or fp32; None where only `quantized` is known.
        format: Of `quantized`.
        quantized: Values and scales of all rows.
    """

    def __init__(
        self,
        ops: Ops,
        plain: torch.Tensor | None,
        format: str | None = None,
        quantized: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self._ops = ops
        self._plain = plain
        self._whole = {} if quantized is None else {format: quantized}
        self._pieces: dict[tuple[str, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def plain(self, start: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        """`length` rows from `start` on, in `dtype`."""
        if self._plain is not None:
            return self._plain[start : start + length]
        # A layer turned out not to be quantized after all, as when the host merged a LoRA.
        ((values, scale),) = self._whole.values()
        part = slice(start, start + length)
        return values[part].to(dtype).mul_(scale[part])

    def quantize_all(self, format: str) -> None:
        """Quantizes all rows in one launch, where layers of both streams read them."""
        if format not in self._whole:
            self._whole[format] = self._ops.row_quantize(self._plain, format)

    def quantized(self, format: str, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales of `length` rows from `start` on; the scales' address is aligned.

        cuBLASLt takes scales from addresses of 16 bytes on only, and Triton compiles a kernel of
        its own for others; the image's rows may begin at any number of text tokens.
        """
        key = format, start, length
        if key not in self._pieces:
            part = slice(start, start + length)
            if format in self._whole:
                values, scale = (tensor[part] for tensor in self._whole[format])
                if scale.storage_offset() % ALIGNED_SCALES:
                    scale = scale.clone()
            else:
                values, scale = self._ops.row_quantize(self._plain[part], format)
            self._pieces[key] = values, scale
        return self._pieces[key]
