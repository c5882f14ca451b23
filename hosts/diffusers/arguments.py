"""What diffusers passes to a block, as the executor takes it."""

from __future__ import annotations

from typing import Any

import torch

from ...optimizations.streams import Rotary, Tokens

# What a block is called with beside its streams, from diffusers 0.36 to 0.42.
SHARED = (
    "temb",
    "image_rotary_emb",
    "encoder_hidden_states_mask",
    "joint_attention_kwargs",
    "modulate_index",
)
STREAMS = ("hidden_states", "encoder_hidden_states")
# diffusers 0.37 and 0.38 hand the joint mask on among the arguments of attention.
JOINT_MASK = "attention_mask"


class UnfitError(Exception):
    """Arguments that the executor does not know, or a block that it does not compute."""


def zero_from_of(index: torch.Tensor, image: torch.Tensor) -> int:
    """The first image token of timestep 0, from diffusers' index: (1 or batch, tokens), 0 for the
    tokens of the picture and 1 for those of reference images.
    """
    at_zero = index.cpu() != 0  # waits for the card once a pass, as the table's key does
    zero_from = int((~at_zero[0]).sum())
    expected = torch.arange(image.shape[1]) >= zero_from
    fits = at_zero.shape in ((1, image.shape[1]), image.shape[:2])
    if not fits or not (at_zero == expected).all():
        raise UnfitError("modulate_index is not the picture first and its references after it")
    return zero_from


def rotary_of(frequencies: Any, tokens: Tokens) -> Rotary:
    """From diffusers' complex rotations of image and text, each (tokens, head_dim / 2)."""
    try:
        image, text = frequencies
        fits = image.is_complex() and text.is_complex()
        lengths = len(image), len(text)
    except (TypeError, ValueError, AttributeError):
        fits, lengths = False, ()
    if not fits or lengths != (tokens.image, tokens.text):
        raise UnfitError("its rotary embedding is not the complex one of each token")
    joint = torch.cat([text, image]).unsqueeze(0)
    return Rotary(joint.real.contiguous(), joint.imag.contiguous())


def joint_mask_of(arguments: dict[str, Any], tokens: Tokens) -> torch.Tensor | None:
    """True where a key counts, (batch, 1, 1, joint), on the card; None without a mask."""
    more = dict(arguments.get("joint_attention_kwargs") or {})
    joint, text = more.pop(JOINT_MASK, None), arguments.get("encoder_hidden_states_mask")
    if more:
        raise UnfitError(f"attention is passed {', '.join(sorted(more))}, not known here")
    if joint is None:
        if text is None or text.dtype != torch.bool:
            return None  # diffusers 0.36 passes numbers on, which its attention does not read
        joint = torch.cat([text, text.new_ones((len(text), tokens.image))], dim=1)
    elif text is not None or joint.dtype != torch.bool:
        raise UnfitError("its attention has a mask of another form")
    if joint.numel() != tokens.batch * tokens.joint:
        raise UnfitError("its attention has a mask of another form")
    return joint.reshape(tokens.batch, 1, 1, tokens.joint)
