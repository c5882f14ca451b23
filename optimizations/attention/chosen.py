"""The attention of one optimized model: what is chosen for its shapes, and when it is given up."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from ...errors import UnavailableError
from .choice import Attention, choose_attention
from .request import Request

logger = logging.getLogger(__name__)


class ChosenAttention:
    """Attention by the backend that is chosen for the shapes at hand, each in its first call.

    Args:
        name: "auto", or the name of a backend.
        lossy: Whether that backend differs from exact attention by more than rounding.

    Attributes:
        host: Whose attention stands in for it, in the genitive.
        broken: Why that happens in this run; empty when it does not.
    """

    host = "the host's"

    def __init__(self, name: str, lossy: bool = False) -> None:
        self.name = name
        self.lossy = lossy
        self.broken = ""
        self._chosen: dict[Request, Attention] = {}

    def start_run(self) -> None:
        """Forgets the last run: what was chosen, and what went wrong."""
        self._chosen.clear()
        self.broken = ""

    def give_up(self) -> None:
        """Leaves the rest of the run to the host's own attention, after NaN or infinity."""
        names = sorted({attention.name for attention in self._chosen.values()}) or [self.name]
        self.broken = f"{' and '.join(names)} gave NaN or infinity"
        logger.warning("Qwen-Image L40S: attention: %s: %s own from here.", self.broken, self.host)

    def lines(self) -> list[str]:
        """What was chosen and why, a line each."""
        if self.broken:
            return [f"attention: {self.host} own: {self.broken}"]
        found = {f"attention: {chosen.name}: {chosen.reason}" for chosen in self._chosen.values()}
        return sorted(found) or [f"attention: {self.name}, chosen in the first step"]

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of q, k and v, (batch, joint, heads, head_dim), as `Attention` computes it."""
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
            if self.name == "auto":
                raise
            # The name was checked for images of the usual size; a mask or a few tokens may be too
            # much for it in the middle of a run.
            chosen = choose_attention(request)
            return replace(chosen, reason=f"{chosen.reason}; {error}")
