"""An estimate: what a wish takes on a card in each phase, how long it lasts and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .memory import GIB

PHASES = ("load", "text", "tables", "sampling", "decode")


class Range(NamedTuple):
    """Between which values a figure lies; both are the same where it was measured."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The geometric mean: what is named where there is room for one figure."""
        return (self.low * self.high) ** 0.5

    def __add__(self, other: Any) -> Range:
        return Range(self.low + other[0], self.high + other[1])

    def times(self, factor: float) -> Range:
        """Both ends multiplied."""
        return Range(self.low * factor, self.high * factor)


NOTHING = Range(0.0, 0.0)


@dataclass(frozen=True)
class Phase:
    """The card at the worst moment of one phase, in bytes.

    Attributes:
        name: One of `PHASES`.
        weights: Of the part that works: text encoder, modulation on its way, transformer, VAE.
        activations: Tensors that come and go.
        workspace: What GEMMs and convolutions take beside them, and the allocator's rounding.
        context: The CUDA context, kernels, cuBLAS and cuDNN.
        resident: {what else stays on the card: bytes}.
        seconds: How long it lasts; None where nothing says.
        note: How it is done, in one clause.
    """

    name: str
    weights: int
    activations: int
    workspace: int
    context: int
    resident: Mapping[str, int] = field(default_factory=dict)
    seconds: Range | None = None
    note: str = ""

    @property
    def peak_bytes(self) -> int:
        """Of the part that works, alone."""
        return self.weights + self.activations + self.workspace

    @property
    def card_bytes(self) -> int:
        """Of everything that is on the card."""
        return self.peak_bytes + self.context + sum(self.resident.values())

    def as_dict(self) -> dict[str, Any]:
        """For JSON, in GiB and seconds."""
        parts: dict[str, Any] = {
            name: gib(getattr(self, name))
            for name in ("weights", "activations", "workspace", "context")
        }
        parts["resident"] = {name: gib(count) for name, count in self.resident.items()}
        return {
            "peak_gib": gib(self.peak_bytes),
            "card_gib": gib(self.card_bytes),
            "parts": parts,
            "seconds": None if self.seconds is None else figure(self.seconds.middle),
            "note": self.note,
        }


def gib(count: float) -> float:
    """Bytes as GiB, to a thousandth."""
    return round(count / GIB, 3)


def figure(value: float) -> float:
    """To four significant digits."""
    return float(f"{value:.4g}")
