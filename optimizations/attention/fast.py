"""The choice `fast`: the fastest backend whose error, measured in the run, stays below a bound."""

from __future__ import annotations

import functools

import torch

from .backend import AttentionRequest
from .registry import BACKENDS, refusal

FAST = "fast"
# Relative, of one call. On Gaussian q, k and v int8 is off by 0.010, int8_fp8 by 0.038 (H200).
MOST_ERROR = 0.02


class MeasuredErrors:
    """How far quantized backends are from exact attention, on the run's own queries, keys and
    values of a first, a middle and the last block.

    Args:
        most: The largest relative error that is allowed.
        blocks: Of the model.
    """

    def __init__(self, most: float, blocks: int) -> None:
        self.most = most
        self._wanted = {0, blocks // 2, blocks - 1}
        self._calls = 0
        self._found: dict[str, list[torch.Tensor]] = {}
        self._refused: dict[str, str] = {}

    @property
    def complete(self) -> bool:
        """Whether the last block was measured."""
        return self._calls > max(self._wanted)

    def add(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        exact: torch.Tensor,
    ) -> None:
        """Measures where this is one of the blocks.

        Args:
            q, k, v, mask: As `Backend.attend`.
            exact: What exact attention gave of them.
        """
        if self._calls in self._wanted:
            request, size = AttentionRequest.of(q, mask), exact.float().norm()
            for name in lossy_backends():
                self._refused[name] = refusal(name, request)
                if not self._refused[name]:
                    off = BACKENDS[name].attend(q, k, v, mask).sub_(exact).float().norm()
                    self._found.setdefault(name, []).append(off / size)
        self._calls += 1

    @functools.cached_property
    def errors(self) -> dict[str, float]:
        """The largest error of each backend that runs; NaN where one gave NaN."""
        # One by one: those of a run on several cards are on several.
        return {
            name: torch.tensor([error.item() for error in found]).max().item()
            for name, found in self._found.items()
        }

    @property
    def allowed(self) -> list[str]:
        """The backends within the bound."""
        return [name for name, error in self.errors.items() if error <= self.most]

    def clause(self, name: str) -> str:
        """What was found of a backend."""
        if name in self.errors:
            return f"{name} error {self.errors[name]:.2g}"
        return f"not {name}: {self._refused.get(name, 'it did not run')}"


def lossy_backends() -> list[str]:
    """The names of those that quantize."""
    return [name for name, backend in BACKENDS.items() if not backend.exact]
