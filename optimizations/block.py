"""Runs the double-stream block of Qwen-Image with few kernels, on either host's module.

It computes what the block's own `forward` computes (`QwenImageTransformerBlock` in both hosts):

- both streams are rows of one matrix, so that each step between two GEMMs is one kernel for both;
- gate, residual, the next LayerNorm and its modulation are one kernel, across the border between
  two blocks as well, which also quantizes for the layers that follow, once for all of them;
- q, k and v are written into the joint buffers of attention, normalized and rotated in place;
- the GELU is in the GEMM's epilogue, or in the quantizer of what follows.

That is 16 launches a block in bf16, of which 12 are GEMMs. In stock ComfyUI a quarter of a forward
pass is memory traffic between the GEMMs: 44 of 170 ms on an NVIDIA H200 at 1024x1024.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from .fused import LayerInput, Ops, StreamSlice, in_joint_order, in_stream_order
from .linear import Gemm, dense_linear
from .reference import Modulation, QKNorm, Rotary, Tokens

DENSE = "dense"


class LayerTensors(NamedTuple):
    """The tensors of a linear layer on the card, for one product.

    Attributes:
        weight: (N, K), in the dtype of the activations, or quantized.
        scale: (N, 1), fp32; None for a weight that is not quantized.
        bias: (N,), or None.
    """

    weight: torch.Tensor
    scale: torch.Tensor | None
    bias: torch.Tensor | None


class Layers(Protocol):
    """A host's access to its layers."""

    def kind(self, layer: torch.nn.Module) -> str | None:
        """Returns "dense", "fp8" or "int8"; None for a layer that has to run itself, such as one
        that a LoRA has wrapped.
        """

    def tensors(
        self, layer: torch.nn.Module, like: torch.Tensor
    ) -> AbstractContextManager[LayerTensors]:
        """A layer's tensors for activations like these, as long as the context lasts."""

    def rounds(self, layer: torch.nn.Module) -> bool:
        """Whether a layer may round its activations to 8 bits: host and executor then differ by
        more than the order of their sums.
        """

    def norm_weight(self, norm: torch.nn.Module, like: torch.Tensor) -> torch.Tensor:
        """The weight of an RMSNorm, where `like` is."""

    def gemm(self, format: str, device: torch.device) -> Gemm:
        """The GEMM of a quantized format."""


# (q, k, v, mask) -> (batch, joint, heads * head_dim) of q, k, v (batch, joint, heads, head_dim)
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


class Step(NamedTuple):
    """What every block of one forward pass shares.

    Attributes:
        tokens: How many there are.
        rotary: Their rotation.
        mask: Added to the scores, (batch, 1, 1, joint) in the activations' dtype, or None.
    """

    tokens: Tokens
    rotary: Rotary
    mask: torch.Tensor | None


class _Layer(NamedTuple):
    """A linear layer, its kind, and what its activations have to be.

    Attributes:
        module: The host's.
        kind: As `Layers.kind`.
        format: "fp8" or "int8" where its GEMM takes quantized rows, else None.
    """

    module: torch.nn.Module
    kind: str | None
    format: str | None


class _Plan(NamedTuple):
    """The layers of a block by their place; the text stream's first in each tuple."""

    first: tuple[_Layer, ...]  # q, k, v of text, then of image
    out: tuple[_Layer, _Layer]
    inner: tuple[_Layer, _Layer]
    outer: tuple[_Layer, _Layer]


class _Carried(NamedTuple):
    """What a block leaves for the next one: its two results, the matrix behind them, and what the
    next block's first layers read, by the modulation that was announced for it.
    """

    text: torch.Tensor
    image: torch.Tensor
    x: torch.Tensor
    rows: LayerInput
    norms: Modulation

    def continues(self, text: torch.Tensor, image: torch.Tensor, norms: Modulation) -> bool:
        """Whether a block gets these very tensors, and the modulation that was announced."""
        return (
            self.text is text
            and self.image is image
            and self.norms.text.data_ptr() == norms.text.data_ptr()
            and self.norms.image.data_ptr() == norms.image.data_ptr()
        )


