"""The rows that several linear layers read, each form of them made once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .fused import Ops
from .streams import Tokens

ALIGNED_SCALES = 4  # fp32 scales in 16 bytes


class Part(NamedTuple):
    """One stream's rows in a matrix: `items` runs of `length` rows, their starts `step` apart."""

    start: int
    items: int
    length: int
    step: int

    @property
    def together(self) -> bool:
        """Whether the runs follow one another without a gap."""
        return self.items == 1 or self.step == self.length


def in_stream_order(tokens: Tokens) -> tuple[Part, Part]:
    """Text and image in a matrix of `tokens.rows` rows in stream order."""
    return (
        Part(0, tokens.batch, tokens.text, tokens.text),
        Part(tokens.text_rows, tokens.batch, tokens.image, tokens.image),
    )


def in_joint_order(tokens: Tokens) -> tuple[Part, Part]:
    """Text and image in a matrix of `tokens.rows` rows, item by item."""
    return (
        Part(0, tokens.batch, tokens.text, tokens.joint),
        Part(tokens.text, tokens.batch, tokens.image, tokens.joint),
    )


class Rows:
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
