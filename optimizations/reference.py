"""Computes the kernels in plain torch, and describes what they are given of a block's two streams.

A function with the name of a Triton kernel in `kernels/` defines what that computes, and runs where
Triton does not.

Text and image tokens of a batch are rows of one matrix, in stream order: the text tokens of item 0,
of item 1 and so on, then the image tokens of item 0, of item 1 and so on. Each stream is then one
contiguous matrix for a GEMM, whatever the batch. Attention wants the tokens of an item side by
side, in joint order: text, then image. With a batch of one the two orders are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..errors import SettingError
from ..spec.formats import FORMATS, RowFormat, is_rotation

# What the kernels take: they hold a row in registers, and wider ones would spill.
HEAD_DIMS, WIDEST_ROW = (16, 32, 64, 128, 256), 16384


class Tokens(NamedTuple):
    """How many tokens there are of each kind."""

    batch: int
    text: int  # text tokens of one item
    image: int  # image tokens of one item, those of reference images included
    # The first image token that is modulated as at timestep 0; `image` where there is none.
    # Edit-2511 modulates its reference images so.
    zero_from: int

    @property
    def joint(self) -> int:
        return self.text + self.image

    @property
    def text_rows(self) -> int:
        """Rows of the text stream; the image stream's follow."""
        return self.batch * self.text

    @property
    def rows(self) -> int:
        return self.batch * self.joint


class Modulation(NamedTuple):
    """Shift, scale and gate of one half of a block (attention or MLP), for both streams."""

    text: torch.Tensor  # (batch, 3 D), any row stride: shift, scale and gate side by side
    # (batch, 3 D), or (2 batch, 3 D) where `Tokens.zero_from` is less than `image`: the second half
    # of the rows is for timestep 0
    image: torch.Tensor


class QKNorm(NamedTuple):
    """RMSNorm weights of one head, each (head_dim,), of the image stream and of the text stream."""

    query: torch.Tensor
    key: torch.Tensor
    text_query: torch.Tensor
    text_key: torch.Tensor


