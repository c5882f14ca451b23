"""Triton: attention to the parts of the keys merged, and guidance by a negative prompt, in one pass
over the rows: 8 bytes of a value in bf16, where plain torch reads and writes 48.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .. import reference
from .launch import Launch

WIDEST = 4096  # of which a program holds three rows in registers
MOST_ITEMS = 32  # a bit each
TYPES = (torch.bfloat16, torch.float16, torch.float32)


# Numbers that follow the prompt and the size of the image: no kernel of its own for each.
@triton.jit(
    do_not_specialize=["tokens", "first", "second", "guided", "of_item", "of_head", "of_token"]
)
def _guided_rows_kernel(
    out_ptr,
    positive_ptr,
    shared_ptr,
    shared_lse_ptr,
    positive_lse_ptr,
    negative_lse_ptr,
    scale,
    tau,
    alpha,
    tokens,
    first,
    second,
    guided,
    of_item,
    of_head,
    of_token,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    some: tl.constexpr,
    wide: tl.constexpr,
):
    """Writes over the negative prompt's rows; a row is (heads, head_dim) of a tile (some, wide)."""
    row = tl.program_id(0)
    item = row // tokens
    token = row - item * tokens
    head = tl.arange(0, some)[:, None]
    column = tl.arange(0, wide)[None, :]
    there = (head < heads) & (column < head_dim)
    here = row.to(tl.int64) * (heads * head_dim) + head * head_dim + column
    positive = tl.load(positive_ptr + here, mask=there, other=0.0).to(tl.float32)
    negative = tl.load(out_ptr + here, mask=there, other=0.0).to(tl.float32)
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + here, mask=there, other=0.0).to(tl.float32)
        at = item.to(tl.int64) * of_item + head * of_head + token * of_token
        lse = tl.load(shared_lse_ptr + at, mask=head < heads, other=0.0)
        other = tl.load(positive_lse_ptr + at, mask=head < heads, other=0.0)
        share = tl.sigmoid(lse - other)
        positive = shared * share + positive * (1.0 - share)
        other = tl.load(negative_lse_ptr + at, mask=head < heads, other=0.0)
        share = tl.sigmoid(lse - other)
        negative = shared * share + negative * (1.0 - share)
    if token >= second:
        pushed = negative + scale * (positive - negative)
        was = tl.sum(tl.sum(tl.abs(positive), axis=1), axis=0)
        grown = tl.sum(tl.sum(tl.abs(pushed), axis=1), axis=0)
        pushed *= tl.where(grown > tau * was, tau * was / (grown + 1e-7), 1.0)
        on = ((guided >> item) & 1) != 0
        negative = tl.where(on, positive + alpha * (pushed - positive), positive)
    if token < first:
        negative = positive
    tl.store(out_ptr + here, negative.to(out_ptr.dtype.element_ty), mask=there)


def guided_rows(
    guidance: reference.Guidance,
    parts: Sequence[reference.AttentionPart],
    first: int = 0,
    second: int = 0,
) -> torch.Tensor:
    """As `reference.guided_rows`, of rows of at most `WIDEST`; others go to it."""
    (positive, of_positive), (negative, of_negative), *rest = parts
    shared, lse = rest[0] if rest else (None, None)
    rows = [it for it in (positive, negative, shared) if it is not None]
    sums = [it for it in (of_positive, of_negative, lse) if it is not None]
    batch, tokens, dim = positive.shape
    if (
        positive.dtype not in TYPES
        or dim > WIDEST
        or batch > MOST_ITEMS
        or not all(it.is_contiguous() for it in rows)
        or any(it.stride() != sums[0].stride() for it in sums)
    ):
        return reference.guided_rows(guidance, parts, first, second)
    heads = 1 if lse is None else lse.shape[1]
    head_dim = dim // heads
    on = sum(1 << item for item in range(batch) if not guidance.on or guidance.on[item])
    numbers = guidance[:3], (tokens, first, second, on), (0, 0, 0) if lse is None else lse.stride()
    constants = {
        "heads": heads,
        "head_dim": head_dim,
        "some": triton.next_power_of_2(heads),
        "wide": triton.next_power_of_2(head_dim),
    }
    tensors = negative, positive, shared, lse, of_positive, of_negative
    fixed: list[Any] = [number for some in numbers for number in some]
    warps = 8 if dim > 1024 else 4
    Launch(_guided_rows_kernel, batch * tokens, tensors, fixed, constants, num_warps=warps).once()
    return negative
