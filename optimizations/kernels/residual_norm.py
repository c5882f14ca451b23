"""Triton: gate, residual, LayerNorm, modulation and quantization in one pass over both streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ...spec.formats import RowFormat
from ..reference import Modulation, QuantizedRows, Tokens, check_rotation
from .launch import Launch
from .rows import (
    WIDEST_ROW,
    launch_shape,
    load_row,
    quantization,
    quantize_row,
    store_row,
    sum_row,
)


# The numbers of tokens follow the prompt and the size of the image: no kernel of its own for each.
@triton.jit(do_not_specialize=["batch", "text", "image", "zero_from", "gap"])
def _residual_norm_kernel(
    x_ptr,
    text_gate_ptr,
    image_gate_ptr,
    text_norm_ptr,
    image_norm_ptr,
    branch_ptr,
    h_ptr,
    scale_ptr,
    plain_ptr,
    text_gate_stride,
    image_gate_stride,
    text_norm_stride,
    image_norm_stride,
    batch,
    text,
    image,
    zero_from,
    gap,
    width: tl.constexpr,
    eps: tl.constexpr,
    largest: tl.constexpr,
    smallest_row: tl.constexpr,
    to_integer: tl.constexpr,
    rotation: tl.constexpr,
    part: tl.constexpr,
    parts: tl.constexpr,
):
    """x += gate * branch; h = (x - mean) / sqrt(variance + eps) * (1 + scale) + shift.

    A pointer that is None leaves out what needs it.
    """
    row = tl.program_id(0)
    here = row.to(tl.int64) * width

    # The row's item, and its row in the modulation of its stream.
    image_row = row - batch * text
    is_text = image_row < 0
    if is_text:
        entry = row // text
    else:
        entry = image_row // image
        if image_row - entry * image >= zero_from:
            entry += batch

    a, b, c = load_row(x_ptr + here, width, part, parts)
    if branch_ptr is not None:
        if is_text:
            gate_ptr = text_gate_ptr + entry.to(tl.int64) * text_gate_stride
        else:
            gate_ptr = image_gate_ptr + entry.to(tl.int64) * image_gate_stride
        gate_a, gate_b, gate_c = load_row(gate_ptr + 2 * width, width, part, parts)
        branch_a, branch_b, branch_c = load_row(branch_ptr + here, width, part, parts)
        # Rounded, as the next reader of x sees it.
        a = (a + gate_a * branch_a).to(x_ptr.dtype.element_ty).to(tl.float32)
        b = (b + gate_b * branch_b).to(x_ptr.dtype.element_ty).to(tl.float32)
        c = (c + gate_c * branch_c).to(x_ptr.dtype.element_ty).to(tl.float32)
        store_row(x_ptr + here, a, b, c, width, part, parts)
    if text_norm_ptr is not None:
        if is_text:
            norm_ptr = text_norm_ptr + entry.to(tl.int64) * text_norm_stride
        else:
            norm_ptr = image_norm_ptr + entry.to(tl.int64) * image_norm_stride
        shift_a, shift_b, shift_c = load_row(norm_ptr, width, part, parts)
        scale_a, scale_b, scale_c = load_row(norm_ptr + width, width, part, parts)
        mean = sum_row(a, b, c, parts) / width
        a = _subtract_mean(a, mean, width, part)
        b = _subtract_mean(b, mean, width, part)
        c = _subtract_mean(c, mean, width, part)
        # Not mean(x * x) - mean**2, which cancels where the mean is large.
        variance = sum_row(a * a, b * b, c * c, parts) / width
        inverse = tl.rsqrt(variance + eps)
        a = a * inverse * (scale_a + 1.0) + shift_a
        b = b * inverse * (scale_b + 1.0) + shift_b
        c = c * inverse * (scale_c + 1.0) + shift_c
        if plain_ptr is not None:
            store_row(plain_ptr + here, a, b, c, width, part, parts)
        if scale_ptr is not None:
            a, b, c, scale = quantize_row(
                a, b, c, largest, smallest_row, to_integer, rotation, part, parts
            )
            tl.store(scale_ptr + row + tl.where(is_text, 0, gap), scale)
        store_row(h_ptr + here, a, b, c, width, part, parts)


@triton.jit
def _subtract_mean(x, mean, width: tl.constexpr, part: tl.constexpr):
    """Zeros stay past the end of a row in one part; in three parts there is nothing past it."""
    return tl.where(tl.arange(0, part) < width, x - mean, 0.0)


NOTHING = (None, None)


def prepare_residual_norm(
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
    """`reference.residual_norm` of this branch into `out`, for x, gates and norms like these.

    Args:
        x: Contiguous, at most `WIDEST_ROW` wide.
        branch: Contiguous.
        out: (rows, D) in x's dtype, or quantized rows where there is a format; None without norms.
        plain: As of the twin; it may be the branch.
    """
    rows, width = x.shape
    if rows != tokens.rows or width > WIDEST_ROW or not x.is_contiguous():
        raise ValueError(
            f"residual_norm takes contiguous rows of at most {WIDEST_ROW} elements, one for each "
            f"token, got {tuple(x.shape)} with strides {x.stride()} for {tokens.rows} tokens"
        )
    gate_strides = norm_strides = (0, 0)
    if branch is not None:
        if branch.shape != x.shape or not branch.is_contiguous():
            raise ValueError(
                f"residual_norm adds contiguous rows to {tuple(x.shape)}, got "
                f"{tuple(branch.shape)} with strides {branch.stride()}"
            )
        gate_strides = _strides(gates, tokens, width)
    if norms is not None:
        norm_strides = _strides(norms, tokens, width)
    h, scale, gap = out, None, 0
    if isinstance(out, QuantizedRows):
        h, scale, gap = out.values, out.scale, out.gap
    rotation = 0 if format is None else format.rotation
    if rotation:
        check_rotation(rotation, width)
    part, parts, warps = launch_shape(width, rotation > 0)
    constants = {
        "width": width,
        "eps": eps,
        **quantization(format),
        "part": part,
        "parts": parts,
    }
    varying = (x, *(NOTHING if branch is None else gates), *(norms or NOTHING))
    fixed: Sequence[Any] = (branch, h, scale, plain, *gate_strides, *norm_strides, *tokens, gap)
    made = Launch(_residual_norm_kernel, rows, varying, fixed, constants, num_warps=warps)
    launch = made.prepared()

    def run(x: torch.Tensor, gates: Modulation | None, norms: Modulation | None) -> None:
        launch(x, *(gates or NOTHING), *(norms or NOTHING))

    return run


def _strides(modulation: Modulation, tokens: Tokens, width: int) -> tuple[int, int]:
    """Of the rows of text and image; ValueError where a row that is read would not be there."""
    text, image = modulation
    entries = tokens.batch * (2 if tokens.zero_from < tokens.image else 1)
    (text_entries, text_width), (image_entries, image_width) = text.shape, image.shape
    (text_stride, text_step), (image_stride, image_step) = text.stride(), image.stride()
    if (
        text_entries < tokens.batch
        or image_entries < entries
        or not text_width == image_width == 3 * width
        or not text_step == image_step == 1
        or text.dtype != image.dtype
    ):
        raise ValueError(
            f"residual_norm takes modulation of {tokens.batch} x {3 * width} for text and "
            f"{entries} x {3 * width} for images, of one dtype and with contiguous rows, got "
            f"{tuple(text.shape)} {text.dtype} with strides {text.stride()} and "
            f"{tuple(image.shape)} {image.dtype} with strides {image.stride()}"
        )
    return text_stride, image_stride
