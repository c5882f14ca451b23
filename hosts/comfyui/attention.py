"""The attention of a MODEL: a backend of this package in ComfyUI's one slot for it.

The slot is `transformer_options["optimized_attention_override"]`. Whoever writes it last is heard:
a node after this one replaces this choice, and a choice that was there before stays where this one
is "auto".
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from comfy.ldm.modules.attention import optimized_attention_masked

from ...errors import UnavailableError
from ...optimizations.attention import Attention, Request, choose_attention

logger = logging.getLogger(__name__)

SLOT = "optimized_attention_override"


class ChosenAttention:
    """Attention by the backend that is chosen for the shapes at hand; fills the slot.

    Args:
        name: "auto", or the name of a backend.
        lossy: Whether that backend differs from exact attention by more than rounding.
        before: What another node had put into the slot.
    """

    def __init__(self, name: str, lossy: bool = False, before: Callable | None = None) -> None:
        self.name = name
        self.lossy = lossy
        self.before = before
        self._chosen: dict[Request, Attention] = {}
        self.broken = ""

    def start_run(self) -> None:
        """Forgets the last run: what was chosen, and what went wrong."""
        self._chosen.clear()
        self.broken = ""

    def give_up(self) -> None:
        """Leaves the rest of the run to ComfyUI's own attention, after NaN or infinity."""
        names = sorted({attention.name for attention in self._chosen.values()}) or [self.name]
        self.broken = f"{' and '.join(names)} gave NaN or infinity"
        logger.warning("Qwen-Image L40S: attention: %s: ComfyUI's own from here.", self.broken)

    def lines(self) -> list[str]:
        """What was chosen and why, a line each."""
        if self.broken:
            return [f"attention: ComfyUI's own: {self.broken}"]
        found = {f"attention: {chosen.name}: {chosen.reason}" for chosen in self._chosen.values()}
        return sorted(found) or [f"attention: {self.name}, chosen in the first step"]

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of (batch, joint, heads, head_dim); see `optimizations.attention`."""
        batch, joint, heads, head_dim = q.shape
        request = Request(q.device, q.dtype, batch, heads, head_dim, joint, mask is not None)
        chosen = self._chosen.get(request)
        if chosen is None:
            chosen = self._chosen[request] = self._choose(request)
        return chosen(q, k, v, mask)

    def _choose(self, request: Request) -> Attention:
        try:
            return choose_attention(request, self.name)
        except UnavailableError as error:
            # The name was checked for images of the usual size; a mask or a few tokens may be too
            # much for it in the middle of a run.
            chosen = choose_attention(request)
            return replace(chosen, reason=f"{chosen.reason}; {error}")

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
            and not self.broken
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
    """transformer_options whose slot is empty where a `ChosenAttention` fills it."""
    if not isinstance(options.get(SLOT), ChosenAttention):
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
