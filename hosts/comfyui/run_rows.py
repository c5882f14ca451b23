"""One phase of a run: what was predicted of it beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...charts.words import PHASE_NAMES, duration
from ...planning.estimate import Phase, Range, figure, gib
from ...planning.memory import GIB
from .run_record import Record
from .run_wish import Prediction

NAMES = {**PHASE_NAMES, "encode": "VAE encode", "decode": "VAE decode"}
ORDER = ("text", "encode", "tables", "sampling", "decode")
NONE = "-"


@dataclass(frozen=True)
class PhaseRow:
    """One phase that ran, once or several times.

    Attributes:
        records: Of it, in order.
        predicted: What the estimator says of it; None where it says nothing.
        seconds: Predicted of as many as ran.
    """

    name: str
    records: Sequence[Record]
    predicted: Phase | None = None
    seconds: Range | None = None

    @property
    def measured(self) -> list[Any]:
        """Of those that had to run."""
        return [record.measured for record in self.records if record.measured is not None]

    def most(self, name: str) -> int:
        """The highest of a figure; 0 where the device is not counted."""
        return max((getattr(measured, name) for measured in self.measured), default=0)

    def total_seconds(self) -> float:
        """Of all."""
        return sum(measured.seconds for measured in self.measured)

    def beside(self) -> int:
        """The memory that was taken beside weights that were there; of others nothing says."""
        return 0 if self.name == "text" else self.most("beside_bytes")

    def predicted_beside(self) -> int:
        """What compares with it: weights pass the card only where the table is made."""
        phase = self.predicted
        if phase is None:
            return 0
        passing = phase.weights if self.name == "tables" else 0
        return phase.activations + phase.workspace + passing

    def cells(self) -> list[str]:
        """For the table."""
        phase, comparable = self.predicted, self.beside()
        return [
            NAMES[self.name],
            NONE if self.seconds is None else duration(self.seconds),
            seconds_text(self.total_seconds()) if self.measured else "did not run",
            NONE if phase is None else _gib(phase.card_bytes),
            _gib(self.most("card_bytes")),
            _gib(self.predicted_beside()) if comparable else NONE,
            _gib(comparable),
        ]

    def as_dict(self) -> dict[str, Any]:
        """For JSON, in seconds and GiB."""
        phase, measured = self.predicted, None
        if self.measured:
            measured = {"seconds": figure(self.total_seconds())}
            if any(found.counted for found in self.measured):
                measured |= {
                    "card_gib": gib(self.most("card_bytes")),
                    "allocated_gib": gib(self.most("allocated_bytes")),
                    "paged_weights_gib": gib(self.most("paged_bytes")),
                    "beside_gib": gib(self.beside()) if self.beside() else None,
                }
        predicted = None if phase is None else phase.as_dict()
        if predicted is not None:
            predicted["seconds"] = ends(self.seconds)
        return {
            "predicted": predicted,
            "measured": measured,
            "times": len(self.records),
            "remembered": len(self.records) - len(self.measured),
            "path": list(dict.fromkeys(line for each in self.records for line in each.path)),
            "asked": [dict(record.asked) for record in self.records],
        }


def row_of(name: str, records: Iterable[Record], prediction: Prediction) -> PhaseRow:
    """Joins what ran of a phase with what was predicted of it."""
    own = [record for record in records if record.phase == name]
    predicted = prediction.phases.get(name)
    seconds = None if predicted is None else predicted.seconds
    if name == "text" and seconds is not None:
        prompts = 1 if prediction.wish.cfg == "off" else 2
        ran = sum(record.measured is not None for record in own)
        seconds = seconds.times(ran / prompts) if ran else None
    return PhaseRow(name, own, predicted, seconds)


def ends(seconds: Range | None) -> list[float] | None:
    """For JSON."""
    return None if seconds is None else [figure(seconds.low), figure(seconds.high)]


def seconds_text(value: float) -> str:
    """Such as `840 ms`."""
    return duration(Range(value, value))


def _gib(count: int) -> str:
    return f"{count / GIB:.2f}" if count else NONE
