"""Triton: what the kernels share whose programs hold one whole row in registers.

A row is loaded whole or in three equal parts, a, b and c. The widths of the model are 3 * 2**n,
and three parts of 2**n fit them without a mask, where one part of 2**(n + 2) computes a quarter of
its lanes for nothing: gelu_quantize takes 53 us in three parts of 4096 and 71 in one of 16384,
residual_norm with fp8 29.5 us in three of 1024 and 35 in one of 4096 (H200, 4296 rows of bf16). Of
a row in one part a, b and c are that part three times: all are computed alike, and the compiler
makes one set of instructions for the three.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...caches import cached
from ...spec.formats import SMALLEST_SCALE, RowFormat
from ..reference import SMALLEST_ROW, WIDEST_ROW, QuantizedRows, check_rotation, largest_of
from .launch import Launch

# What a warp reads of bf16 at once, 16 bytes for each thread.
NARROWEST_PART = 256


@cached
def launch_shape(k: int, rotated: bool = False) -> tuple[int, int, int]:
    """Elements of a part, parts and warps for rows of `k` elements, at most `WIDEST_ROW`.

    Groups that divide such a row divide its parts.
    """
    # The next power of two; triton.next_power_of_2 takes 3 us for it.
    covering = max(1 << (k - 1).bit_length(), NARROWEST_PART)
    # In three parts a thread then holds 8 elements of each: 16 bytes of bf16. Of a rotated row it
    # holds 16, so that fewer of a group are in other threads: 17.6, 54.4 and 64.8 us for rows of
    # 3072 and 12288 and for the GELU of 12288, 14.4, 43.5 and 46 without the rotation (H200, 4296
    # rows).
    warps = min(max(covering // (2048 if rotated else 1024), 1), 16)
    part = covering // 4
    if k == 3 * part and part >= NARROWEST_PART:
        return part, 3, warps
    return covering, 1, warps


@triton.jit
def load_row(row_ptr, width: tl.constexpr, part: tl.constexpr, parts: tl.constexpr):
    """Loads the parts of a row as fp32, with zeros past its end."""
    column = tl.arange(0, part)
    # The mask is true throughout, and compiled away, where the part is not wider than the row.
    a = tl.load(row_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    b, c = a, a
    if parts == 3:
        b = tl.load(row_ptr + part + column).to(tl.float32)
        c = tl.load(row_ptr + 2 * part + column).to(tl.float32)
    return a, b, c


@triton.jit
def store_row(row_ptr, a, b, c, width: tl.constexpr, part: tl.constexpr, parts: tl.constexpr):
    """Writes the parts of a row in the dtype that is pointed to."""
    column = tl.arange(0, part)
    tl.store(row_ptr + column, a.to(row_ptr.dtype.element_ty), mask=column < width)
    if parts == 3:
        tl.store(row_ptr + part + column, b.to(row_ptr.dtype.element_ty))
        tl.store(row_ptr + 2 * part + column, c.to(row_ptr.dtype.element_ty))


@triton.jit
def sum_row(a, b, c, parts: tl.constexpr):
    if parts == 3:
        a += b + c
    return tl.sum(a, axis=0)


@triton.jit
def quantize_row(
    a,
    b,
    c,
    largest: tl.constexpr,
    smallest_row: tl.constexpr,
    to_integer: tl.constexpr,
    rotation: tl.constexpr,
    part: tl.constexpr,
    parts: tl.constexpr,
    exact: tl.constexpr = False,
):
    """scale = max(|x|) / largest, or 1 below smallest_row;  steps = round(x * (1 / scale)).

    x is rotated before in groups of `rotation` columns, which divide a part; 0 for none. `exact` is
    for weights, to the bits that the processor writes into files: x is divided by the scale, which
    is at least smallest_row, or 1 for zeros.
    """
    unit: tl.constexpr = 1.0 if rotation == 0 else rotation**-0.5  # a power of 2: exact anywhere
    if rotation > 0:
        a = _rotate(a, part, rotation, exact)
        if parts == 3:
            b = _rotate(b, part, rotation, exact)
            c = _rotate(c, part, rotation, exact)
        else:
            b, c = a, a
    # Magnitudes sort like their bits, NaN above inf above all else; a float max drops NaN.
    bits = tl.maximum(tl.maximum(_magnitude_bits(a), _magnitude_bits(b)), _magnitude_bits(c))
    magnitude = tl.max(bits, axis=0).to(tl.float32, bitcast=True) * unit
    scale = tl.div_rn(magnitude, largest)
    if exact:
        scale = tl.where(scale < smallest_row, smallest_row, scale)  # NaN is not smaller
        scale = tl.where(magnitude == 0.0, 1.0, scale)
        a = tl.div_rn(a * unit, scale)
        b = tl.div_rn(b * unit, scale)
        c = tl.div_rn(c * unit, scale)
    else:
        scale = tl.where(magnitude < smallest_row, 1.0, scale)
        steps_in_one = tl.div_rn(1.0, scale) * unit
        a, b, c = a * steps_in_one, b * steps_in_one, c * steps_in_one
    a = round_to_step(a, largest, to_integer, exact)
    b = round_to_step(b, largest, to_integer, exact)
    c = round_to_step(c, largest, to_integer, exact)
    return a, b, c, scale


@triton.jit
def _rotate(x, part: tl.constexpr, size: tl.constexpr, exact: tl.constexpr):
    """As `reference.rotate` of one part of a row, times sqrt(size)."""
    for digit in tl.static_range(7):
        if 4 << (2 * digit) <= size:
            x = _rotate_digit(x, part, 1 << (2 * digit), exact)
    return x


@triton.jit
def _rotate_digit(x, part: tl.constexpr, low: tl.constexpr, exact: tl.constexpr):
    """One factor of the matrix, over the digit of base 4 that is worth `low` columns: the sum of
    all four columns, less twice the one where both bits of the digit are turned.
    """
    x = tl.reshape(x, (part // (4 * low), 2, 2, low))
    if low <= 4 and not exact:  # a thread holds all four: the fewest additions
        four = tl.sum(tl.sum(x, axis=2, keep_dims=True), axis=1, keep_dims=True)
        x = four - 2.0 * _neighbour(_neighbour(x, 2), 1)
    else:  # other threads do: the fewest shuffles; and the sums in the order of files
        other = _neighbour(x, 2)
        x = (x + other) + _neighbour(x - other, 1)
    return tl.reshape(x, (part,))


@triton.jit
def _neighbour(x, axis: tl.constexpr):
    """Exchanges the two entries of an axis."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ tl.xor_sum(bits, axis=axis, keep_dims=True)).to(tl.float32, bitcast=True)