class BlockExecutor:
    """Runs the blocks of one forward pass; it carries the streams from block to block.

    Args:
        layers: The host's access to layers.
        ops: The kernels.
        attend: The attention.
    """

    def __init__(self, layers: Layers, ops: Ops, attend: Attend) -> None:
        self._layers = layers
        self._ops = ops
        self._attend = attend
        self._plans: dict[torch.nn.Module, _Plan] = {}
        self._carried: _Carried | None = None

    def run(
        self,
        block: torch.nn.Module,
        text: torch.Tensor,
        image: torch.Tensor,
        step: Step,
        halves: tuple[Modulation, Modulation],
        following: tuple[torch.nn.Module, Modulation] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One block.

        Args:
            block: The host's module.
            text: (batch, text tokens, D), any strides.
            image: (batch, image tokens, D), any strides.
            step: What the forward pass is about.
            halves: The modulation of attention and of the MLP.
            following: The next block and its modulation of attention, where nothing reads or
                changes the streams on the way to it. Its first norm is then part of this block's
                last kernel, and the tensors that are returned change when it runs.

        Returns:
            text and image, new tensors of the same shapes.
        """
        tokens, eps = step.tokens, block.img_norm1.eps
        plan = self._plan(block, image.device)
        attention, mlp = halves
        carried, self._carried = self._carried, None
        if carried is not None and carried.continues(text, image, attention):
            x, rows = carried.x, carried.rows
        else:
            x = torch.cat([stream.reshape(-1, stream.shape[-1]) for stream in (text, image)])
            rows = self._norm(x, None, None, attention, tokens, eps, plan.first)
        del carried, text, image
        branch = self._attention(block.attn, plan, x, rows, step)
        rows = self._norm(x, branch, attention, mlp, tokens, eps, plan.inner)
        branch = self._mlp(plan, x, rows, tokens)
        rows = None
        if following is None:
            self._ops.residual_norm(x, branch, mlp, None, tokens, eps)
        else:
            after, norms = following
            readers = self._plan(after, x.device).first
            rows = self._norm(x, branch, mlp, norms, tokens, eps, readers)
        text, image = _streams(x, tokens)
        if following is not None:
            self._carried = _Carried(text, image, x, rows, norms)
        return text, image

    def _plan(self, block: torch.nn.Module, device: torch.device) -> _Plan:
        if block not in self._plans:
            attn = block.attn

            def seen(*layers: torch.nn.Module) -> tuple[_Layer, ...]:
                return tuple(self._seen(layer, device) for layer in layers)

            text = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
            self._plans[block] = _Plan(
                seen(*text, attn.to_q, attn.to_k, attn.to_v),
                seen(attn.to_add_out, attn.to_out[0]),
                seen(block.txt_mlp.net[0].proj, block.img_mlp.net[0].proj),
                seen(block.txt_mlp.net[2], block.img_mlp.net[2]),
            )
        return self._plans[block]

    def _seen(self, layer: torch.nn.Module, device: torch.device) -> _Layer:
        kind = self._layers.kind(layer)
        if kind is None or kind == DENSE:
            return _Layer(layer, kind, None)
        gemm = self._layers.gemm(kind, device)
        quantizes = not gemm.weight_only and gemm.takes(layer.out_features, layer.in_features)
        return _Layer(layer, kind, kind if quantizes else None)

    def _norm(
        self,
        x: torch.Tensor,
        branch: torch.Tensor | None,
        gates: Modulation | None,
        norms: Modulation,
        tokens: Tokens,
        eps: float,
        readers: Sequence[_Layer],
    ) -> LayerInput:
        """Residual and norm, quantized at once where all that read it want one format."""
        formats = {layer.format for layer in readers}
        format = formats.pop() if len(formats) == 1 else None
        h, scale = self._ops.residual_norm(x, branch, gates, norms, tokens, eps, format)
        return (
            LayerInput(self._ops, h)
            if format is None
            else LayerInput(self._ops, None, format, (h, scale))
        )

    def _attention(
        self, attn: torch.nn.Module, plan: _Plan, x: torch.Tensor, rows: LayerInput, step: Step
    ) -> torch.Tensor:
        """The attention branch before its gate, (rows, D) in stream order."""
        tokens = step.tokens
        batch, joint, text = tokens.batch, tokens.joint, tokens.text
        width = attn.to_q.out_features
        q, k, v = (x.new_empty((batch, joint, width)) for _ in range(3))
        streams = in_stream_order(tokens)
        # The image's products first, here and below: they run long enough for the processor to get
        # ahead of the card, which the text's do not.
        for layer, out in zip(plan.first[3:], (q, k, v), strict=True):
            self._linear(layer, rows, streams[1], out[:, text:])
        for layer, out in zip(plan.first[:3], (q, k, v), strict=True):
            self._linear(layer, rows, streams[0], out[:, :text])
        del rows
        norms = attn.norm_q, attn.norm_k, attn.norm_added_q, attn.norm_added_k
        weights = QKNorm(*(self._layers.norm_weight(norm, q) for norm in norms))
        q, k, v = (part.view(batch, joint, attn.heads, -1) for part in (q, k, v))
        self._ops.qk_norm_rope(q, k, weights, step.rotary, tokens, attn.norm_q.eps)
        mixed = self._attend(q, k, v, step.mask).reshape(batch * joint, width)
        del q, k, v
        rows = LayerInput(self._ops, mixed)
        formats = {layer.format for layer in plan.out}
        if len(formats) == 1 and None not in formats:
            rows.quantize_all(formats.pop())
        branch = torch.empty_like(x)
        parts, outs = in_joint_order(tokens), _streams(branch, tokens)
        for stream in (1, 0):
            self._linear(plan.out[stream], rows, parts[stream], outs[stream])
        return branch

    def _mlp(self, plan: _Plan, x: torch.Tensor, rows: LayerInput, tokens: Tokens) -> torch.Tensor:
        """The MLP branch before its gate, (rows, D) in stream order."""
        hidden = x.new_empty((tokens.rows, plan.inner[0].module.out_features))
        parts, outs = in_stream_order(tokens), _streams(hidden, tokens)
        for stream in (1, 0):
            layer = plan.inner[stream]
            self._linear(layer, rows, parts[stream], outs[stream], gelu=layer.format is None)
        del rows
        same = len({layer.format for layer in plan.inner}) == 1
        if same and plan.outer[0].format == plan.outer[1].format:
            reads = (self._activate(hidden, plan.inner[0], plan.outer[0]),) * 2
        else:
            cut = tokens.text_rows
            text = self._activate(hidden[:cut], plan.inner[0], plan.outer[0])
            image = self._activate(hidden[cut:], plan.inner[1], plan.outer[1])
            reads, parts = (text, image), (parts[0], parts[1]._replace(start=0))
        branch = torch.empty_like(x)
        outs = _streams(branch, tokens)
        for stream in (1, 0):
            self._linear(plan.outer[stream], reads[stream], parts[stream], outs[stream])
        return branch

    def _activate(self, hidden: torch.Tensor, inner: _Layer, outer: _Layer) -> LayerInput:
        """What the MLP's second layer reads; the GELU is here where the first could not do it."""
        if inner.format is None:
            rows = LayerInput(self._ops, hidden)
            if outer.format is not None:
                rows.quantize_all(outer.format)
            return rows
        if outer.format is None:
            return LayerInput(self._ops, torch.ops.aten.gelu_(hidden, approximate="tanh"))
        quantized = self._ops.gelu_quantize(hidden, outer.format)
        return LayerInput(self._ops, None, outer.format, quantized)

    def _linear(
        self,
        layer: _Layer,
        rows: LayerInput,
        part: StreamSlice,
        out: torch.Tensor,
        gelu: bool = False,
    ) -> None:
        """A layer of one stream's rows into out, (batch, tokens, N), of any strides."""
        if layer.kind is None:
            read = rows.plain(part.start, (part.items - 1) * part.step + part.length, out.dtype)
            shape = part.items, part.length, read.shape[1]
            result = layer.module(read.as_strided(shape, (part.step * shape[2], shape[2], 1)))
            out.copy_(torch.ops.aten.gelu(result, approximate="tanh") if gelu else result)
            return
        if part.together and out.is_contiguous():
            pieces = [(part.start, part.items * part.length, out.view(-1, out.shape[-1]))]
        else:
            starts = range(part.start, part.start + part.items * part.step, part.step)
            pieces = [(start, part.length, out[i]) for i, start in enumerate(starts)]
        with self._layers.tensors(layer.module, out) as (weight, scale, bias):
            for start, length, piece in pieces:
                if scale is None:
                    read = rows.plain(start, length, out.dtype)
                    dense_linear(read, weight, bias, gelu=gelu, out=piece)
                    continue
                gemm = self._layers.gemm(layer.kind, out.device)
                if layer.format is None:
                    read = rows.plain(start, length, out.dtype)
                    piece.copy_(gemm.linear(read, weight, scale, bias))
                    if gelu:
                        torch.ops.aten.gelu_(piece, approximate="tanh")
                else:
                    read = rows.quantized(layer.format, start, length)
                    gemm.linear_quantized(*read, weight, scale, bias, out.dtype, out=piece)


def _streams(x: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Text and image of a matrix in stream order, each (batch, tokens, columns)."""
    cut, columns = tokens.text_rows, x.shape[1]
    return (
        x[:cut].view(tokens.batch, tokens.text, columns),
        x[cut:].view(tokens.batch, tokens.image, columns),
    )
