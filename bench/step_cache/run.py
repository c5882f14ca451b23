"""A sampling run of many images with a rule that skips steps.

All take latents [N, 16, H, W] in fp32; velocities of both branches of CFG are [N, 2, 16, H, W],
prompt first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

CFG = 4.0


class Found(NamedTuple):
    """What the model computed for some images.

    Attributes:
        velocity: [N, 2, 16, H, W].
        residual: [N, 2, tokens, width], what all blocks together add to the image's tokens.
        middle: [N, tokens, width], the same of the middle block, with the prompt.
    """

    velocity: torch.Tensor
    residual: torch.Tensor
    middle: torch.Tensor


class Field(Protocol):
    """A model with its prompts."""

    def compute(self, x: torch.Tensor, sigma: float, rows: torch.Tensor) -> Found:
        """All of the model for the latents of the images `rows`."""

    def finish(self, x: torch.Tensor, sigma: float, residual: torch.Tensor) -> torch.Tensor:
        """The velocities [N, 2, ...] where the blocks add `residual`; runs no block."""

    def modulated(self, x: torch.Tensor, sigma: float) -> torch.Tensor:
        """The first block's modulated input [N, tokens, width]."""


def guided(velocity: torch.Tensor) -> torch.Tensor:
    """[N, 2, ...] -> [N, ...]"""
    return velocity[:, 1] + CFG * (velocity[:, 0] - velocity[:, 1])


class Run(NamedTuple):
    """A batch that is about to be sampled: its model, sigmas, and number of images."""

    field: Field
    sigmas: Sequence[float]
    count: int

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1


class Rule:
    """What skips steps of one run; this one skips none."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def skips(self, step: int, x: torch.Tensor, sigma: float) -> bool | torch.Tensor:
        """Which images skip the step: bool [N], or one answer for all."""
        return False

    def reuse(self, step: int, x: torch.Tensor, sigma: float) -> torch.Tensor:
        """Every image's velocity [N, ...] instead of the model's; called if one skips."""
        raise NotImplementedError

    def computed(
        self, step: int, x: torch.Tensor, sigma: float, rows: torch.Tensor, found: Found
    ) -> None:
        """The images `rows` were computed; x is that of all."""


class Sampled(NamedTuple):
    """Attributes:
    x: The latents.
    computed: How many steps of each image were computed, [N].
    rule: Whose run it was.
    """

    x: torch.Tensor
    computed: torch.Tensor
    rule: Rule


def sample(
    field: Field, sigmas: Sequence[float], x: torch.Tensor, make: Callable[[Run], Rule]
) -> Sampled:
    """Euler steps from noise [N, ...] with a rule."""
    rule = make(Run(field, sigmas, len(x)))
    counts = torch.zeros(len(x), device=x.device)
    for step, (sigma, following) in enumerate(pairwise(sigmas)):
        skipped = torch.as_tensor(rule.skips(step, x, sigma), device=x.device).expand(len(x))
        rows = (~skipped).nonzero()[:, 0]
        velocity = rule.reuse(step, x, sigma) if len(rows) < len(x) else torch.empty_like(x)
        if len(rows):
            found = field.compute(x[rows], sigma, rows)
            rule.computed(step, x, sigma, rows, found)
            velocity[rows] = guided(found.velocity)
        counts[rows] += 1
        x = x + (following - sigma) * velocity
    return Sampled(x, counts, rule)
