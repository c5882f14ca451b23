"""What a transformer block is: the names of its parts, and whether a module is one.

ComfyUI's and diffusers' blocks have the same attribute names: those of Qwen-Image 1.x have a stream
of text and one of the image, those of 2.1 have one of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch

from ...spec.transformer import (
    DOUBLE_STREAM,
    FUSED_SINGLE_STREAM,
    GATE_UP,
    GATED,
    SINGLE_STREAM,
    BlockSpec,
)
from ..fallback import Fallback
from ..fused import unsupported_shape

# The layers of 1.x that see the timestep alone, by the stream that they modulate.
MODULATION = DOUBLE_STREAM.modulation
# The layers of 1.x in the order in which they run, of the streams in `workspace.PLACES`: those of
# the image first, whose products run long enough for the processor to get ahead of the card.
DOUBLE_LAYERS = (
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.add_q_proj", "attn.add_k_proj"),
    *("attn.add_v_proj", "attn.to_out.0", "attn.to_add_out"),
    *("img_mlp.net.0.proj", "txt_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.2"),
)
SINGLE_ATTENTION = ("attn.to_q", "attn.to_k", "attn.to_v")
DOUBLE_NORMS = ("img_norm1", "img_norm2", "txt_norm1", "txt_norm2")
SINGLE_NORMS = ("img_norm1", "img_norm2")
GELU, SWIGLU, SPLIT_SWIGLU = "gelu", "swiglu", "swiglu of two layers"


class BlockLayout(NamedTuple):
    """Where the executor finds the parts of a block.

    Attributes:
        spec: Its layers.
        places: The layer of each of `workspace.PLACES`. Of a single stream the text's name the same
            layers as the image's, and have no rows.
        norms: The LayerNorms.
        read: Every other submodule that the executor reads instead of calling, so that a change to
            one would be lost.
        activation: Of the MLP; `SWIGLU` of [gate; up] in one layer, or of two.
    """

    spec: BlockSpec
    places: tuple[str, ...]
    norms: tuple[str, ...]
    read: tuple[str, ...]
    activation: str

    @property
    def head_norms(self) -> tuple[str, ...]:
        """The RMSNorms of a `QKNorm`."""
        norms = self.spec.head_norms
        return norms if len(norms) == 4 else 2 * norms


def _single(spec: BlockSpec, first: tuple[str, str], activation: str) -> BlockLayout:
    out = ("attn.to_out.0",) * 2, ("img_mlp.out",) * 2
    places = (*2 * SINGLE_ATTENTION, *out[0], *first, *out[1])
    return BlockLayout(spec, places, SINGLE_NORMS, ("img_mlp", "attn"), activation)


DOUBLE = BlockLayout(
    DOUBLE_STREAM,
    DOUBLE_LAYERS,
    DOUBLE_NORMS,
    ("img_mlp", "txt_mlp", "img_mlp.net.0", "txt_mlp.net.0", "attn"),
    GELU,
)
SINGLE = _single(SINGLE_STREAM, GATED, SPLIT_SWIGLU)
FUSED_SINGLE = _single(FUSED_SINGLE_STREAM, (GATE_UP, GATE_UP), SWIGLU)


class ModulationLayer(NamedTuple):
    """One modulation layer: of which block, of which stream, and the host's module."""

    block: int
    stream: Literal["image", "text"]
    module: torch.nn.Module


def blocks_of(transformer: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """The blocks of a host's transformer, in order."""
    return tuple(transformer.transformer_blocks)


def layout_of(block: torch.nn.Module) -> BlockLayout:
    """Which parts a block has, by those that others lack."""
    if hasattr(block.attn, "add_q_proj"):
        return DOUBLE
    return FUSED_SINGLE if hasattr(block.img_mlp, "gate_up") else SINGLE


def token_layers(block: torch.nn.Module) -> list[torch.nn.Module]:
    """The linear layers of a block that see tokens; none of a block of another form."""
    try:
        return [part_of(block, name) for name in layout_of(block).spec.gemms]
    except AttributeError:
        return []


def classes_of(block: torch.nn.Module) -> tuple[type, ...]:
    """The classes of a block and of the modules that the executor reads instead of calling; only
    the first of a block of another form.
    """
    try:
        layout = layout_of(block)
        names = *layout.norms, *layout.read, *layout.spec.head_norms
        return type(block), *(type(part_of(block, name)) for name in names)
    except AttributeError:
        return (type(block),)


def head_norms(block: torch.nn.Module) -> list[torch.nn.Module]:
    """The RMSNorms of a block that has token layers."""
    return [part_of(block, name) for name in layout_of(block).spec.head_norms]


def part_of(block: torch.nn.Module, name: str) -> torch.nn.Module:
    """A submodule by its name."""
    # As get_submodule, which takes five times as long: a run asks for 960.
    for child in name.split("."):
        block = block._modules.get(child) or getattr(block, child)
    return block


def modulation_layers(blocks: Sequence[torch.nn.Module]) -> Iterator[ModulationLayer]:
    """The modulation layers of some blocks, in order."""
    for index, block in enumerate(blocks):
        for stream, name in MODULATION.items():
            yield ModulationLayer(index, stream, getattr(block, name))


def unknown_modulation(blocks: Sequence[torch.nn.Module]) -> Fallback | None:
    """Why there is no modulation of all blocks; None where they agree."""
    names = MODULATION.values()
    if len({tuple(hasattr(block, name) for name in names) for block in blocks}) > 1:
        return Fallback("another extension has put a block of another form among the others")
    return None


def unsupported_block(block: torch.nn.Module, dtype: torch.dtype) -> Fallback | None:
    """Why the executor does not compute a block; None when it does.

    Args:
        dtype: Of the activations.
    """
    try:
        layout = layout_of(block)
        names = *layout.norms, *layout.read, *layout.spec.head_norms
        modules = {name: part_of(block, name) for name in names}
        attn = modules["attn"]
        dim, heads = attn.to_q.out_features, attn.heads
        layers = [part_of(block, name) for name in layout.places]
        changed = [name for name, module in modules.items() if is_changed(module)]
    except AttributeError as error:
        return Fallback(f"its form is unknown: {error}")
    if changed:
        return Fallback(f"{changed[0]} has been changed by another extension")
    norms = [modules[name] for name in layout.norms]
    if any(norm.weight is not None for norm in norms):
        return Fallback("its LayerNorms have weights")
    heads_norms = [modules[name] for name in layout.spec.head_norms]
    if any(norm.weight is None for norm in heads_norms):
        return Fallback("its heads are not normalized")
    widths = {layer.out_features for layer in layers[8:10]}
    eps, head_eps = ({norm.eps for norm in found} for found in (norms, heads_norms))
    if len(eps) > 1 or len(head_eps) > 1 or len(widths) > 1:
        return Fallback("its streams differ in form")
    if layout.activation == GELU:
        gelus = {modules[f"{it}_mlp.net.0"].approximate for it in ("img", "txt")}
        if gelus != {"tanh"}:
            return Fallback("its GELU is not the tanh form")
    return unsupported_shape(dim, dim // heads, dtype)


def is_changed(module: torch.nn.Module) -> bool:
    """Whether somebody has wrapped a module's `forward` or hooked it.

    accelerate leaves the class's own `forward` in the module when its hooks come off.
    """
    own = module.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return True
    wrapped = own.get("forward")
    return wrapped is not None and getattr(wrapped, "__func__", None) is not type(module).forward
