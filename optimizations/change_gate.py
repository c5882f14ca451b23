"""The adaptive step cache's gate: how much the first block's input changes from step to step.

That input is the latent behind `img_in`, normalized and modulated by its step's timestep. It is
independent of the prompt, so that one answer holds for both branches of CFG, and takes two small
layers of 60 blocks. A curve says how far the transformer's answer moves with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import torch

from ..machine.store import load_curve
from ..step_cache import Curve, published_curve
from .blocks.block_form import blocks_of, layout_of

# By these a checkpoint is known again: small, in front of the first block, quantized in no file of
# this package, and left alone by most LoRAs.
IDENTIFYING = ("img_in.weight", "transformer_blocks.0.img_mod.1.bias")
NOT_ADAPTIVE = "the adaptive method knows the blocks of Qwen-Image 1.x only: choose schedule"


def is_adaptive(transformer: torch.nn.Module) -> bool:
    """Whether the adaptive method knows a transformer's blocks."""
    return bool(layout_of(blocks_of(transformer)[0]).spec.modulation)


class FirstBlock:
    """The input of the first block's attention in the steps of one run.

    Args:
        transformer: Of Qwen-Image 1.x, ComfyUI's or diffusers'. Its layers are called as modules,
            on the first call also the first block's modulation, once for all steps.
        sigmas: Of the run.
        tokens: Gives a latent as `img_in` takes it, (batch, tokens, channels).
        times: Gives sigmas, (n,), as `time_text_embed` takes them.
    """

    def __init__(
        self,
        transformer: torch.nn.Module,
        sigmas: Sequence[float],
        tokens: Callable[[torch.Tensor], torch.Tensor],
        times: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._transformer, self._sigmas = transformer, list(sigmas)
        self._tokens, self._times = tokens, times
        self._rows: torch.Tensor | None = None  # shift and scale, (steps, 2, width)

    def __call__(self, x: torch.Tensor, sigma: float) -> torch.Tensor:
        """Of a step, (batch, tokens, width), in the activations' dtype.

        Args:
            x: The latent.
            sigma: One of the run's.
        """
        hidden = self._transformer.img_in(self._tokens(x))
        if self._rows is None or self._rows.device != hidden.device:
            self._rows = self._modulation(hidden)
        shift, scale = self._rows[self._sigmas.index(sigma)]
        normalized = blocks_of(self._transformer)[0].img_norm1(hidden)
        return torch.addcmul(shift, normalized, 1 + scale)

    def _modulation(self, hidden: torch.Tensor) -> torch.Tensor:
        times = self._times(torch.tensor(self._sigmas, device=hidden.device))
        embeddings = self._transformer.time_text_embed(times, hidden)
        rows = blocks_of(self._transformer)[0].img_mod(embeddings)
        return rows.unflatten(1, (6, -1))[:, :2].clone()


class ChangeGate:
    """Implements `step_cache.Gate`.

    Args:
        first_block: Such as `FirstBlock`.
        curve: Of the run's count of steps.
    """

    def __init__(
        self, first_block: Callable[[torch.Tensor, float], torch.Tensor], curve: Curve
    ) -> None:
        self._first_block, self._curve = first_block, curve
        self._before: torch.Tensor | None = None
        self.source = curve.source

    def change(self, x: torch.Tensor, sigma: float) -> float:
        """Since the last call, on the curve's scale; 0 at the first, and where the size changed.

        The one number of a step cache for which the host waits: once a step.
        """
        now = self._first_block(x, sigma)
        before, self._before = self._before, now
        if before is None or (before.shape, before.device) != (now.shape, now.device):
            return 0.0
        return self._curve(relative_change(now, before).item())


def relative_change(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """mean |now - before| / mean |before| of tensors of one shape, 0-dimensional, in float32."""
    lost, whole = (
        torch.linalg.vector_norm(x, 1, dtype=torch.float32) for x in (now - before, before)
    )
    return lost / whole


def checkpoint_id(weights: Iterable[torch.Tensor]) -> str:
    """12 digits for the values of the `IDENTIFYING` tensors, rounded to bf16."""
    digest = hashlib.sha256()
    for weight in weights:
        rounded = weight.detach().as_subclass(torch.Tensor).to("cpu", torch.bfloat16).contiguous()
        digest.update(rounded.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def curve_for(steps: int, checkpoint: str, precision: str) -> Curve:
    """The curve that `qwen-l40s calibrate-cache` has stored, else a published one.

    Args:
        steps: Of the run.
        checkpoint: Its `checkpoint_id`; empty where that is unknown.
        precision: Of its weights, such as "bf16".
    """
    stored = load_curve(checkpoint, precision, steps) if checkpoint else None
    return stored or published_curve(steps)
