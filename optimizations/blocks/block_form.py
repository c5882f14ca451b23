"""Describes a transformer block: whether the executor computes a module, how it computes its
layers, and whether the module still is the host's.

`BlockSpec` lists the names of its modules, which are the same in ComfyUI and diffusers for the
families that both have; `BlockForm` is what `workspace.Program` is compiled of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from ...families.registry import block_specs, modulation_of, spec_of
from ...spec.formats import RowFormat
from ...spec.transformer import SPLIT_SWIGLU, SWIGLU, BlockSpec
from ...verdict import Verdict
from ..inventory import is_changed, parts_of
from ..linear import Gemm
from ..reference import HEAD_DIMS, WIDEST_ROW

_Part = TypeVar("_Part")

DENSE = "dense"
STREAMS = ("text", "image")
# The layers of a block in the order in which they run, by their stream: q, k and v of each,
PLACES = ("image",) * 3 + ("text",) * 3 + ("image", "text") * 3
# and those that run together: q, k and v, what follows attention, and the two steps of the MLP.
STAGES = QKV, ATTENTION_OUT, MLP_IN, MLP_OUT = range(6), range(6, 8), range(8, 10), range(10, 12)
QUERIES, KEYS, VALUES = zip(QKV[:3], QKV[3:], strict=True)
IMAGE_IN = MLP_IN.start
IMAGE_LAST, TEXT_LAST = MLP_OUT
# LoRAs beside the layers: `x @ W.T + (x @ down.T) @ up.T`, the weights untouched. All LoRAs of a
# layer are one pair of matrices, and the layers that read the same rows share the first: one launch
# for both streams multiplies rows by it. The second is in the epilogue of the layer's own product,
# where that is Triton's.


class LowRank(NamedTuple):
    """What all LoRAs of a layer add beside it: `x @ down[start : start + R].T @ up.T`."""

    # (R or more, K), contiguous: of all layers that read the same rows of one stream
    down: torch.Tensor
    start: int  # the layer's first row in it
    up: torch.Tensor  # (N, R), contiguous


# The places of each stage that read the rows of the text and of the image.
Readers = dict[range, tuple[Sequence[int], ...]]
READERS: Readers = {
    stage: tuple([place for place in stage if PLACES[place] == stream] for stream in STREAMS)
    for stage in STAGES
}
# The same where gate and up are two layers of the image's rows.
SPLIT_READERS: Readers = {**READERS, MLP_IN: ((), MLP_IN)}


def of_stream(place: int, streams: tuple[_Part, _Part]) -> _Part:
    """Gives that of text and image which the layer of a place reads or writes."""
    text, image = streams
    return text if PLACES[place] == "text" else image


class LayerForm(NamedTuple):
    kind: str | RowFormat | None  # as `block.Layers.kind`
    format: RowFormat | None = None  # of the rows, where its GEMM takes quantized ones; else None
    gemm: Gemm | None = None  # of a quantized layer
    rank: int = 0  # of the LoRAs beside it; 0 without
    # start, down_rows: its first row in their first matrix, and how many that has
    start: int = 0
    down_rows: int = 0


def quantized_form(kind: RowFormat, gemm: Gemm, n: int, k: int, *beside: int) -> LayerForm:
    """Describes a layer by its quantized weight, (n, k); `beside` is what its LoRAs add."""
    quantizes = not gemm.weight_only and gemm.takes(n, k)
    return LayerForm(kind, kind if quantizes else None, gemm, *beside)


def common_format(layers: Sequence[LayerForm]) -> RowFormat | None:
    formats = {layer.format for layer in layers}
    return formats.pop() if len(formats) == 1 else None


class BlockForm(NamedTuple):
    """What blocks have in common that run the same program."""

    spec: BlockSpec  # the names of their modules
    layers: tuple[LayerForm, ...]  # in the order of `PLACES`
    heads: int
    inner: int  # what the MLP's last layers read, in columns
    # eps, head_eps: of the LayerNorms, and of the RMSNorms of a head
    eps: float
    head_eps: float

    def at(self, stage: range) -> tuple[LayerForm, ...]:
        return self.layers[stage.start : stage.stop]

    @property
    def readers(self) -> Readers:
        return SPLIT_READERS if self.spec.activation == SPLIT_SWIGLU else READERS

    @property
    def sends_rows(self) -> bool:
        """Whether other cards can make keys and values of the rows that the first layers read: all
        read one form of them, and nothing besides.
        """
        first = self.at(QKV)
        alone = all(layer.kind is not None and not layer.rank for layer in first)
        return alone and len({layer.format for layer in first}) == 1

    def weight_shape(self, place: int, width: int) -> tuple[int, int]:
        """Gives (rows, columns) of what a layer is multiplied with, by the block's width."""
        if place in MLP_IN:
            return (2 if self.spec.activation == SWIGLU else 1) * self.inner, width
        return width, self.inner if place in MLP_OUT else width