@triton.jit
def _magnitude_bits(x):
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def round_to_step(x, largest: tl.constexpr, to_integer: tl.constexpr, signed: tl.constexpr = False):
    """To even: an int32 whose low byte is the whole number, or fp32 that e4m3 holds.

    Adding 1.5 * 2**(23 + s) leaves no bits below 2**s; with s = 0 the number is in the low bits of
    the sum, and a cast from float is saved. Triton's own cast to e4m3 truncates to fp16 on the way
    on sm_89 (before 3.9), and its interpreter makes 64 of 127.3.
    """
    # The clamp also keeps multiply and add from becoming one fma, which would not be the twin's.
    x = tl.clamp(x, -largest, largest)
    if to_integer:
        return (x + 1.5 * 8388608.0).to(tl.int32, bitcast=True)
    else:
        # s is 3 below the exponent of the number, but never below that of e4m3's subnormals.
        exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, (127 - 6) << 23)
        shift = (exponent + ((20 << 23) | (1 << 22))).to(tl.float32, bitcast=True)
        rounded = (x + shift) - shift
        if signed:  # zeros keep their sign, as torch's do
            sign = x.to(tl.int32, bitcast=True) & -2147483648
            rounded = (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        return rounded


def quantization(format: RowFormat | None) -> dict[str, float | bool | None]:
    """Gives the constants of a kernel that calls `quantize_row`, by name."""
    return {
        "largest": None if format is None else largest_of(format.storage),
        "smallest_row": SMALLEST_ROW,
        "to_integer": format is not None and format.storage == "int8",
        "rotation": 0 if format is None else format.rotation,
    }


def _quantizer(
    kernel: triton.JITFunction,
    x: torch.Tensor,
    format: RowFormat,
    out: QuantizedRows,
    smallest_row: float = SMALLEST_ROW,
    **own: bool,
) -> Launch:
    """Launches `_row_quantize_kernel`, or one with the same parameters; `own` are constants that
    not all of them have.
    """
    rows, k = x.shape
    if k > WIDEST_ROW or (k > 1 and x.stride(1) != 1):
        raise ValueError(
            f"contiguous rows of at most {WIDEST_ROW} elements can be quantized, got {k} with "
            f"strides {x.stride()}"
        )
    if out.values.shape != x.shape:
        raise ValueError(f"{tuple(x.shape)} does not fit into {tuple(out.values.shape)}")
    if format.rotation:
        check_rotation(format.rotation, k)
    part, parts, warps = launch_shape(k, format.rotation > 0)
    constants = {
        "k": k,
        **quantization(format),
        "smallest_row": smallest_row,
        "part": part,
        "parts": parts,
        **own,
    }
    fixed = (out.values, out.scale, x.stride(0), out.cut, out.gap)
    return Launch(kernel, rows, (x,), fixed, constants, num_warps=warps)


# Triton: per-row quantization in one pass over the rows.


@triton.jit(do_not_specialize=["cut", "gap"])
def _row_quantize_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    x_stride,
    cut,
    gap,
    k: tl.constexpr,
    largest: tl.constexpr,
    smallest_row: tl.constexpr,
    to_integer: tl.constexpr,
    rotation: tl.constexpr,
    part: tl.constexpr,
    parts: tl.constexpr,
    exact: tl.constexpr,
):
    """As `quantize_row`, of a row in memory."""
    row = tl.program_id(0).to(tl.int64)
    a, b, c = load_row(x_ptr + row * x_stride, k, part, parts)
    a, b, c, scale = quantize_row(
        a, b, c, largest, smallest_row, to_integer, rotation, part, parts, exact
    )
    store_row(q_ptr + row * k, a, b, c, k, part, parts)
    tl.store(scale_ptr + row + tl.where(row >= cut, gap, 0), scale)


