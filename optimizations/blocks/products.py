"""Which rows of a pass are computed, and the matrix products of a block, prepared for them: where
each reads and writes is known, and a call takes the layer's tensors alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...spec.formats import RowFormat
from .. import reference
from ..fused import Ops
from ..linear import FAST, FEW_ROWS, Gemm, dense_linear
from ..reference import QuantizedRows, Tokens, rotate
from .block_form import LayerForm

ALIGNMENT = 16  # bytes; cuBLASLt takes scales from such addresses only

# From so many rows on bf16 layers with LoRAs go through Triton; with few, cuBLAS has better tiles.
MANY_ROWS = 1024


class Share(NamedTuple):
    """The rows of a pass that one card computes."""

    whole: Tokens  # tokens of the pass
    text: bool  # whether the text's rows are among them
    # start, stop: the image tokens of each item that are
    start: int
    stop: int
    # the shares of other cards whose normalized rows come here, so that their keys and values are
    # made here; empty where keys and values come
    received: tuple[Share, ...] = ()
    # whether the text's keys and values come from a cache, normalized and rotated
    cached: bool = False

    @classmethod
    def all(cls, tokens: Tokens, prefix: int = 0) -> Share:
        """That of a card alone.

        Args:
            prefix: Tokens before those of each item whose keys and values are cached; the text is
                among them.
        """
        if not prefix:
            return cls(tokens, True, 0, tokens.image)
        whole = tokens._replace(text=prefix)
        return cls(whole, False, 0, tokens.image, cached=True)

    @property
    def tokens(self) -> Tokens:
        batch, text, _, zero_from = self.whole
        image = self.stop - self.start
        zero_from = min(max(zero_from - self.start, 0), image)
        return Tokens(batch, text if self.text else 0, image, zero_from)

    @property
    def first(self) -> int:
        """Gives the first of its tokens in joint order; they follow one another."""
        return 0 if self.text else self.whole.text + self.start

    @property
    def image(self) -> slice:
        return slice(self.whole.text + self.start, self.whole.text + self.stop)


class PackedWeight(NamedTuple):
    """A weight in 4 or 6 bits, which stands for int8; as `reference.decode_weight` takes it."""

    codes: torch.Tensor  # (N, K * bits / 8), int8, contiguous
    group_scale: torch.Tensor  # (N, groups), fp32 or bytes of e4m3, contiguous
    codebook: torch.Tensor | None  # (16,), fp32, or None
    bits: int  # 4 or 6


class PackedOperand(NamedTuple):
    """A layer's tensors whose weight has to be decoded before each product."""

    weight: PackedWeight
    scale: torch.Tensor
    bias: torch.Tensor | None
    up: torch.Tensor | None


class Operand(NamedTuple):
    """A layer's tensors with the views that products read, made once."""

    weight: torch.Tensor  # (N, K), in the dtype of the activations, or quantized
    scale: torch.Tensor | None  # (N, 1), fp32; None for a weight that is not quantized
    bias: torch.Tensor | None  # (N,), or None
    weight_t: torch.Tensor
    scale_t: torch.Tensor | None
    # the second matrix of the layer's LoRAs, (N, R), in the dtype of the activations; None without
    up: torch.Tensor | None
    up_t: torch.Tensor | None

    @classmethod
    def of(
        cls,
        weight: torch.Tensor | PackedWeight,
        scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        up: torch.Tensor | None = None,
    ) -> Operand | PackedOperand:
        """Makes the views, where the weight can be read as it is."""
        if isinstance(weight, PackedWeight):
            return PackedOperand(weight, scale, bias, up)
        scale_t, up_t = (None if part is None else part.t() for part in (scale, up))
        return cls(weight, scale, bias, weight.t(), scale_t, up, up_t)


class StreamSlice(NamedTuple):
    """One stream's rows in a matrix: `items` runs of `length` rows, one every `step` rows."""

    start: int
    items: int
    length: int
    step: int

    @property
    def together(self) -> bool:
        return self.items == 1 or self.step == self.length


