"""The first step's check: one block by the executor against the host's own.

A change of the host, of a weight's layout or of another extension that the executor misses would
otherwise be a wrong picture without a word.
"""

from __future__ import annotations

import torch

from ...spec.sizes import COMPARED_AT_ONCE
from ..reference import Tokens
from ..verdict import Verdict
from .block import Step

# What the check allows, of what a block adds to a stream. The fused bf16 block differs by 0.2 % to
# 0.5 % from the host's, whose roundings it leaves out; a quantized one by what fp8 rounds twice.
EXACT_TOLERANCE = 0.02
ROUNDING_TOLERANCE = 0.15

Streams = tuple[torch.Tensor, torch.Tensor]  # text and image


class FirstBlockCheck:
    """Whether the executor may run a model's blocks: one is compared for each shape.

    Args:
        rounds: Whether weights are quantized or attention is lossy, so that host and executor round
            differently.

    Attributes:
        failed: Why the host's blocks run from here on.
        worst: The largest relative difference of a stream that passed; None before.
    """

    def __init__(self, rounds: bool) -> None:
        self._most = ROUNDING_TOLERANCE if rounds else EXACT_TOLERANCE
        self._passed: set[tuple[Tokens, int, bool]] = set()
        self.failed: Verdict | None = None
        self.worst: float | None = None

    def wanted(self, step: Step) -> bool:
        """Whether these shapes have not been compared yet."""
        return _form(step) not in self._passed

    def fail(self, reason: str) -> None:
        """Leaves the blocks to the host from here on."""
        self.failed = Verdict(reason, final=True)

    def passes(self, before: Streams, ours: Streams, host: Streams, step: Step) -> bool:
        """Compares text and image, and keeps the answer.

        The difference may be a part of what the block added, and the rounding of the result:
        |ours - host| <= most * |host - before| + eps / 2 * |host|, as Euclidean norms.
        """
        norms = torch.stack([_norms(*streams) for streams in zip(before, ours, host, strict=True)])
        # Read at once: each time, the card waits for the processor afterwards.
        for stream, (change, off, size) in zip(("text", "image"), norms.tolist(), strict=True):
            change = max(change, 1e-30)
            allowance = torch.finfo(before[0].dtype).eps / 2 * size / change
            error = off / change
            if not error <= self._most + allowance:  # NaN fails too
                self.fail(
                    f"the fused block's {stream} stream differs by {error:.2g} of what the block "
                    f"adds from the host's own, and {self._most} is allowed"
                )
                return False
            self.worst = max(self.worst or 0.0, off / max(size, 1e-30))
        self._passed.add(_form(step))
        return True


def _form(step: Step) -> tuple[Tokens, int, bool]:
    return step.tokens, step.before, step.mask is not None


def _norms(start: torch.Tensor, ours: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """|host - start|, |ours - host| and |host| of streams (batch, tokens, D), as (3,).

    In fp32 and so many tokens at a time, which take little memory.
    """
    found = []
    parts = (stream.split(COMPARED_AT_ONCE, 1) for stream in (start, ours, host))
    for before, mine, theirs in zip(*parts, strict=True):
        theirs = theirs.float()
        # One difference at a time takes the memory that planning counts.
        norms = (theirs - before).norm(), (mine - theirs).norm(), theirs.norm()
        found.append(torch.stack(norms))
    return torch.stack(found).norm(dim=0)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether it holds neither NaN nor infinity; some rows at a time, which take little memory.

    Args:
        tensor: (..., rows, columns).
    """
    parts = tensor.split(COMPARED_AT_ONCE, -2)  # torch's isfinite takes 2.5 times a bf16 tensor
    return all(bool(part.isfinite().all()) for part in parts)