def row_quantize(x: torch.Tensor, format: RowFormat, out: QuantizedRows) -> Launch:
    """As `reference.row_quantize`, into `out`, of x or of tensors like it.

    Args:
        x: (M, K), with any row stride and contiguous rows; K is at most `WIDEST_ROW`.
    """
    return _quantizer(_row_quantize_kernel, x, format, out, exact=False)


def quantize_weight(x: torch.Tensor, format: RowFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """As `loaders.quantize.quantize_rows`, bit for bit; x as of `row_quantize`, of rows."""
    out = QuantizedRows.empty(x, format)
    weight_quantizer(x.contiguous(), format, out).once()
    return out.values, out.scale


def weight_quantizer(x: torch.Tensor, format: RowFormat, out: QuantizedRows) -> Launch:
    """As `quantize_weight`, into `out`, of contiguous rows."""
    return _quantizer(_row_quantize_kernel, x, format, out, SMALLEST_SCALE, exact=True)


# Triton: tanh GELU and per-row quantization in one pass over the rows.


@triton.jit(do_not_specialize=["cut", "gap"])
def _gelu_quantize_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    x_stride,
    cut,
    gap,
    k: tl.constexpr,
    largest: tl.constexpr,
    smallest_row: tl.constexpr,
    to_integer: tl.constexpr,
    rotation: tl.constexpr,
    part: tl.constexpr,
    parts: tl.constexpr,
    keep: tl.constexpr,
):
    """As `quantize_row`, of the GELU of a row in memory, which is written over the row to `keep`
    it.
    """
    row = tl.program_id(0).to(tl.int64)
    a, b, c = load_row(x_ptr + row * x_stride, k, part, parts)
    a = gelu_tanh(a)
    b = gelu_tanh(b)
    c = gelu_tanh(c)
    if keep:
        store_row(x_ptr + row * x_stride, a, b, c, k, part, parts)
    a, b, c, scale = quantize_row(a, b, c, largest, smallest_row, to_integer, rotation, part, parts)
    store_row(q_ptr + row * k, a, b, c, k, part, parts)
    tl.store(scale_ptr + row + tl.where(row >= cut, gap, 0), scale)


