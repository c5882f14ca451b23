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
from ...optimizations.block import Attend

# diffusers' own attention, whatever is chosen there.
HOST_ATTENTION = "diffusers"


class TransformerAttention(ChosenAttention):
    """Attention by the backend that is chosen for the shapes at hand; name may be "diffusers"."""

    host = "diffusers'"

    def __init__(self, name: str, lossy: bool = False) -> None:
        super().__init__(name, lossy)
        self._host = ""  # why diffusers' own computes this pass

    def for_pass(self, processor: object, host: HostAttention) -> Attend:
        """What computes the attention of one forward pass.

        Args:
            processor: Of the first block's attention.
            host: diffusers' own, for this pass.
        """
        theirs = users_backend(processor)
        if self.broken:
            self._host = f"attention: diffusers' own: {self.broken}"
        elif self.name == HOST_ATTENTION:
            self._host = f"attention: diffusers' own, {theirs or 'native'}: asked for"
        elif self.name == "auto" and theirs:
            self._host = f"attention: diffusers' own, {theirs}: chosen there"
        else:
            self._host = ""
        if self._host:
            return host.attend

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
        ) -> torch.Tensor:
            return (host if self.broken else self).attend(q, k, v, mask)

        return attend

    @property
    def may_be_wrong(self) -> bool:
        """Whether the last pass ran a backend of this package."""
        return bool(self._chosen) and not self._host and not self.broken

    def lines(self) -> list[str]:
        """What was chosen and why, a line each."""
        return [self._host] if self._host else super().lines()


class HostAttention:
    """diffusers' own attention for one forward pass.

    Attributes:
        processor: Whose backend counts.
        mask: True where a key counts, as diffusers passes it, (batch, 1, 1, joint); or None.
    """

    def __init__(self, processor: object) -> None:
        self.processor = processor
        self.mask: torch.Tensor | None = None

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """As `TransformerAttention.attend`; the mask is the one that diffusers would pass."""
        out = attention_dispatch.dispatch_attention_fn(
            q, k, v, attn_mask=self.mask, backend=backend_of(self.processor)
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