def streams_of(x: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits a matrix in stream order into text and image, each (batch, tokens, columns)."""
    cut, columns = tokens.text_rows, x.shape[1]
    return (
        x[:cut].view(tokens.batch, tokens.text, columns),
        x[cut:].view(tokens.batch, tokens.image, columns),
    )


def in_stream_order(tokens: Tokens) -> tuple[StreamSlice, StreamSlice]:
    """Gives text and image in a matrix of `tokens.rows` rows in stream order."""
    return (
        StreamSlice(0, tokens.batch, tokens.text, tokens.text),
        StreamSlice(tokens.text_rows, tokens.batch, tokens.image, tokens.image),
    )


def in_joint_order(tokens: Tokens) -> tuple[StreamSlice, StreamSlice]:
    """Gives text and image in a matrix of `tokens.rows` rows, item by item."""
    return (
        StreamSlice(0, tokens.batch, tokens.text, tokens.joint),
        StreamSlice(tokens.text, tokens.batch, tokens.image, tokens.joint),
    )


class Rows:
    """The rows that layers read, plain, quantized, or both."""

    def __init__(self, matrix: torch.Tensor | None = None) -> None:
        self.matrix = matrix
        self.fixed = matrix is not None  # whether `matrix` stays the same tensor
        self.quantized: dict[RowFormat, QuantizedRows] = {}  # by format

    def plain(self, start: int, length: int) -> torch.Tensor:
        return self.matrix[start : start + length]

    def let_go(self) -> None:
        self.matrix = None


class Read(NamedTuple):
    """What a layer of one stream reads and writes."""

    rows: Rows  # what it reads of
    part: StreamSlice  # which of them
    out: torch.Tensor  # (batch, tokens, N) of any strides
    gelu: bool = False  # whether the tanh GELU of the product is written
    # what the second matrix of the layer's LoRAs reads, (rows, R), a row for each of `rows`; None
    # without LoRAs
    low: torch.Tensor | None = None
    swiglu: bool = False  # whether its SwiGLU is, in half the columns (`swiglu_inside`)

    def low_of(self, start: int, length: int) -> torch.Tensor | None:
        return None if self.low is None else self.low[start : start + length]

    def pieces(self) -> list[tuple[int, int, torch.Tensor]]:
        """Gives first row, rows, and where the product goes, contiguous, of each product."""
        part, out = self.part, self.out
        if part.together and out.is_contiguous():
            return [(part.start, part.items * part.length, out.view(-1, out.shape[-1]))]
        starts = range(part.start, part.start + part.items * part.step, part.step)
        return [(start, part.length, out[i]) for i, start in enumerate(starts)]


# Takes the operand of a layer, or its module where the layer runs itself.
Product = Callable[[Any], None]


def product_of(read: Read, form: LayerForm, ops: Ops) -> Product:
    if form.kind is None:
        return module_product(read)
    if not isinstance(form.kind, RowFormat):
        return dense_product(read, ops)
    if form.format is None:
        return expanded_product(read, form.kind, form.gemm)
    return quantized_product(read, form.format, form.gemm)


def module_product(read: Read) -> Product:
    rows, part, out, gelu, *_ = read

    def run(module: torch.nn.Module) -> None:
        x = rows.plain(part.start, (part.items - 1) * part.step + part.length)
        shape, row = (part.items, part.length, x.shape[1]), x.stride(0)
        result = module(x.as_strided(shape, (part.step * row, row, 1)))
        out.copy_(torch.ops.aten.gelu(result, approximate="tanh") if gelu else result)

    return run


def dense_product(read: Read, ops: Ops) -> Product:
    rows = read.rows
    pieces = [
        (start, length, _dense_piece(out, read.low_of(start, length), read.gelu, ops))
        for start, length, out in read.pieces()
    ]
    if not rows.fixed or len(pieces) > 1:

        def run(operand: Operand) -> None:
            for start, length, piece in pieces:
                piece(operand, rows.plain(start, length))

        return run
    ((start, length, piece),) = pieces
    x = rows.plain(start, length)
    return lambda operand: piece(operand, x)


# Takes an operand, and rows of the shape that it is for.
Piece = Callable[[Operand, torch.Tensor], None]


def _dense_piece(out: torch.Tensor, low: torch.Tensor | None, gelu: bool, ops: Ops) -> Piece:
    def run(operand: Operand, x: torch.Tensor) -> None:
        _dense(x, operand, out, gelu, low)

    prepare = ops.scaled_gemm
    if prepare is None or low is None or len(out) < MANY_ROWS or out.dtype is torch.float32:
        return run
    beside = _triton(prepare, None, out, low, gelu)

    def run_beside(operand: Operand, x: torch.Tensor) -> None:
        whole = operand.weight.is_contiguous() and x.is_contiguous()
        (beside if whole else run)(operand, x)

    return run_beside


def _dense(
    x: torch.Tensor, operand: Operand, out: torch.Tensor, gelu: bool, low: torch.Tensor | None
) -> None:
    """As `linear.dense_linear`, past what it finds out; with LoRAs beside."""
    bias = operand.bias
    if low is not None:
        # cuBLAS adds one matrix to a product: what LoRAs add is there before.
        dense_linear(low, operand.up, bias, out=out)
        torch.addmm(out, x, operand.weight_t, out=out)
        if gelu:
            torch.ops.aten.gelu_(out, approximate="tanh")
    elif bias is None and not gelu:
        torch.mm(x, operand.weight_t, out=out)
    elif bias is None or bias.dtype is not x.dtype or (gelu and not x.is_cuda):
        dense_linear(x, operand.weight, bias, gelu=gelu, out=out)
    elif gelu:
        torch._addmm_activation(bias, x, operand.weight_t, use_gelu=True, out=out)
    else:
        torch.addmm(bias, x, operand.weight_t, out=out)


def quantized_product(read: Read, format: RowFormat, gemm: Gemm) -> Product:
    source = read.rows.quantized[format]
    pieces = [
        _quantized(gemm, *source.part(start, length), out, read.low_of(start, length), read.swiglu)
        for start, length, out in read.pieces()
    ]
    if len(pieces) == 1:
        return pieces[0]

    def run(operand: Operand) -> None:
        for piece in pieces:
            piece(operand)

    return run


def expanded_product(read: Read, format: RowFormat, gemm: Gemm) -> Product:
    """Multiplies rows that are not quantized by quantized weights, which the card expands."""
    pieces, rows, gelu = read.pieces(), read.rows, read.gelu

    def run(operand: Operand) -> None:
        for start, length, out in pieces:
            x = rows.plain(start, length)
            weight, scale, bias, *_ = operand
            out.copy_(gemm.linear(x, weight, scale, bias, format.rotation))
            if read.low is not None:
                out.addmm_(read.low_of(start, length), operand.up_t)
            if gelu:
                torch.ops.aten.gelu_(out, approximate="tanh")

    return run


def merged_product(read: Read, format: RowFormat | None) -> Product:
    """Multiplies by a weight that turned out plain, as when ComfyUI has merged a LoRA into it on
    its way.
    """

    def run(operand: Operand) -> None:
        for start, length, out in read.pieces():
            if format and read.rows.fixed:  # then only the quantized rows are of this block
                values, scale = read.rows.quantized[format].part(start, length)
                if format.rotation:
                    x = rotate(values.float().mul_(scale), format.rotation).to(out.dtype)
                else:
                    x = values.to(out.dtype).mul_(scale)
            else:
                x = read.rows.plain(start, length)
            wide = out.new_empty(length, 2 * out.shape[1]) if read.swiglu else out
            _dense(x, operand, wide, read.gelu, read.low_of(start, length))
            if read.swiglu:
                gate, up = wide.chunk(2, 1)
                reference.swiglu_quantize(gate, up, None)
                out.copy_(gate)

    return run


def by_triton(gemm: Gemm, lora: bool) -> bool:
    """Whether Triton multiplies quantized rows, with a LoRA beside or without."""
    # Only its epilogue adds LoRAs, which spares a pass over the output.
    instead = lora or gemm.backend == "kitchen"
    return gemm.backend == "triton" or (instead and gemm.row_quantizer == "triton")


def swiglu_inside(layer: LayerForm) -> bool:
    """Whether the product of [gate; up] makes their SwiGLU, so that neither is written.

    Predicted: a block of 4,096 rows reads and writes 201 MB less, which take an H200 50 us.
    """
    return layer.format is not None and by_triton(layer.gemm, layer.rank > 0)


def _quantized(
    gemm: Gemm,
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    out: torch.Tensor,
    low: torch.Tensor | None,
    swiglu: bool,
) -> Product:
    """`gemm.linear_quantized` of these rows into out, with LoRAs beside, by the cheapest call that
    there is.
    """
    if by_triton(gemm, low is not None):
        from ..kernels.scaled_gemm import scaled_gemm

        run_triton = _triton(
            lambda *like: scaled_gemm(*like).prepared(), x_scale, out, low, swiglu=swiglu
        )
        return lambda operand: run_triton(operand, xq)
    if xq.is_meta:  # nothing is compiled, and torch cannot tell shapes of all that is called
        return lambda operand: None
    aligned = x_scale.data_ptr() % ALIGNMENT == 0
    direct = gemm.backend in ("scaled_mm", FAST) and len(xq) > FEW_ROWS and aligned
    fast = gemm.backend == FAST

    def run(operand: Operand) -> None:
        bias = operand.bias
        plain = bias is None or bias.dtype is out.dtype
        if direct and plain and out.dtype is torch.bfloat16:
            torch._scaled_mm(
                xq,
                operand.weight_t,
                x_scale,
                operand.scale_t,
                bias,
                out_dtype=torch.bfloat16,
                use_fast_accum=fast,
                out=out,
            )
        else:
            gemm.linear_quantized(
                xq, x_scale, operand.weight, operand.scale, bias, out.dtype, out=out
            )
        if low is not None:
            out.addmm_(low, operand.up_t)

    return run


def _triton(
    prepare: Callable[..., Callable[..., None]],
    x_scale: torch.Tensor | None,
    out: torch.Tensor,
    low: torch.Tensor | None,
    gelu: bool = False,
    swiglu: bool = False,
) -> Piece:
    launches: dict[torch.dtype | None, Callable[..., None]] = {}  # by the bias's dtype

    def run(operand: Operand, x: torch.Tensor) -> None:
        weight, scale, bias, up = operand.weight, operand.scale, operand.bias, operand.up
        key = None if bias is None else bias.dtype
        launch = launches.get(key)
        if launch is None:
            beside = None if low is None else (low, up)
            launch = prepare(x, weight, x_scale, scale, bias, out, beside, gelu, swiglu)
            launches[key] = launch
        launch(weight, scale, bias, up, x)

    return run