@triton.jit
def gelu_tanh(x):
    """x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 x**3).

    (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)), which loses no bits where tanh(u) is near -1.
    """
    # exp2 of -2 u / ln(2), its constants multiplied out; 0 or inf far out, and no NaN.
    return x / (1.0 + tl.exp2(x * (-2.302208198144325 - 0.1029432395800235 * (x * x))))


def gelu_quantize(
    x: torch.Tensor, format: RowFormat, out: QuantizedRows, keep: bool = False
) -> Launch:
    """As `reference.gelu_quantize`, into `out`; x as of `row_quantize`."""
    return _quantizer(_gelu_quantize_kernel, x, format, out, keep=keep)


# Triton: SwiGLU and per-row quantization in one pass over gate and up.


@triton.jit(do_not_specialize=["cut", "gap"])
def _swiglu_quantize_kernel(
    gate_ptr,
    up_ptr,
    q_ptr,
    scale_ptr,
    stride,
    cut,
    gap,
    k: tl.constexpr,
    largest: tl.constexpr,
    smallest_row: tl.constexpr,
    to_integer: tl.constexpr,
    rotation: tl.constexpr,
    part: tl.constexpr,
    parts: tl.constexpr,
    keep: tl.constexpr,
):
    """As `quantize_row`, of gate / (1 + exp(-gate)) * up, which is written over the gate to
    `keep` it; that alone where there is no q.
    """
    row = tl.program_id(0).to(tl.int64)
    a, b, c = load_row(gate_ptr + row * stride, k, part, parts)
    up_a, up_b, up_c = load_row(up_ptr + row * stride, k, part, parts)
    a = silu(a) * up_a
    b = silu(b) * up_b
    c = silu(c) * up_c
    if keep:
        store_row(gate_ptr + row * stride, a, b, c, k, part, parts)
    if q_ptr is not None:
        a, b, c, scale = quantize_row(
            a, b, c, largest, smallest_row, to_integer, rotation, part, parts
        )
        store_row(q_ptr + row * k, a, b, c, k, part, parts)
        tl.store(scale_ptr + row + tl.where(row >= cut, gap, 0), scale)


@triton.jit
def silu(x):
    # exp2 is 0 or inf far out, and no NaN.
    return x / (1.0 + tl.exp2(x * -1.4426950408889634))


def swiglu_quantize(
    gate: torch.Tensor,
    up: torch.Tensor,
    format: RowFormat | None,
    out: QuantizedRows | None,
    keep: bool = False,
) -> Launch:
    """As `reference.swiglu_quantize`, into `out`; gate and up (M, K) have one row stride and
    contiguous rows, K is at most `WIDEST_ROW`.
    """
    rows, k = gate.shape
    if k > WIDEST_ROW:
        raise ValueError(f"rows of at most {WIDEST_ROW} elements can be activated, got {k}")
    if gate.shape != up.shape or gate.stride() != up.stride() or gate.stride(1) != 1:
        raise ValueError(
            "swiglu_quantize takes gate and up of one shape and row stride, got "
            f"{tuple(gate.shape)} of {gate.stride()} and {tuple(up.shape)} of {up.stride()}"
        )
    rotated = format is not None and format.rotation > 0
    if rotated:
        check_rotation(format.rotation, k)
    part, parts, warps = launch_shape(k, rotated)
    constants = {
        "k": k,
        **quantization(format),
        "part": part,
        "parts": parts,
        "keep": keep or format is None,
    }
    written = (None, None) if out is None else (out.values, out.scale)
    cut, gap = (rows, 0) if out is None else (out.cut, out.gap)
    fixed = (gate, up, *written, gate.stride(0), cut, gap)
    return Launch(_swiglu_quantize_kernel, rows, (), fixed, constants, num_warps=warps)
