"""What a block of Qwen-Image 1.x is: the names of its parts, and whether a module is one.

ComfyUI's and diffusers' double-stream blocks have the same attribute names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch

from ...spec import BLOCK_GEMMS, DOUBLE_STREAM
from ..fallback import Fallback
from ..fused import unsupported_shape

# The layers that see the timestep alone, by the stream that they modulate.
MODULATION = DOUBLE_STREAM.modulation
HEAD_NORMS = ("attn.norm_q", "attn.norm_k", "attn.norm_added_q", "attn.norm_added_k")
LAYER_NORMS = ("img_norm1", "img_norm2", "txt_norm1", "txt_norm2")
# Every submodule that the executor reads instead of calling, so that a change to one would be lost.
READ = (
    *LAYER_NORMS,
    "img_mlp",
    "txt_mlp",
    "img_mlp.net.0",
    "txt_mlp.net.0",
    "attn",
    *HEAD_NORMS,
)


class ModulationLayer(NamedTuple):
    """One modulation layer: of which block, of which stream, and the host's module."""

    block: int
    stream: Literal["image", "text"]
    module: torch.nn.Module


def blocks_of(transformer: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """The blocks of a host's transformer, in order."""
    return tuple(transformer.transformer_blocks)


def token_layers(block: torch.nn.Module) -> list[torch.nn.Module]:
    """The linear layers of a block that see tokens; none of a block of another form."""
    try:
        return [_part(block, name) for name in BLOCK_GEMMS]
    except AttributeError:
        return []


def head_norms(block: torch.nn.Module) -> list[torch.nn.Module]:
    """The RMSNorms of a block that has token layers."""
    return [_part(block, name) for name in HEAD_NORMS]


def _part(block: torch.nn.Module, name: str) -> torch.nn.Module:
    # As get_submodule, which takes five times as long: a run asks for 960.
    for child in name.split("."):
        block = block._modules.get(child) or getattr(block, child)
    return block


def modulation_layers(blocks: Sequence[torch.nn.Module]) -> Iterator[ModulationLayer]:
    """The modulation layers of some blocks, in order."""
    for index, block in enumerate(blocks):
        for stream, name in MODULATION.items():
            yield ModulationLayer(index, stream, getattr(block, name))


def unsupported_block(block: torch.nn.Module, dtype: torch.dtype) -> Fallback | None:
    """Why the executor does not compute a block; None when it does.

    Args:
        dtype: Of the activations.
    """
    try:
        modules = {name: block.get_submodule(name) for name in READ}
        attn = modules["attn"]
        dim, heads = attn.to_q.out_features, attn.heads
        widths = {mlp.net[0].proj.out_features for mlp in (block.img_mlp, block.txt_mlp)}
    except AttributeError as error:
        return Fallback(f"its form is unknown: {error}")
    for name, module in modules.items():
        if is_changed(module):
            return Fallback(f"{name} has been changed by another extension")
    norms = [modules[name] for name in LAYER_NORMS]
    if any(norm.weight is not None for norm in norms):
        return Fallback("its LayerNorms have weights")
    if any(modules[name].weight is None for name in HEAD_NORMS):
        return Fallback("its heads are not normalized")
    head_eps = {modules[name].eps for name in HEAD_NORMS}
    if len({norm.eps for norm in norms}) > 1 or len(head_eps) > 1 or len(widths) > 1:
        return Fallback("its streams differ in form")
    approximate = {mlp.net[0].approximate for mlp in (block.img_mlp, block.txt_mlp)}
    if approximate != {"tanh"}:
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
