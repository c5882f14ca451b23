"""The attention of a MODEL: a backend of this package in ComfyUI's one slot for it.

The slot is `transformer_options["optimized_attention_override"]`. Whoever writes it last is heard:
a node after this one replaces this choice, and a choice that was there before stays where this one
is "auto".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comfy.ldm.modules.attention import optimized_attention_masked

from ....optimizations.attention import ChosenAttention

SLOT = "optimized_attention_override"


class SlotAttention(ChosenAttention):
    """Attention by the backend that is chosen for the shapes at hand; fills the slot.

    Args:
        before: What another node had put into the slot.
    """

    host = "ComfyUI's"

    def __init__(self, name: str, lossy: bool = False, before: Callable | None = None) -> None:
        super().__init__(name, lossy)
        self.before = before

    def __call__(
        self,
        default: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **others: Any,
    ) -> torch.Tensor:
        """What ComfyUI calls; `default` takes the calls of other forms than Qwen-Image's."""
        as_qwen = (
            skip_reshape
            and not skip_output_reshape
            and attn_precision is None
            and q.shape == k.shape == v.shape
            and (mask is None or mask.shape == (q.shape[0], 1, q.shape[2]))
            and "scale" not in others
            and self.fallback is None
            and not torch.compiler.is_compiling()
        )
        if not as_qwen:
            return default(
                q,
                k,
                v,
                heads,
                mask,
                attn_precision=attn_precision,
                skip_reshape=skip_reshape,
                skip_output_reshape=skip_output_reshape,
                **others,
            )
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return self.attend(q, k, v, None if mask is None else mask.unsqueeze(1))


def without_choice(options: dict[str, Any]) -> dict[str, Any]:
    """transformer_options whose slot is empty where a `SlotAttention` fills it."""
    if not isinstance(options.get(SLOT), SlotAttention):
        return options
    return {name: value for name, value in options.items() if name != SLOT}


def host_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """ComfyUI's own attention, with what other nodes have put into the slot.

    Args:
        q, k, v: (batch, joint, heads, head_dim).
        mask: (batch, 1, 1, joint), or None.
        options: The transformer_options of the block, which tell others where they are.

    Returns:
        (batch, joint, heads * head_dim).
    """
    heads, options = q.shape[2], without_choice(options)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    mask = None if mask is None else mask.squeeze(1)
    return optimized_attention_masked(
        q, k, v, heads, mask, transformer_options=options, skip_reshape=True
    )
