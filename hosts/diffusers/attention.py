"""The attention of a diffusers transformer: a backend of this package, or the user's own choice.

diffusers has backends too, chosen for a model (`set_attention_backend`), for a `with` block
(`attention_backend`) or by an environment variable. Whoever chose one is heard: "auto" then calls
that backend.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models import attention_dispatch

from ...optimizations.attention import ChosenAttention
from ...optimizations.fallback import Fallback

# diffusers' own attention, whatever is chosen there.
HOST_ATTENTION = "diffusers"


class TransformerAttention(ChosenAttention):
    """Attention by the backend that is chosen for the shapes at hand; name may be "diffusers"."""

    host = "diffusers'"

    def start_pass(self, processor: object) -> None:
        """Finds out whether diffusers' own computes this pass: it was asked for, or the user chose
        a backend there.

        Args:
            processor: Of the first block's attention.
        """
        if self.fallback and self.fallback.final:
            return
        theirs = users_backend(processor)
        self.fallback = None
        if self.name == HOST_ATTENTION:
            self.fallback = Fallback(f"{theirs or 'native'}, asked for")
        elif self.name == "auto" and theirs:
            self.fallback = Fallback(f"{theirs}, chosen there")


def host_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    processor: object,
) -> torch.Tensor:
    """diffusers' own attention, as `optimizations.blocks.block.Attend`.

    Args:
        mask: True where a key counts, (batch, 1, 1, joint), as diffusers passes it; or None.
        processor: Whose backend counts.
    """
    out = attention_dispatch.dispatch_attention_fn(
        q, k, v, attn_mask=mask, backend=backend_of(processor)
    )
    return out.flatten(2, 3).to(q.dtype)


def backend_of(processor: object) -> Any:
    """The diffusers backend that was chosen for a processor; None where none was."""
    return getattr(processor, "_attention_backend", None)


def users_backend(processor: object) -> str:
    """The name of the diffusers backend that was chosen for a processor, or for all; or empty."""
    backend = backend_of(processor)
    if backend is None:
        backend, _ = attention_dispatch._AttentionBackendRegistry.get_active_backend()
        if backend == attention_dispatch.AttentionBackendName.NATIVE:  # what it is without a choice
            return ""
    return str(getattr(backend, "value", backend))
