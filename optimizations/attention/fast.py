"""The choice `fast`: the fastest backend whose error, measured in the run, stays below a bound."""

from __future__ import annotations

import threading

import torch

from .backend import AttentionRequest
from .registry import BACKENDS, refusal

FAST = "fast"
# Relative, of one call. On Gaussian q, k and v int8 is off by 0.010, int8_fp8 by 0.038 (H200).
MOST_ERROR = 0.02


class _Pass(threading.local):
    calls = 0
    wanted = frozenset[int]()


class MeasuredErrors:
    """How far quantized backends are from exact attention, on the run's own queries, keys and
    values of a first, a middle and the last block.

    Cards that each compute a prompt do so in threads: a pass counts the blocks of its own thread.

    Args:
        most: The largest relative error that is allowed.

    Attributes:
        complete: Whether the last block of a pass was measured.
    """

    def __init__(self, most: float) -> None:
        self.most = most
        self.complete = False
        self._pass = _Pass()
        self._found: dict[str, list[torch.Tensor]] = {}
        self._refused: dict[str, str] = {}

    def start_pass(self, blocks: int) -> None:
        """Begins to count blocks, which are measured unless those of another pass were."""
        self._pass.calls = 0
        self._pass.wanted = frozenset(() if self.complete else (0, blocks // 2, blocks - 1))

    @property
    def measuring(self) -> bool:
        """Whether blocks of this pass are still to be measured."""
        return self._pass.calls <= max(self._pass.wanted, default=-1)

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
        if self._pass.calls in self._pass.wanted:
            request, size = AttentionRequest.of(q, mask), exact.float().norm()
            for name in lossy_backends():
                self._refused[name] = refusal(name, request)
                if not self._refused[name]:
                    off = BACKENDS[name].attend(q, k, v, mask).sub_(exact).float().norm()
                    self._found.setdefault(name, []).append(off / size)
        self._pass.calls += 1
        self.complete = self.complete or not self.measuring

    @property
    def errors(self) -> dict[str, float]:
        """The largest error of each backend that runs; NaN where one gave NaN."""
        # Copies, since another card may be measuring; one by one, since its errors are there.
        return {
            name: torch.tensor([error.item() for error in list(found)]).max().item()
            for name, found in list(self._found.items())
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