class QuantizedRows(NamedTuple):
    """Where a kernel writes the rows that it quantizes."""

    values: torch.Tensor  # (rows, K), float8_e4m3fn or int8, contiguous
    # (rows + gap, 1), fp32, contiguous: from row `cut` on scales lie `gap` further, so that a GEMM
    # finds those of both streams at multiples of 16 bytes
    scale: torch.Tensor
    cut: int  # the first row of the second stream

    @classmethod
    def empty(cls, rows: torch.Tensor, format: RowFormat) -> QuantizedRows:
        """Makes room for rows like these, all of one stream."""
        values = rows.new_empty(rows.shape, dtype=storage_of(format))
        return cls(values, rows.new_empty(len(rows), 1, dtype=torch.float32), len(rows))

    @property
    def gap(self) -> int:
        """Scales that are left out before row `cut`."""
        return len(self.scale) - len(self.values)

    def part(self, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives values and scales of `length` rows of one stream from `start` on."""
        shift = self.gap if start >= self.cut else 0
        return (
            self.values[start : start + length],
            self.scale[start + shift : start + shift + length],
        )

    def write(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        """Copies (rows, K) values and (rows, 1) scales here."""
        self.values.copy_(values)
        self.scale[: self.cut] = scale[: self.cut]
        self.scale[self.cut + self.gap :] = scale[self.cut :]


class RowOrder(NamedTuple):
    """Rows of a matrix: `items` times `text` rows of the text stream, then `image` rows of the
    image stream.
    """

    items: int
    text: int
    image: int


class Rotary(NamedTuple):
    """Rotation of each token in joint order, each (1 or batch, joint, head_dim / 2), contiguous.

    Elements 2 i and 2 i + 1 of a head turn by the angle i.
    """

    cos: torch.Tensor
    sin: torch.Tensor


# A row that holds nothing larger counts as zero: the reciprocal of its scale would overflow.
SMALLEST_ROW = 2.0**-100


def rotate(x: torch.Tensor, size: int) -> torch.Tensor:
    """Multiplies each group of columns by a Hadamard matrix, so that a large one spreads over all.

    The matrix is the Kronecker power of

        ((1, 1, 1, -1), (1, 1, -1, 1), (1, -1, 1, 1), (-1, 1, 1, 1)) / 2

    that is as large as the group: symmetric and its own inverse, as comfy-kitchen has it for
    ConvRot. A weight that is rotated too gives the same product.

    Args:
        x: (M, K), fp32 or float64.
        size: Of a group, a power of 4 that divides K.

    Returns:
        (M, K) in x's dtype.
    """
    check_rotation(size, x.shape[1])
    low = 1
    while low < size:
        digit = x.unflatten(1, (-1, 4, low))
        x = (digit.sum(2, keepdim=True) - 2 * digit.flip(2)).flatten(1)
        low *= 4
    return x / size**0.5


def row_quantize(x: torch.Tensor, format: RowFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes each row by its own largest magnitude.

        scale = max(|row|) / L, or 1 for a zero row;  q = round_to_even(row * (1 / scale))

    with L = 448 for fp8 and 127 for int8, of a row that is rotated before where the format says so
    (`rotate`). NaN or inf in a row makes its scale NaN or inf, so that
    it shows in whatever is computed from the row. A kernel multiplies by the reciprocal; weights in
    files are divided by the scale (`loaders.quantize.quantize_rows`), bit for bit as other programs
    write them.

    Args:
        x: Rows, (M, K), bf16, fp16 or fp32.

    Returns:
        q: (M, K), float8_e4m3fn or int8.
        scale: (M, 1), fp32; a row is about q * scale.
    """
    largest = largest_of(format.storage)
    wide = x.float()
    if format.rotation:
        wide = rotate(x.to(wide_dtype(x)), format.rotation).float()
    magnitude = wide.abs().amax(dim=-1, keepdim=True)
    # By a tensor: by a number, a card multiplies with the reciprocal, which is not the same.
    exact = magnitude / torch.full((), largest, device=x.device)
    scale = torch.where(magnitude < SMALLEST_ROW, 1.0, exact)
    steps = (wide * scale.reciprocal()).clamp_(-largest, largest)
    if format.storage == "int8":
        steps.round_()
    return steps.to(storage_of(format)), scale


def residual_norm(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    gates: Modulation | None,
    norms: Modulation | None,
    tokens: Tokens,
    eps: float,
    format: RowFormat | None = None,
    plain: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Ends one half of a block and begins the next: residual, LayerNorm, modulation.

        x = x + gate * branch;  h = (x - mean) / sqrt(variance + eps) * (1 + scale) + shift

    Mean and variance are those of the row of x as it is stored, and the variance is the biased one.
    Everything between two roundings to x's dtype is fp32, or float64 for a float64 x.

    Args:
        x: Both residual streams in stream order, (rows, D), changed in place.
        branch: What attention or MLP gives, (rows, D); None changes nothing in x.
        gates: Whose gate multiplies the branch; None without a branch.
        norms: Whose shift and scale modulate the norm; None computes the residual alone.
        format: How h is quantized, as `row_quantize` does; None where it is not.
        plain: Where a quantized h is written as it was before, (rows, D) in x's dtype, contiguous.

    Returns:
        h, (rows, D): in x's dtype, or quantized; None without `norms`.
        Its scale, (rows, 1), fp32; None where h is not quantized.
    """
    wide = wide_dtype(x)
    width = x.shape[1]
    h = scale = None
    if format is not None:
        h, scale, _ = QuantizedRows.empty(x, format)
    elif norms is not None:
        h = torch.empty_like(x)
    for rows, stream, item in _segments(tokens):
        part = x[rows].to(wide)
        if branch is not None:
            gate = getattr(gates, stream)[item, 2 * width :].to(wide)
            x[rows] = torch.addcmul(part, branch[rows].to(wide), gate)
            part = x[rows].to(wide)
        if norms is None:
            continue
        modulation = getattr(norms, stream)[item].to(wide)
        part = F.layer_norm(part, (width,), eps=eps)
        part = torch.addcmul(modulation[:width], part, 1 + modulation[width : 2 * width])
        if plain is not None:
            plain[rows] = part.to(plain.dtype)
        if format is None:
            h[rows] = part
        else:
            h[rows], scale[rows] = row_quantize(part, format)
    return h, scale


def gelu_quantize(
    x: torch.Tensor, format: RowFormat, keep: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes the GELU of each row, in its tanh form, as `row_quantize` does.

    Args:
        x: Rows, (M, K), of any float dtype; the GELU is computed in fp32, or float64 for float64.
        keep: Whether the GELU is written over x, rounded to its dtype.

    Returns:
        q, (M, K), and scale, (M, 1), as of `row_quantize`.
    """
    activated = F.gelu(x.to(wide_dtype(x)), approximate="tanh")
    if keep:
        x.copy_(activated)
    return row_quantize(activated, format)


def swiglu_quantize(
    gate: torch.Tensor, up: torch.Tensor, format: RowFormat | None, keep: bool = False
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Quantizes silu(gate) * up, as `row_quantize` does.

    Args:
        gate, up: (M, K), of one float dtype; computed in fp32, or float64 for float64.
        format: How; None only writes the product over the gate.
        keep: Whether it is written over the gate as well, rounded to its dtype.

    Returns:
        q, (M, K), and scale, (M, 1), as of `row_quantize`; None without a format.
    """
    wide = wide_dtype(gate)
    activated = F.silu(gate.to(wide)) * up.to(wide)
    if keep or format is None:
        gate.copy_(activated)
    return None if format is None else row_quantize(activated, format)


def scaled_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    beside: tuple[torch.Tensor, torch.Tensor] | None = None,
    gelu: bool = False,
    swiglu: bool = False,
) -> torch.Tensor:
    """Multiplies rows, quantized or not, and gives back real numbers.

        out[m, n] = (sum over k of a[m, k] * b[n, k]) * scale_a[m] * scale_b[n] + bias[n]
                    + sum over r of t[m, r] * up[n, r]

    Sums of int8 are exact, others are fp32; all that is added is added in fp32.

    Args:
        a: Activations, (M, K), int8, float8_e4m3fn, bf16 or fp16.
        b: Weights, (N, K), of a's dtype.
        scale_a: (M, 1), fp32, of rows in 8 bits; else None.
        scale_b: (N, 1), fp32, or None as scale_a.
        bias: (N,) of any float dtype, or None.
        out_dtype: bf16, fp16 or fp32.
        beside: t, (M, R), and up, (N, R), of one float dtype: `low_rank_rows` of LoRAs, and their
            second matrix. None for none.
        gelu: Whether the tanh GELU of the sum is given.
        swiglu: Whether b is [gate; up] and silu(gate) * up is given, of both in `out_dtype`.

    Returns:
        (M, N) in `out_dtype`; (M, N / 2) with SwiGLU.
    """
    # int8: K * 127 * 127 stays far below 2**53, and CUDA has no integer matmul in every shape.
    wide = torch.float64 if a.dtype == torch.int8 else torch.float32
    total = (a.to(wide) @ b.to(wide).t()).float()
    if scale_a is not None:
        total = total.mul_(scale_a).mul_(scale_b.t())
    if bias is not None:
        total = total.add_(bias)
    if beside is not None:
        t, up = beside
        total = total.addmm_(t.float(), up.float().t())
    if gelu:
        total = torch.ops.aten.gelu_(total, approximate="tanh")
    total = total.to(out_dtype)
    if swiglu:
        total, up = total.chunk(2, 1)
        swiglu_quantize(total, up, None)
    return total.contiguous()


def low_rank_rows(
    x: torch.Tensor,
    text_down: torch.Tensor | None,
    image_down: torch.Tensor | None,
    order: RowOrder,
    out: torch.Tensor,
) -> None:
    """Returns what LoRAs make of the rows of both streams before their second matrix.

        t = x @ down.T

    Sums are fp32 and rounded once.

    Args:
        x: (rows, K), bf16, fp16 or fp32.
        text_down, image_down: (R, K) in x's dtype, contiguous; None for a stream without LoRAs.
        order: Which rows are of which stream.
        out: Where to write, (rows, R or more); columns from a stream's own R on are not written.
    """
    lengths, downs = order.items * order[1:], order.items * (text_down, image_down)
    for rows, written, down in zip(x.split(lengths), out.split(lengths), downs, strict=True):
        if down is not None:
            written[:, : len(down)] = rows @ down.t()


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    norm: QKNorm,
    rotary: Rotary,
    tokens: Tokens,
    eps: float,
    first: int = 0,
) -> None:
    """Normalizes the heads of queries and keys and turns them by their position, in place.

        n = x / sqrt(mean(x * x) + eps) * weight;  (a, b) = (a cos - b sin, a sin + b cos)

    with a and b the elements 2 i and 2 i + 1 of a head. Computed in fp32, or float64 for a float64
    q, and rounded once.

    Args:
        q: (B, queries, heads, head_dim), in joint order from token `first` on; batch and tokens
            with any stride.
        k: (B, joint, heads, head_dim), likewise.
    """
    wide = wide_dtype(q)
    cos, sin = (part.to(wide).unsqueeze(2) for part in rotary)
    for x, start, weights in (
        (q, first, (norm.text_query, norm.query)),
        (k, 0, (norm.text_key, norm.key)),
    ):
        stop = start + x.shape[1]
        cut = min(max(tokens.text, start), stop)
        for begin, end, weight in ((start, cut, weights[0]), (cut, stop, weights[1])):
            here = slice(begin - start, end - start)
            part = x[:, here].to(wide)
            part = part * (part.square().mean(-1, keepdim=True) + eps).rsqrt()
            a, b = (part * weight.to(wide)).unflatten(-1, (-1, 2)).unbind(-1)
            c, s = cos[:, begin:end], sin[:, begin:end]
            x[:, here] = torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)


class Guidance(NamedTuple):
    """How far the image's rows are pushed."""

    scale: float  # how far from the negative prompt; at 1 nothing changes
    tau: float  # how many times the norm of a row may grow
    alpha: float  # the share of the result that is guided
    on: tuple[bool, ...] = ()  # for each item of a batch, whether it is guided; empty for all

    def guide(self, positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        """Pushes rows, with the norms that are the sums of their magnitudes.

            g = negative + scale * (positive - negative)
            g = g * tau * |positive| / (|g| + 1e-7) where |g| > tau * |positive|
            out = alpha * g + (1 - alpha) * positive

        Args:
            positive: What attention gives, (batch, rows, heads * head_dim).
            negative: The same of the negative prompt, written over with the result.
        """
        guided = torch.lerp(negative, positive, self.scale, out=negative)
        was, grown = (
            torch.linalg.vector_norm(it, 1, -1, keepdim=True, dtype=wide_dtype(it))
            for it in (positive, guided)
        )
        guided.mul_(torch.where(grown > self.tau * was, self.tau * was / (grown + 1e-7), 1.0))
        out = torch.lerp(positive, guided, self.alpha, out=guided)
        for item, on in enumerate(self.on):
            if not on:
                out[item] = positive[item]
        return out


# What attention gives, (batch, tokens, heads * head_dim), and the logarithms of the sums of
# exp(scores), (batch, heads, tokens), where it is to a part of the keys.
AttentionPart = tuple[torch.Tensor, "torch.Tensor | None"]


def merge_attention(first: AttentionPart, second: AttentionPart) -> torch.Tensor:
    """Merges attention to two parts of the keys into that to both, in fp32.

        out = (out1 * exp(lse1) + out2 * exp(lse2)) / (exp(lse1) + exp(lse2))

    Args:
        first, second: With log-sum-exps; the second is written over with the result.
    """
    (out, lse), (other, lse_2) = first, second
    share = (lse - lse_2).sigmoid().transpose(1, 2).unsqueeze(-1)
    part, into = (it.unflatten(2, (lse.shape[1], -1)) for it in (out, other))
    torch.addcmul(part * share, into, 1 - share, out=into)
    return other


def guided_rows(
    guidance: Guidance, parts: Sequence[AttentionPart], first: int = 0, second: int = 0
) -> torch.Tensor:
    """Merges what `nag.attend_both` gives and guides it.

    Args:
        parts: Of the prompt, of the negative prompt, which is written over, and of the image.
        first: How many of the rows are the prompt's: they stay as they are with it.
        second: Up to where rows are the negative prompt's: they stay as they are with that.
    """
    (positive, _), (out, _), *shared = parts
    for image in shared:
        for text in parts[:2]:
            merge_attention(image, text)
    guidance.guide(positive[:, second:], out[:, second:])
    out[:, :first] = positive[:, :first]
    return out


def largest_of(format: str) -> float:
    """Gives the largest magnitude of a format; raises SettingError for a name that is none."""
    if format not in FORMATS:
        raise SettingError(f"there is no quantized format {format!r}: use {' or '.join(FORMATS)}")
    return FORMATS[format].largest


def check_rotation(size: int, columns: int) -> None:
    """Raises SettingError for groups that do not fit rows of so many columns."""
    if not is_rotation(size, columns):
        raise SettingError(
            f"rows of {columns} columns cannot be rotated in groups of {size}: a group is a power "
            "of 4 that divides the columns"
        )


def storage_of(format: RowFormat) -> torch.dtype:
    """Gives the dtype of quantized rows; raises SettingError for a format that there is not."""
    largest_of(format.storage)
    return getattr(torch, FORMATS[format.storage].dtype)


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """Says what is computed in: float64 of a float64 `x`, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _segments(tokens: Tokens) -> Iterator[tuple[slice, str, int]]:
    """Yields rows that share a modulation: their place, their stream, and its row of that."""
    begin = 0
    for item in range(tokens.batch):
        yield slice(begin, begin + tokens.text), "text", item
        begin += tokens.text
    for item in range(tokens.batch):
        zero = begin + tokens.zero_from
        yield slice(begin, zero), "image", item
        begin += tokens.image
        if zero < begin:
            yield slice(zero, begin), "image", tokens.batch + item


def decode_weight(
    codes: torch.Tensor, group_scale: torch.Tensor, codebook: torch.Tensor | None, bits: int
) -> torch.Tensor:
    """Expands a weight of 4 or 6 bits to int8: rint(clamp(level * group_scale, -127, 127)).

    A byte holds two codes, the lower bits first; of 6 bits the upper two follow in bytes of four.
    A code's level is its entry in the codebook, or without one the code less half of all codes.

    Args:
        codes: (N, K * bits / 8), int8.
        group_scale: (N, groups), fp32 or float8_e4m3fn, also as uint8; a group is K / groups
            columns wide.
        codebook: (16,), fp32, or None.
        bits: 4 or 6.

    Returns:
        (N, K), int8.
    """
    if group_scale.dtype == torch.uint8:
        group_scale = group_scale.view(torch.float8_e4m3fn)
    rows, k = len(codes), codes.shape[1] * 8 // bits
    pairs = codes[:, : k // 2].contiguous().view(torch.uint8)
    code = torch.stack((pairs & 15, pairs >> 4), dim=-1).view(rows, k)
    if bits == 6:
        fours = codes[:, k // 2 :].contiguous().view(torch.uint8)
        upper = torch.stack([fours >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
        code |= upper.view(rows, k) << 4
    if codebook is None:
        level = code.float() - 2 ** (bits - 1)
    else:
        level = codebook.index_select(0, code.flatten().int())
    level = level.view(*group_scale.shape, -1).mul_(group_scale.float()[..., None])
    return level.round_().clamp_(-127, 127).to(torch.int8).view(rows, k)
