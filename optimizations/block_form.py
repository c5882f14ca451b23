"""Whether a module is the block that the executor computes."""

from __future__ import annotations

import torch

from ..planning.memory import BLOCK_GEMMS
from . import fused

# Every submodule that the executor reads instead of calling, so that a change to one would be lost.
READ = (
    "img_norm1",
    "img_norm2",
    "txt_norm1",
    "txt_norm2",
    "img_mlp",
    "txt_mlp",
    "img_mlp.net.0",
    "txt_mlp.net.0",
    "attn",
    "attn.norm_q",
    "attn.norm_k",
    "attn.norm_added_q",
    "attn.norm_added_k",
)

HEAD_NORMS = ("attn.norm_q", "attn.norm_k", "attn.norm_added_q", "attn.norm_added_k")


def misfit(block: torch.nn.Module, dtype: torch.dtype) -> str:
    """Why the executor does not compute a block, in one clause; empty when it does.

    Args:
        block: A host's double-stream block.
        dtype: Of the activations.
    """
    try:
        modules = {name: block.get_submodule(name) for name in READ}
        attn = modules["attn"]
        dim, heads = attn.to_q.out_features, attn.heads
        widths = {mlp.net[0].proj.out_features for mlp in (block.img_mlp, block.txt_mlp)}
    except AttributeError as error:
        return f"its form is unknown: {error}"
    for name, module in modules.items():
        if is_changed(module):
            return f"{name} has been changed by another extension"
    norms = [modules[name] for name in READ if "norm" in name and "attn" not in name]
    if any(norm.weight is not None for norm in norms):
        return "its LayerNorms have weights"
    if any(modules[name].weight is None for name in HEAD_NORMS):
        return "its heads are not normalized"
    head_eps = {modules[name].eps for name in HEAD_NORMS}
    if len({norm.eps for norm in norms}) > 1 or len(head_eps) > 1 or len(widths) > 1:
        return "its streams differ in form"
    approximate = {mlp.net[0].approximate for mlp in (block.img_mlp, block.txt_mlp)}
    if approximate != {"tanh"}:
        return "its GELU is not the tanh form"
    return fused.refusal(dim, dim // heads, dtype)


def token_layers(block: torch.nn.Module) -> list[torch.nn.Module]:
    """The linear layers of a block that see tokens; none of a block of another form."""
    try:
        return [block.get_submodule(name) for name in BLOCK_GEMMS]
    except AttributeError:
        return []


def is_changed(module: torch.nn.Module) -> bool:
    """Whether somebody has wrapped a module's `forward` or hooked it.

    accelerate leaves the class's own `forward` in the module when its hooks come off.
    """
    own = module.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return True
    wrapped = own.get("forward")
    return wrapped is not None and getattr(wrapped, "__func__", None) is not type(module).forward
