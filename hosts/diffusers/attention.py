"""The attention of a diffusers transformer: a backend of this package, or the user's own choice.

diffusers has backends too, chosen for a model (`set_attention_backend`), for a `with` block
(`attention_backend`) or by an environment variable. Whoever chose one is heard: "auto" then calls
that backend.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from diffusers.models import attention_dispatch

from ...errors import UnavailableError
from ...optimizations.attention import Attention, Request, choose_attention
from ...optimizations.block import Attend

logger = logging.getLogger(__name__)

# diffusers' own attention, whatever is chosen there.
HOST_ATTENTION = "diffusers"


class ChosenAttention:
    """Attention by the backend that is chosen for the shapes at hand.

    Args:
        name: "auto", the name of a backend, or "diffusers".
        lossy: Whether that backend differs from exact attention by more than rounding.
    """

    def __init__(self, name: str, lossy: bool = False) -> None:
        self.name = name
        self.lossy = lossy
        self.broken = ""
        self._chosen: dict[Request, Attention] = {}
        self._host = ""

    def start_run(self) -> None:
        """Forgets what went wrong in the last run."""
        self.broken = ""

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

    def _choose(self, request: Request) -> Attention:
        try:
            return choose_attention(request, self.name)
        except UnavailableError as error:
            if self.name == "auto":
                raise
            # What was asked for runs here, but not with this mask or length.
            chosen = choose_attention(request)
            return replace(chosen, reason=f"{chosen.reason}; {error}")

    def give_up(self) -> None:
        """Leaves the rest of the run to diffusers' own attention, after NaN or infinity."""
        names = " and ".join(sorted({attention.name for attention in self._chosen.values()}))
        self.broken = f"{names} gave NaN or infinity"
        logger.warning("Qwen-Image L40S: attention: %s: diffusers' own from here.", self.broken)

    @property
    def may_be_wrong(self) -> bool:
        """Whether the last pass ran a backend of this package."""
        return bool(self._chosen) and not self._host and not self.broken

    def lines(self) -> list[str]:
        """What was chosen and why, a line each."""
        if self._host or self.broken:
            return [self._host or f"attention: diffusers' own: {self.broken}"]
        found = {f"attention: {chosen.name}: {chosen.reason}" for chosen in self._chosen.values()}
        return sorted(found) or [f"attention: {self.name}, chosen in the first step"]

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of (batch, joint, heads, head_dim); see `optimizations.attention`."""
        batch, joint, heads, head_dim = q.shape
        request = Request(q.device, q.dtype, batch, heads, head_dim, joint, mask is not None)
        if request not in self._chosen:
            self._chosen[request] = self._choose(request)
        return self._chosen[request](q, k, v, mask)


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
        """As `ChosenAttention.attend`; the mask is the one that diffusers would pass."""
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
