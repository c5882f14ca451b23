"""What the blocks of a forward pass need for one shape: buffers, which take what a block takes at
its peak, and launches that read and write them. A workspace serves one pass at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from ...spec.formats import RowFormat
from ...spec.sizes import ROWS_AT_ONCE
from ...spec.transformer import GELU, SPLIT_SWIGLU, BlockSpec
from ..attention.quantized import Heads
from ..fused import Ops
from ..linear import Gemm
from ..reference import Modulation, QKNorm, QuantizedRows, Rotary, Tokens
from .products import (
    Operand,
    PackedOperand,
    Product,
    Read,
    Rows,
    dense_product,
    expanded_product,
    in_joint_order,
    in_stream_order,
    module_product,
    quantized_product,
    streams_of,
)
from .shape import READERS, SPLIT_READERS, LowForm, LowRows, Readers, Shape, Share

DENSE = "dense"
STREAMS = ("text", "image")
# The layers of a block in the order in which they run, by their stream.
PLACES = ("image",) * 3 + ("text",) * 3 + ("image", "text") * 3
# Shapes whose launches are kept: those of a run with CFG, and of a few prompts before.
MOST_SHAPES = 8


class Prefix(NamedTuple):
    """Keys and values of the tokens before those of a pass, each (batch, tokens, heads, head_dim),
    normalized and rotated.
    """

    keys: torch.Tensor
    values: torch.Tensor


class LayerForm(NamedTuple):
    """How a linear layer is computed.

    Attributes:
        kind: As `block.Layers.kind`.
        format: Of the rows, where its GEMM takes quantized ones; else None.
        gemm: Of a quantized layer.
        low: Of the LoRAs beside it; None without.
    """

    kind: str | RowFormat | None
    format: RowFormat | None
    gemm: Gemm | None
    low: LowForm | None = None


class BlockForm(NamedTuple):
    """What blocks have in common that run the same program.

    Attributes:
        spec: The names of their modules.
        layers: In the order of `PLACES`.
        heads: Of attention.
        inner: What the MLP's last layers read, in columns.
        eps, head_eps: Of the LayerNorms, and of the RMSNorms of a head.
    """

    spec: BlockSpec
    layers: tuple[LayerForm, ...]
    heads: int
    inner: int
    eps: float
    head_eps: float

    @property
    def readers(self) -> Readers:
        return SPLIT_READERS if self.spec.activation == SPLIT_SWIGLU else READERS

    @property
    def sends_rows(self) -> bool:
        """Whether other cards can make keys and values of the rows that the first layers read: all
        read one form of them, and nothing besides.
        """
        first = self.layers[:6]
        alone = all(layer.kind is not None and layer.low is None for layer in first)
        return alone and len({layer.format for layer in first}) == 1


class Workspace:
    """The buffers of a pass, and the programs that use them.

    Attributes:
        changes: Counts how often a buffer was exchanged for a larger one: what was prepared or
            captured before that is void.
        forms: Of the blocks that were seen, so that equal ones are one object.
    """

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.changes = 0
        self.forms: dict[BlockForm, BlockForm] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._shapes: dict[Hashable, tuple[Shape, dict[BlockForm, Program]]] = {}

    @property
    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def program(self, form: BlockForm, share: Share, x: torch.Tensor) -> Program:
        """What a block of this form does.

        Args:
            x: (rows of the share, D), of the dtype and on the device of the pass.
        """
        key = share, x.dtype, x.device, x.shape[1], form.inner, form.spec.activation
        while True:
            changes = self.changes
            if key not in self._shapes:
                while len(self._shapes) >= MOST_SHAPES:
                    del self._shapes[next(iter(self._shapes))]
                shape = Shape(self, share, x, form.inner, form.spec.activation)
                self._shapes[key] = shape, {}
            shape, programs = self._shapes[key]
            if form not in programs:
                programs[form] = Program(shape, form)
            if changes == self.changes:
                return programs[form]
            self._shapes.clear()  # a larger buffer has made them void

    def take(self, name: str, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Gives a buffer's first bytes as a tensor of the shape, of the dtype of `like`."""
        rows, *rest = shape
        needed = math.prod(shape) * like.dtype.itemsize
        with torch.inference_mode(False):  # a tensor of that mode cannot be written to outside
            buffer = self._buffers.get(name)
            if buffer is None or buffer.nbytes < needed or buffer.device != like.device:
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
    """What blocks of one form do in one shape.

    Attributes:
        products: Of each layer; takes its operand, or its module where it runs itself; None of a
            stream that is on another card.
        received: Rows of other cards, and what makes keys and values of them: a place and a product
            each.
        reads: What each reads and writes.
        heads: q of the share's tokens, k and v of all, (batch, tokens, heads, head_dim).
        first_format: What the first layers read, where it is one format of all.
        first_plain: Whether LoRAs beside them read plain rows too.
        tails: What `split` keeps for the program that follows, by its id.
    """

    def __init__(self, shape: Shape, form: BlockForm) -> None:
        self.shape, self.form = shape, form
        forms, heads = form.layers, form.heads
        share, tokens = shape.share, shape.tokens
        parts = shape.heads()
        self.heads = tuple(part.unflatten(2, (heads, -1)) for part in parts)
        self._low = LowRows(shape, forms, form.readers)
        self.first_format = _common(forms[:6])
        self._inner_format = _common(forms[8:10])
        # LoRAs read plain rows: of rows in 8 bits their part would have an error of 1 to 3 %.
        self.first_plain, self._inner_plain = (
            any(form.low for form in part) for part in (forms[:6], forms[8:10])
        )
        # Before others: they take the widest buffers.
        self._activations = self._gelu() if form.spec.activation == GELU else [self._swiglu()]
        self._first = self._quantizers(shape.rows, forms[:6], self.first_format)
        self._inner = self._quantizers(shape.rows, forms[8:10], self._inner_format)
        self._out = self._quantizers(shape.mixed, forms[6:8], None)
        self._rotations: dict[tuple, Callable[[QKNorm, Rotary], None]] = {}
        self._heads_8bit: dict[str, Heads] = {}
        self._attentions: dict[tuple, Callable[[torch.Tensor | None], None]] = {}
        streams, joint = in_stream_order(tokens), in_joint_order(tokens)
        self.reads: list[Read] = []
        for place, stream in enumerate(PLACES):
            index = STREAMS.index(stream)
            if place < 6:
                read = Read(shape.rows, streams[index], _of_share(parts, place, share))
            elif place < 8:
                read = Read(shape.mixed, joint[index], streams_of(shape.branch, tokens)[index])
            elif place < 10:
                read = self._read_first(place)
            else:
                out = streams_of(shape.branch, tokens)[index]
                read = Read(shape.activated, streams[index], out)
            self.reads.append(read._replace(low=self._low.of(place)))
        self.products = tuple(
            product_of(read, layer, shape.ops) if read.part.length else None
            for read, layer in zip(self.reads, forms, strict=True)
        )
        self.received = [self._received(other, parts, forms) for other in share.received]
        self.tails: dict[int, Any] = {}
        self._decoders: dict[tuple, tuple[torch.Tensor, Callable[..., None]]] = {}

    def _read_first(self, place: int) -> Read:
        shape, tokens, activation = self.shape, self.shape.tokens, self.form.spec.activation
        streams, index = in_stream_order(tokens), STREAMS.index(PLACES[place])
        if activation == GELU:
            gelu = self.form.layers[place].format is None
            out = streams_of(shape.hidden[0], tokens)[index]
            return Read(shape.rows, streams[index], out, gelu)
        if activation == SPLIT_SWIGLU:  # gate and up, both of the image's rows
            out = streams_of(shape.hidden[place - 8], tokens)[1]
            return Read(shape.rows, streams[1], out)
        both = shape.cut_wide(2 * shape.inner)
        return Read(shape.rows, streams[index], streams_of(both, tokens)[index])

    def _received(
        self, other: Share, parts: Sequence[torch.Tensor], forms: Sequence[LayerForm]
    ) -> tuple[Rows, list[tuple[int, Product]]]:
        shape, streams = self.shape, in_stream_order(other.tokens)
        rows = shape.received(other, self.first_format)
        made = []
        for place in (1, 2, 4, 5) if other.text else (1, 2):
            index = STREAMS.index(PLACES[place])
            read = Read(rows, streams[index], _of_share(parts, place, other))
            made.append((place, product_of(read, forms[place], shape.ops)))
        return rows, made

    def rows_of(self, other: Share) -> Rows:
        """Says where another card's rows come to."""
        shares = [share.start for share in self.shape.share.received]
        return self.received[shares.index(other.start)][0]

    def readable(self, place: int, operand: Any) -> Any:
        """Gives an operand as products read it: where its weight is in 4 or 6 bits, decoded into a
        buffer that the next one overwrites.
        """
        if type(operand) is not PackedOperand:
            return operand
        codes, group_scale, codebook, bits = operand.weight
        key = place, bits, group_scale.shape, group_scale.dtype, codebook is None
        decoder = self._decoders.get(key)
        if decoder is None:
            values = self.shape.decoded(PLACES[place], *self.weight_shape(place))
            decode = self.shape.ops.decode_weight(*operand.weight, values)
            decoder = self._decoders[key] = values, decode
        values, decode = decoder
        decode(codes, group_scale, codebook)
        return Operand.of(values, operand.scale, operand.bias, operand.up)

    def weight_shape(self, place: int) -> tuple[int, int]:
        shape = self.shape
        width, inner, first = shape.width, shape.inner, shape.first
        return (width, width) if place < 8 else (first, width) if place < 10 else (width, inner)

    def compute_low(self, reader: int, downs: tuple[torch.Tensor | None, ...]) -> None:
        rows = (self.shape.rows, self.shape.mixed, self.shape.rows, self.shape.activated)[reader]
        self._low.compute(reader, rows, downs)

    def begin(self, x: torch.Tensor, norms: Modulation) -> None:
        """Runs the first norm of a block whose predecessor left nothing."""
        self.shape.norm(x, None, norms, self.form.eps, self.first_format, self.first_plain)
        self._quantize_first()

    def rotate(self, norms: QKNorm, rotary: Rotary, into: Heads | None = None) -> None:
        """Normalizes and rotates q and k, in place or into 8 bits."""
        cos = rotary.cos
        key = norms.query.dtype, cos.dtype, cos.shape[0], into and id(into)
        rotate = self._rotations.get(key)
        if rotate is None:
            shape, eps = self.shape, self.form.head_eps
            q, k, _ = self.heads
            share = shape.share
            tokens, first = share.whole, share.first
            if share.cached:  # the keys before are normalized and rotated
                k, tokens, first = k[:, tokens.text :], share.tokens, 0
            rotate = shape.ops.qk_norm_rope(q, k, norms, rotary, tokens, eps, into, first)
            self._rotations[key] = rotate
        rotate(norms, rotary)

    def place(self, prefix: Prefix) -> None:
        """Takes the keys and values of the tokens before those of the pass."""
        cut = self.shape.share.whole.text
        torch._foreach_copy_([part[:, :cut] for part in self.heads[1:]], list(prefix))

    def attend(
        self, form: str, norms: QKNorm, rotary: Rotary, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Normalizes, rotates and attends in 8 bits; gives (batch, tokens, D), where q was."""
        q, k, v = self.heads
        into = self._heads_8bit.get(form)
        if into is None:
            into = self._heads_8bit[form] = self.shape.heads_8bit(form, k)
        if self.shape.share.cached:
            self.rotate(norms, rotary)
            self._quantize_heads(into)
        else:
            self.rotate(norms, rotary, into)
        key = form, mask if mask is None else (mask.dtype, mask.stride(), len(mask))
        attend = self._attentions.get(key)
        if attend is None:
            attend = self.shape.ops.attention_8bit(into, v, mask, q)
            self._attentions[key] = attend
        attend(mask)
        return q.flatten(2)

    def _quantize_heads(self, into: Heads) -> None:
        quantize = self._rotations.get(id(into))
        if quantize is None:
            q, k, _ = self.heads
            share = self.shape.share
            tokens = Tokens(share.whole.batch, 0, share.whole.joint, share.whole.joint)
            quantize = self.shape.ops.qk_norm_rope(q, k, None, None, tokens, 0.0, into, 0)
            self._rotations[id(into)] = quantize
        quantize(None, None)

    def mix(self, mixed: torch.Tensor) -> None:
        """Takes what attention gives, (batch, tokens, D)."""
        rows = self.shape.mixed
        rows.matrix = mixed.reshape(-1, self.shape.width)
        for quantize in self._out:
            quantize(rows.matrix)

    def middle(self, x: torch.Tensor, gates: Modulation, norms: Modulation) -> None:
        """Goes from attention to the MLP."""
        self.shape.mixed.matrix = None
        self.shape.norm(x, gates, norms, self.form.eps, self._inner_format, self._inner_plain)
        for quantize in self._inner:
            quantize(self.shape.branch)

    def activate(self) -> None:
        """Makes what the MLP's second layers read; has the GELU where the first could not."""
        for activate in self._activations:
            activate()

    def end(self, x: torch.Tensor, gates: Modulation) -> None:
        """Adds the last residual of a block."""
        self.shape.norm(x, gates, None, self.form.eps)

    def go_on(
        self, x: torch.Tensor, gates: Modulation, norms: Modulation, following: Program
    ) -> None:
        """Adds the last residual, with the first norm of the next block, of the same shape."""
        self.shape.norm(
            x,
            gates,
            norms,
            self.form.eps,
            following.first_format,
            following.first_plain,
        )
        following._quantize_first()

    def _quantize_first(self) -> None:
        for quantize in self._first:
            quantize(self.shape.branch)

    def _quantizers(
        self, rows: Rows, forms: Sequence[LayerForm], written: RowFormat | None
    ) -> list[Callable[[torch.Tensor], None]]:
        """Prepares quantizers for the formats that layers read and that no norm has `written`."""
        shape = self.shape
        if written is not None:
            shape.quantized(rows, shape.width, written)
            return []
        like = shape.branch
        return [
            shape.ops.row_quantize(like, format, shape.quantized(rows, shape.width, format))
            for format in dict.fromkeys(form.format for form in forms)
            if format is not None
        ]

    def _swiglu(self) -> Callable[[], None]:
        shape, outer = self.shape, self.form.layers[10]
        out = None
        if outer.format is not None:
            out = shape.quantized(shape.activated, shape.inner, outer.format)
        return shape.ops.swiglu_quantize(*shape.hidden, outer.format, out, bool(outer.low))

    def _gelu(self) -> list[Callable[[], None]]:
        """Prepares the GELU of the MLP's hidden rows, (rows, 4 D), their quantization, or both."""
        shape, cut = self.shape, self.shape.tokens.text_rows
        (hidden,) = shape.hidden
        inner, outer = self.form.layers[8:10], self.form.layers[10:12]
        needs = [(a.format is not None, b.format) for a, b in zip(inner, outer, strict=True)]
        parts = [(hidden, *needs[0], slice(None))]
        if cut and (needs[0] != needs[1] or inner[0].format != inner[1].format):
            image, text = needs
            parts = [(hidden[:cut], *text, slice(0, cut)), (hidden[cut:], *image, slice(cut, None))]
        steps: list[Callable[[], None]] = []
        for part, gelu, format, where in parts:
            if format is not None:
                out = shape.quantized(shape.activated, shape.inner, format)
                if part is not hidden:
                    start = where.start
                    values, scale = out.part(start, len(part))
                    out = QuantizedRows(values, scale, len(part))
                if gelu:  # LoRAs read plain rows
                    keep = any(form.low for form in outer)
                    launch = shape.ops.gelu_quantize(part, format, out, keep=keep)
                else:
                    launch = shape.ops.row_quantize(part, format, out)
                steps.append(lambda launch=launch, part=part: launch(part))
            elif gelu:
                steps.append(lambda part=part: torch.ops.aten.gelu_(part, approximate="tanh"))
        return steps


def product_of(read: Read, form: LayerForm, ops: Ops) -> Product:
    if form.kind is None:
        return module_product(read)
    if form.kind == DENSE:
        return dense_product(read, ops)
    if form.format is None:
        return expanded_product(read, form.kind, form.gemm)
    return quantized_product(read, form.format, form.gemm)


def _of_share(parts: Sequence[torch.Tensor], place: int, share: Share) -> torch.Tensor:
    """Where the rows of a share go: (batch, tokens, D) of its queries, of all keys or values."""
    part, whole, text = parts[place % 3], share.whole, PLACES[place] == "text"
    if place % 3:
        return part[:, : whole.text] if text else part[:, share.image]
    cut = share.tokens.text
    return part[:, :cut] if text else part[:, cut:]


def _common(layers: Sequence[LayerForm]) -> RowFormat | None:
    formats = {layer.format for layer in layers}
    return formats.pop() if len(formats) == 1 else None
