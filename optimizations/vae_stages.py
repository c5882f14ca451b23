"""A host's VAE in the pieces that a plan runs."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SettingError
from ..planning.vae_steps import VaeShape, after_middle, before_middle, down_steps, up_steps
from .vae_middle import Middle
from .vae_tiles import Layer, Run


@dataclass(frozen=True)
class DecoderStages:
    """A host's decoder in pieces; tensors are (B, channels, 1, height, width).

    Args:
        before: latents to the middle's input; reads one latent pixel to each side.
        up: one layer for each of `planning.vae_steps.up_steps(shape)`.
    """

    shape: VaeShape
    before: Layer
    middle: Middle
    up: tuple[Layer, ...]

    def __post_init__(self) -> None:
        _check_layers("decoder", self.up, len(up_steps(self.shape)))

    @property
    def around(self) -> tuple[Run, Run]:
        """What directly precedes and what directly follows the attention."""
        return (
            Run(before_middle(self.shape, "decode"), (self.before, self.middle.first)),
            Run(after_middle(self.shape, "decode"), (self.middle.last,)),
        )

    @property
    def rest(self) -> Run:
        """What follows the middle."""
        return Run(up_steps(self.shape), self.up)


@dataclass(frozen=True)
class EncoderStages:
    """A host's encoder in pieces; tensors are (B, channels, 1, height, width).

    Args:
        down: one layer for each of `planning.vae_steps.down_steps(shape)`.
        after: the middle's output to the mean; reads one latent pixel to each side.
    """

    shape: VaeShape
    down: tuple[Layer, ...]
    middle: Middle
    after: Layer

    def __post_init__(self) -> None:
        _check_layers("encoder", self.down, len(down_steps(self.shape)))

    @property
    def around(self) -> tuple[Run, Run]:
        """What directly precedes and what directly follows the attention."""
        return (
            Run(before_middle(self.shape, "encode"), (self.middle.first,)),
            Run(after_middle(self.shape, "encode"), (self.middle.last, self.after)),
        )

    @property
    def rest(self) -> Run:
        """What precedes the middle."""
        return Run(down_steps(self.shape), self.down)


def _check_layers(what: str, layers: tuple[Layer, ...], wanted: int) -> None:
    if len(layers) != wanted:
        raise SettingError(
            f"this VAE's {what} has {len(layers)} layers beside its middle and Qwen-Image's has "
            f"{wanted}: use Qwen-Image's VAE."
        )
