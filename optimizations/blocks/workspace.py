"""Prepares what the blocks of a forward pass need for one shape: buffers, which take what a block
takes at its peak, and launches that read and write them. A workspace serves one pass at a time.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ...spec.formats import RowFormat
from ...spec.sizes import ROWS_AT_ONCE
from ...spec.transformer import GELU, SPLIT_SWIGLU, SWIGLU
from ..fused import Ops
from ..reference import (
    Modulation,
    QKNorm,
    QuantizedRows,
    Rotary,
    RowOrder,
    storage_of,
)
from .block_form import (
    ATTENTION_OUT,
    IMAGE_IN,
    IMAGE_LAST,
    KEYS,
    MLP_IN,
    MLP_OUT,
    PLACES,
    QKV,
    QUERIES,
    STAGES,
    BlockForm,
    LayerForm,
    common_format,
    of_stream,
)
from .products import (
    Operand,
    PackedOperand,
    Read,
    Rows,
    Share,
    StreamSlice,
    in_joint_order,
    in_stream_order,
    product_of,
    streams_of,
    swiglu_inside,
)

# Shapes whose launches are kept: those of a run with CFG, and of a few prompts before.
MOST_SHAPES = 8
SCALES_AT_ONCE = 4  # fp32 in 16 bytes


class Prefix(NamedTuple):
    """Keys and values of the tokens before those of a pass, each (batch, tokens, heads, head_dim),
    normalized and rotated.
    """

    keys: torch.Tensor
    values: torch.Tensor


class Heads(NamedTuple):
    # q of a share's tokens, k and v of all, (batch, tokens, heads, head_dim)
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class BufferMissingError(RuntimeError):
    """A closed workspace has no such buffer."""


class Workspace:
    """The buffers of a pass, and the programs that use them."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        # counts how often a buffer was exchanged for a larger one: what was prepared or captured
        # before that is void
        self.changes = 0
        # in a capture, whose buffers cudaMallocAsync lays no memory under before a replay
        self.closed = False
        # of the blocks that were seen, so that equal ones are one object
        self.forms: dict[BlockForm, BlockForm] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._shapes: dict[Hashable, dict[BlockForm, Program]] = {}

    @property
    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def program(self, form: BlockForm, share: Share, x: torch.Tensor) -> Program:
        key = share, x.dtype, x.device, x.shape[1]
        while True:
            changes = self.changes
            if key not in self._shapes:
                while len(self._shapes) >= MOST_SHAPES:
                    del self._shapes[next(iter(self._shapes))]
                self._shapes[key] = {}
            programs = self._shapes[key]
            if form not in programs:
                programs[form] = Program(self, form, share, x)
            if changes == self.changes:  # else a larger buffer has made it void
                return programs[form]

    def take(self, name: str, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Gives a buffer's first bytes as a tensor of the shape, of the dtype of `like`."""
        rows, *rest = shape
        needed = math.prod(shape) * like.dtype.itemsize
        with torch.inference_mode(False):  # a tensor of that mode cannot be written to outside
            buffer = self._buffers.get(name)
            if buffer is None or buffer.nbytes < needed or buffer.device != like.device:
                if self.closed:
                    raise BufferMissingError(name)
                if buffer is not None:
                    self._shapes.clear()
                    self.changes += 1
                    del buffer, self._buffers[name]
                rows = -(-rows // ROWS_AT_ONCE) * ROWS_AT_ONCE
                size = rows * math.prod(rest) * like.dtype.itemsize
                buffer = torch.empty(size, dtype=torch.uint8, device=like.device)
                self._buffers[name] = buffer
            return buffer[:needed].view(like.dtype).view(*shape)


class Program:
    """What blocks of one form do with the rows of one share: its buffers, and what is launched."""

    def __init__(self, space: Workspace, form: BlockForm, share: Share, x: torch.Tensor) -> None:
        # Which has this one: in a circle the buffers would wait for Python's collector.
        self._workspace = weakref.proxy(space)
        self.ops, self.form, self.share = space.ops, form, share
        self.like, self.width = x.new_empty(0), x.shape[1]
        tokens = self.tokens = share.tokens
        layers, inner, activation = form.layers, form.inner, form.spec.activation
        # q, k and v are read before the MLP's hidden rows are written.
        self._swiglu_inside = activation == SWIGLU and swiglu_inside(layers[IMAGE_IN])
        one = activation == GELU or self._swiglu_inside
        whole, columns = share.whole, inner if one else 2 * inner
        sizes = [it.rows * self.width for it in (tokens, whole, whole)]
        widest = -(-max(sum(sizes), tokens.rows * columns) // tokens.rows)
        wide = self.take("wide", tokens.rows, widest).flatten()
        parts = zip(wide[: sum(sizes)].split(sizes), (tokens, whole, whole), strict=True)
        heads = form.heads, self.width // form.heads
        self.heads = Heads(*(part.view(it.batch, it.joint, *heads) for part, it in parts))
        # (rows, D), what attention or MLP gives
        self.branch = self.take("branch", tokens.rows, self.width)
        # A row of h is written after the same row of the branch has been read.
        self.rows, self.mixed = Rows(self.branch), Rows()
        hidden = wide[: tokens.rows * columns].view(tokens.rows, columns)
        # what the MLP's first layers write, (rows, columns) each: one matrix, or gate and up, of
        # one row stride; with SwiGLU in the product what that makes
        self.hidden: Sequence[torch.Tensor] = hidden.split(inner, 1)
        if activation == SPLIT_SWIGLU:
            self.hidden = hidden.view(2, tokens.rows, inner).unbind()
        self.activated = Rows(self.hidden[0])  # written over what it is made of
        qkv, mlp_in = form.at(QKV), form.at(MLP_IN)
        # what the first layers read, where it is one format of all
        self.first_format = common_format(qkv)
        self._inner_format = common_format(mlp_in)
        # LoRAs read plain rows: of rows in 8 bits their part would have an error of 1 to 3 %.
        self.first_plain = any(layer.rank for layer in qkv)
        self._inner_plain = any(layer.rank for layer in mlp_in)
        if most := max(layer.down_rows for layer in layers):
            self.take("low rank", tokens.rows, most)
        # Before others: they take the widest buffers.
        self._activations = self._gelu() if activation == GELU else [self._swiglu()]
        self._first = self._quantizers(self.rows, qkv, self.first_format)
        self._inner = self._quantizers(self.rows, mlp_in, self._inner_format)
        self._out = self._quantizers(self.mixed, form.at(ATTENTION_OUT), None)
        self._norms: dict[tuple, Callable[..., None]] = {}
        self._lows: dict[range, Callable[..., None]] = {}
        self._rotations: dict[tuple, Callable[[QKNorm, Rotary], None]] = {}
        self._decoders: dict[tuple, tuple[torch.Tensor, Callable[..., None]]] = {}
        self.kept: dict[Hashable, Any] = {}  # what `cards.parts` prepares besides
        streams, joint = in_stream_order(tokens), in_joint_order(tokens)
        self.reads = [
            self._read(place, hidden, joint if place in ATTENTION_OUT else streams)
            for place in range(len(PLACES))
        ]
        # of each layer; takes its operand, or its module where it runs itself; None of a stream
        # that is on another card
        self.products = tuple(
            product_of(read, layer, self.ops) if read.part.length else None
            for read, layer in zip(self.reads, layers, strict=True)
        )

    def _read(
        self, place: int, hidden: torch.Tensor, order: tuple[StreamSlice, StreamSlice]
    ) -> Read:
        tokens, activation = self.tokens, self.form.spec.activation
        part, gelu = of_stream(place, order), False
        if place in QKV:
            rows, out = self.rows, self.of_share(place, self.share)
        elif place not in MLP_IN:
            rows = self.mixed if place in ATTENTION_OUT else self.activated
            out = of_stream(place, streams_of(self.branch, tokens))
        elif activation == SPLIT_SWIGLU:  # gate and up, both of the image's rows
            rows, (_, part) = self.rows, order
            _, out = streams_of(self.hidden[MLP_IN.index(place)], tokens)
        else:
            rows, out = self.rows, of_stream(place, streams_of(hidden, tokens))
            gelu = activation == GELU and self.form.layers[place].format is None
        inside = self._swiglu_inside and place in MLP_IN
        return Read(rows, part, out, gelu, self._low_of(place), inside)

    def readable(self, place: int, operand: Any) -> Any:
        """Gives an operand as products read it: where its weight is in 4 or 6 bits, decoded into a
        buffer that the next one of its stream overwrites: the text's products may run beside the
        image's.
        """
        if type(operand) is not PackedOperand:
            return operand
        codes, group_scale, codebook, bits = operand.weight
        key = place, bits, group_scale.shape, group_scale.dtype, codebook is None
        decoder = self._decoders.get(key)
        if decoder is None:
            n, k = self.form.weight_shape(place, self.width)
            most = self.form.weight_shape(IMAGE_IN, self.width)
            name = f"decoded {PLACES[place]}"
            whole = self._workspace.take(name, most, self._of(torch.int8)).flatten()
            values = whole[: n * k].view(n, k)
            decode = self.ops.decode_weight(*operand.weight, values)
            decoder = self._decoders[key] = values, decode
        values, decode = decoder
        decode(codes, group_scale, codebook)
        return Operand.of(values, operand.scale, operand.bias, operand.up)

    def compute_low(self, stage: range, downs: tuple[torch.Tensor | None, ...]) -> None:
        """Multiplies the rows that one of `STAGES` reads by its `downs` of `KnownBlock`."""
        rows = self.reads[stage.start].rows
        launch = self._lows.get(stage)
        if launch is None:
            tokens = self.tokens
            order = RowOrder(1, tokens.text_rows, tokens.rows - tokens.text_rows)
            if rows is self.mixed:
                order = RowOrder(tokens.batch, tokens.text, tokens.image)
            text, image = downs
            launch = self.ops.low_rank_rows(rows.matrix, text, image, order, self._low_out(stage))
            self._lows[stage] = launch
        launch(rows.matrix, *downs)

    def _low_of(self, place: int) -> torch.Tensor | None:
        # What the second matrix of a layer's LoRAs reads, (rows, R).
        layer = self.form.layers[place]
        if not layer.rank:
            return None
        (stage,) = (stage for stage in STAGES if place in stage)
        return self._low_out(stage)[:, layer.start : layer.start + layer.rank]

    def _low_out(self, stage: range) -> torch.Tensor:
        # Of all stages in one buffer, as each is read before the next is written.
        most = max(layer.down_rows for layer in self.form.at(stage))
        return self.take("low rank", self.tokens.rows, most)

    def of_share(self, place: int, share: Share) -> torch.Tensor:
        """Says where the rows of a share go: (batch, tokens, D) of its queries, of all keys or
        values.
        """
        q, k, v = self.heads
        if place in QUERIES:
            cut = share.tokens.text
            return q.flatten(2)[:, of_stream(place, (slice(cut), slice(cut, None)))]
        part = k if place in KEYS else v
        return part.flatten(2)[:, of_stream(place, (slice(share.whole.text), share.image))]

    def begin(self, x: torch.Tensor, norms: Modulation) -> None:
        """Runs the first norm of a block whose predecessor left nothing."""
        self._norm(x, None, norms, self.first_format, self.first_plain)
        self._quantize_first()

    def rotate(self, norms: QKNorm, rotary: Rotary) -> None:
        """Normalizes and rotates q and k, in place."""
        cos = rotary.cos
        key = norms.query.dtype, cos.dtype, cos.shape[0]
        rotate = self._rotations.get(key)
        if rotate is None:
            share, eps = self.share, self.form.head_eps
            q, k, _ = self.heads
            tokens, first = share.whole, share.first
            if share.cached:  # the keys before are normalized and rotated
                k, tokens, first = k[:, tokens.text :], share.tokens, 0
            rotate = self.ops.qk_norm_rope(q, k, norms, rotary, tokens, eps, first)
            self._rotations[key] = rotate
        rotate(norms, rotary)

    def place(self, prefix: Prefix) -> None:
        """Takes the keys and values of the tokens before those of the pass."""
        cut, (_, k, v) = self.share.whole.text, self.heads
        torch._foreach_copy_([k[:, :cut], v[:, :cut]], list(prefix))

    def mix(self, mixed: torch.Tensor) -> None:
        """Takes what attention gives, (batch, tokens, D)."""
        self.mixed.matrix = mixed.reshape(-1, self.width)
        for quantize in self._out:
            quantize(self.mixed.matrix)

    def middle(self, x: torch.Tensor, gates: Modulation, norms: Modulation) -> None:
        self.mixed.let_go()
        self._norm(x, gates, norms, self._inner_format, self._inner_plain)
        for quantize in self._inner:
            quantize(self.branch)

    def activate(self) -> None:
        """Makes what the MLP's second layers read; has the GELU where the first could not."""
        for activate in self._activations:
            activate()

    def end(self, x: torch.Tensor, gates: Modulation) -> None:
        self._norm(x, gates, None)

    def go_on(
        self, x: torch.Tensor, gates: Modulation, norms: Modulation, following: Program
    ) -> None:
        """Adds the last residual, with the first norm of the next block, of the same shape."""
        self._norm(x, gates, norms, following.first_format, following.first_plain)
        following._quantize_first()

    def _quantize_first(self) -> None:
        for quantize in self._first:
            quantize(self.branch)

    def _norm(
        self,
        x: torch.Tensor,
        gates: Modulation | None,
        norms: Modulation | None,
        format: RowFormat | None = None,
        plain: bool = False,
    ) -> None:
        """Runs residual and norm in one kernel; writes into `rows`, quantized where there is a
        format, and into `plain` where that is asked for.
        """
        key = format, plain, gates is not None, norms is not None, (norms or gates).text.dtype
        launch = self._norms.get(key)
        if launch is None:
            out: Any = None if norms is None else self.branch
            if norms is not None and format is not None:
                out = self._quantized(self.rows, self.width, format)
            launch = self._norms[key] = self.ops.residual_norm(
                x,
                None if gates is None else self.branch,
                gates,
                norms,
                self.tokens,
                self.form.eps,
                format,
                out,
                self.branch if plain and format is not None else None,
            )
        launch(x, gates, norms)

    def _quantized(self, rows: Rows, columns: int, format: RowFormat) -> QuantizedRows:
        """Makes room for rows of a format: all in one buffer, as each is read before the next."""
        found = rows.quantized.get(format)
        if found is None:
            tokens = self.tokens
            # Joint order has text first too, where there is one item.
            cut = tokens.text_rows if rows is not self.mixed or tokens.batch == 1 else tokens.rows
            found = self.room(str(format), (tokens.rows, columns), format, cut)
            rows.quantized[format] = found
        return found

    def room(self, name: str, size: tuple[int, int], format: RowFormat, cut: int) -> QuantizedRows:
        """Makes room for rows of a format, those of two streams with `cut` of the first."""
        gap = -cut % SCALES_AT_ONCE if cut < size[0] else 0
        values = self._workspace.take(name, size, self._of(storage_of(format)))
        scale = self._workspace.take(f"{name} scale", (size[0] + gap, 1), self._of(torch.float32))
        return QuantizedRows(values, scale, cut)

    def take(self, name: str, rows: int, columns: int) -> torch.Tensor:
        return self._workspace.take(name, (rows, columns), self.like)

    def _of(self, dtype: torch.dtype) -> torch.Tensor:
        return self.like.new_empty(0, dtype=dtype)

    def _quantizers(
        self, rows: Rows, forms: Sequence[LayerForm], written: RowFormat | None
    ) -> list[Callable[[torch.Tensor], None]]:
        """Prepares quantizers for the formats that layers read and that no norm has `written`."""
        if written is not None:
            self._quantized(rows, self.width, written)
            return []
        return [
            self.ops.row_quantize(self.branch, format, self._quantized(rows, self.width, format))
            for format in dict.fromkeys(form.format for form in forms)
            if format is not None
        ]

    def _swiglu(self) -> Callable[[], None]:
        outer, out = self.form.layers[IMAGE_LAST], None
        if outer.format is not None:
            out = self._quantized(self.activated, self.form.inner, outer.format)
        if self._swiglu_inside:
            (made,) = self.hidden
            if out is None:
                return lambda: None
            quantize = self.ops.row_quantize(made, outer.format, out)
            return lambda: quantize(made)
        gate, up = self.hidden
        return self.ops.swiglu_quantize(gate, up, outer.format, out, bool(outer.rank))

    def _gelu(self) -> list[Callable[[], None]]:
        """Prepares the GELU of the MLP's hidden rows, (rows, 4 D), their quantization, or both."""
        cut, (hidden,) = self.tokens.text_rows, self.hidden
        inner, outer = self.form.at(MLP_IN), self.form.at(MLP_OUT)
        image, text = ((a.format is not None, b.format) for a, b in zip(inner, outer, strict=True))
        parts = [(hidden, *image, slice(None))]
        if cut and (image != text or len({layer.format for layer in inner}) > 1):
            parts = [(hidden[:cut], *text, slice(0, cut)), (hidden[cut:], *image, slice(cut, None))]
        steps: list[Callable[[], None]] = []
        for part, gelu, format, where in parts:
            if format is not None:
                out = self._quantized(self.activated, self.form.inner, format)
                if part is not hidden:
                    start = where.start
                    values, scale = out.part(start, len(part))
                    out = QuantizedRows(values, scale, len(part))
                if gelu:  # LoRAs read plain rows
                    keep = any(layer.rank for layer in outer)
                    launch = self.ops.gelu_quantize(part, format, out, keep=keep)
                else:
                    launch = self.ops.row_quantize(part, format, out)
                steps.append(partial(launch, part))
            elif gelu:
                steps.append(partial(torch.ops.aten.gelu_, part, approximate="tanh"))
        return steps
