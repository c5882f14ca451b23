"""Compares a component's config.json with its tensors: a folder put together from two models fails
here, not while sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .identity import Identity, Tensors

# {role: {key in config.json: name in Identity.dims}}
SAME = {
    "transformer": {
        "attention_head_dim": "head_dim",
        "num_attention_heads": "heads",
        "joint_attention_dim": "joint_dim",
        "in_channels": "in_channels",
    },
    "vae": {"base_dim": "dim", "z_dim": "latent_channels", "input_channels": "image_channels"},
    "text_encoder": {
        "hidden_size": "hidden",
        "intermediate_size": "intermediate",
        "vocab_size": "vocabulary",
    },
}
BLOCK_KEYS = {"transformer": "num_layers", "text_encoder": "num_hidden_layers"}


def contradictions(identity: Identity, config: Mapping[str, Any], tensors: Tensors) -> list[str]:
    """Returns one sentence for every value that the tensors disprove; `config` is {} without a
    file.
    """
    if not config:
        return []
    nested = config.get("text_config")
    values = {**config, **nested} if isinstance(nested, dict) else config
    found = {key: identity.dims.get(name) for key, name in SAME.get(identity.role, {}).items()}
    if identity.role in BLOCK_KEYS:
        found[BLOCK_KEYS[identity.role]] = identity.blocks
    sentences = [
        f"config.json says {key} is {values[key]!r} but the tensors say {actual}: take config.json "
        "and weights from one source."
        for key, actual in found.items()
        if actual is not None and key in values and values[key] != actual
    ]
    if identity.role == "transformer":
        sentences += _layered_contradictions(config, tensors)
    return sentences


def _layered_contradictions(config: Mapping[str, Any], tensors: Tensors) -> list[str]:
    declared = bool(config.get("use_additional_t_cond"))
    present = "time_text_embed.addition_t_embedding.weight" in tensors
    if declared == present:
        return []
    return [
        f"config.json says use_additional_t_cond is {declared} but the tensor "
        f"time_text_embed.addition_t_embedding.weight is {'there' if present else 'not there'}: "
        "take config.json and weights from one source."
    ]