def token_layers(block: torch.nn.Module) -> list[Any]:
    """Returns the linear layers of a block that see tokens; none of a block of another form."""
    spec = spec_of(block)
    return [] if spec is None else _parts_named(block, spec.gemms)


def read_parts(block: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Returns the modules that the executor reads instead of calling, with their paths in the
    block: all but the linear layers, of which each is asked how it is multiplied with, and the
    modulation.
    """
    spec = spec_of(block)
    names = () if spec is None else spec.modulation.values()
    return list(parts_of(block, {*token_layers(block), *(getattr(block, name) for name in names)}))


def _parts_named(block: torch.nn.Module, names: Iterable[str]) -> list[torch.nn.Module]:
    # Empty where one is missing.
    try:
        return [part_of(block, name) for name in names]
    except AttributeError:
        return []


def modulated_by(block: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the linear layers of a block that see the timestep alone."""
    return _parts_named(block, [f"{name}.1" for name in modulation_of(block).values()])


def head_norms(block: torch.nn.Module) -> list[Any]:
    return [part_of(block, name) for name in spec_of(block).head_norms]


def part_of(block: Any, name: str) -> Any:
    # A module, of whose attributes torch knows no type.
    # As get_submodule, which takes five times as long: a run asks for 960.
    for child in name.split("."):
        block = block._modules.get(child) or getattr(block, child)
    return block


def heads_of(block: torch.nn.Module) -> int:
    return part_of(block, spec_of(block).attention).heads


def query_layer(block: torch.nn.Module) -> Any:
    """Gives the layer that makes the queries, whose input is as wide as the block."""
    return part_of(block, spec_of(block).query)


def unknown_modulation(blocks: Sequence[torch.nn.Module]) -> Verdict | None:
    """Returns why there is no modulation of all blocks; None where they agree."""
    if len({tuple(modulation_of(block)) for block in blocks}) > 1:
        return Verdict("another extension has replaced one of the blocks")
    return None


def unsupported_block(block: torch.nn.Module, dtype: torch.dtype) -> Verdict | None:
    """Returns why the executor does not compute a block; None when it does."""
    spec = spec_of(block)
    if spec is None:
        known = ", ".join(spec.told_by for spec in block_specs())
        return Verdict(f"it has an unknown form, without any of {known}")
    try:
        norms = [part_of(block, name) for name in spec.norms]
        dim, heads = query_layer(block).in_features, heads_of(block)
        layers = [part_of(block, name) for name in spec.places]
        if any(norm.weight is not None for norm in norms):
            return Verdict("its LayerNorms have weights")
        if any(norm.weight is None for norm in head_norms(block)):
            return Verdict("its attention heads are not normalized")
        widths = {layers[place].out_features for place in MLP_IN}
        eps, head_eps = ({norm.eps for norm in found} for found in (norms, head_norms(block)))
        if None in eps | head_eps:
            return Verdict("the eps of one of its norms depends on the dtype")
        if len(eps) > 1 or len(head_eps) > 1 or len(widths) > 1:
            return Verdict("its streams differ in form")
        if any(part_of(block, name).approximate != "tanh" for name in spec.gelus):
            return Verdict("its GELU is not the tanh form")
    except AttributeError as error:
        return Verdict(f"it has an unknown form: {error}")
    homes = set(map(_package_of, type(block).__mro__)) - {"torch"}
    for path, part in read_parts(block):
        if is_changed(part):
            return Verdict(f"{path or 'it'} was changed by another extension")
        own = homes | OPERATIONS if path in (*spec.norms, *spec.head_norms) else homes
        if _package_of(type(part)) not in own and type(part) not in FROM_TORCH:
            return Verdict(f"{path} was replaced by another extension's {type(part).__name__}")
        if isinstance(part, torch.nn.Dropout) and part.p and part.training:
            return Verdict("its dropout is on")
    return _unsupported_shape(dim, dim // heads, dtype)


def _unsupported_shape(dim: int, head_dim: int, dtype: torch.dtype) -> Verdict | None:
    """Returns why the kernels do not take a model; None when they do."""
    if dtype not in (torch.bfloat16, torch.float32):
        # Residuals of Qwen-Image exceed what fp16 holds: both hosts clip or refuse it.
        return Verdict(f"{dtype}", rule="fused kernels need bf16 or fp32")
    if dim > WIDEST_ROW:
        return Verdict(f"a width of {dim} is above the limit of {WIDEST_ROW}", final=True)
    if head_dim not in HEAD_DIMS:
        return Verdict(
            f"heads of {head_dim} are not supported, only {', '.join(map(str, HEAD_DIMS))}",
            final=True,
        )
    return None


# What blocks hold besides norms and linear layers: an activation, what holds others, and what
# leaves everything as it is.
FROM_TORCH = {
    getattr(torch.nn, it) for it in ("Dropout", "Identity", "ModuleList", "Sequential", "SiLU")
}


# The packages whose norms a block may have.
OPERATIONS = {"torch", "comfy", "diffusers"}


def _package_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]
