"""One phase of a run: what was predicted of it beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from operator import add
from typing import Any

from ...charts.figures import duration
from ...charts.words import PHASE_NAMES
from ...planning.estimate import Phase, Range, figure, gib
from ...planning.memory import GIB, whole_pixels
from .meter import Measured
from .run_choice import Ran
from .run_record import Record
from .run_wish import Prediction

NAMES = {**PHASE_NAMES, "encode": "VAE encode", "decode": "VAE decode"}
ORDER = ("load", "text", "encode", "tables", "sampling", "decode")


@dataclass(frozen=True)
class PhaseRow:
    """One phase that ran, once or several times.

    Attributes:
        records: Of it, in order.
        predicted: What the estimator says of each that ran; fewer where it has no answer.
        whole: Whether what it says of the whole card holds.
        run: Of which run it is, in words; empty where all are of one.
    """

    name: str
    records: Sequence[Record]
    predicted: Sequence[Phase] = ()
    whole: bool = False
    run: str = ""

    @property
    def measured(self) -> list[Measured]:
        """Of those that had to run."""
        return [record.measured for record in self.records if record.measured is not None]

    def most(self, name: str) -> int:
        """The highest of a figure; 0 where the device is not counted."""
        return max((getattr(measured, name) for measured in self.measured), default=0)

    def total_seconds(self) -> float | None:
        """Of all; None where nothing ran, or nothing told when it was done."""
        seconds = [measured.seconds for measured in self.measured]
        return sum(seconds) if seconds and None not in seconds else None

    def predicted_seconds(self) -> Range | None:
        """Of as many as ran; None where one has no answer."""
        seconds = [phase.seconds for phase in self.predicted]
        if not seconds or None in seconds or len(seconds) < len(self.measured):
            return None
        return reduce(add, seconds)

    def predicted_card(self) -> int:
        """At the worst of them; 0 where nothing says."""
        return max((phase.card_bytes for phase in self.predicted), default=0) * self.whole

    def predicted_beside(self) -> int:
        """What compares with the memory beside the weights: those of the modulation pass the card
        only where the table is made.
        """
        return max(
            (
                phase.activations + phase.workspace + phase.weights * (self.name == "tables")
                for phase in self.predicted
            ),
            default=0,
        )

    def line(self) -> str:
        """Such as `sampling: 2.0 s (predicted 2.1 s); card 40.2 GiB (predicted 41.1)`."""
        said = [f"{len(self.measured)} times"] * (len(self.measured) > 1) + [self.run]
        said = ", ".join(filter(None, said))
        name = f"{NAMES[self.name]} ({said})" if said else NAMES[self.name]
        if not self.measured:
            return f"{name}: did not run"
        took, predicted = self.total_seconds(), self.predicted_seconds()
        words = ["not timed" if took is None else seconds_text(took)]
        if predicted is not None:
            when = " with nothing on the card" * (self.name == "load")
            words[0] += f" (predicted {duration(predicted)}{when})"
        for what, found, known in (
            ("card", self.most("card_bytes"), self.predicted_card()),
            ("beside the weights", self.most("beside_bytes"), self.predicted_beside()),
        ):
            if found:
                words.append(f"{what} {_gib(found)} GiB")
                words[-1] += f" (predicted {_gib(known)})" if known else ""
        return f"{name}: {'; '.join(words)}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON, in seconds and GiB."""
        measured = predicted = None
        if self.measured:
            took = self.total_seconds()
            measured = {"seconds": None if took is None else figure(took)}
            if any(found.counted for found in self.measured):
                beside = self.most("beside_bytes")
                measured |= {
                    "card_gib": gib(self.most("card_bytes")),
                    "allocated_gib": gib(self.most("allocated_bytes")),
                    "paged_weights_gib": gib(self.most("paged_bytes")),
                    "beside_gib": gib(beside) if beside else None,
                }
        if self.predicted:
            most = max(self.predicted, key=lambda phase: phase.card_bytes)
            predicted = most.as_dict() | {"seconds": ends(self.predicted_seconds())}
            if not self.whole:
                predicted["card_gib"] = predicted["parts"]["resident"] = None
        return {
            "run": self.run or None,
            "predicted": predicted,
            "measured": measured,
            "times": len(self.records),
            "remembered": len(self.records) - len(self.measured),
            "path": list(dict.fromkeys(line for each in self.records for line in each.path)),
            "asked": [dict(record.asked) for record in self.records],
        }


def rows_of(ran: Ran, predictions: Sequence[Prediction]) -> list[PhaseRow]:
    """The phases that ran, in the order in which a first run has them.

    Args:
        predictions: of each sampling; the last is of the one that gave the images.
    """
    last = predictions[-1]
    prompts = 1 if last.wish is None or last.wish.cfg == "off" else 2

    @cache
    def phases(*settings: tuple[str, int]) -> Mapping[str, Phase]:
        return last.changed(**dict(settings))

    def predicted(record: Record) -> Phase | None:
        phase = phases(*_settings(record)).get(record.phase)
        if phase is not None and record.phase == "text" and phase.seconds is not None:
            return replace(phase, seconds=phase.seconds.times(1 / prompts))
        return phase

    rows = []
    for name in ORDER:
        records = _load(ran) if name == "load" else ran.of(name)
        if not records:
            continue
        if name == "load":
            found = [last.phases.get(name) if last.whole else None]
        elif name == "sampling":
            found = [each.phases.get(name) for each in predictions]
        else:
            found = [predicted(record) for record in records if record.measured is not None]
        known = [phase for phase in found if phase is not None]
        rows.append(PhaseRow(name, records, known, last.whole, _run(ran, records)))
    return rows


def _run(ran: Ran, records: Sequence[Record]) -> str:
    if ran.this_run:
        return ""
    return "this run" if records[-1].prompt == ran.now else "an earlier run"


def _load(ran: Ran) -> tuple[Record, ...]:
    """One record of all waits for weights, if phases told where they ended."""
    found = [
        record.measured
        for record in ran.records
        if record.phase != "tables" and record.prompt == ran.last.prompt
        if record.measured is not None and record.measured.waited_seconds is not None
    ]
    if not found:
        return ()
    most = max(found, key=lambda each: each.loaded_bytes)
    waited = sum(each.waited_seconds for each in found)
    measured = Measured(waited, most.device, most.counted, most.loaded_bytes)
    return (Record("load", measured, prompt=ran.last.prompt),)


def _settings(record: Record) -> tuple[tuple[str, int], ...]:
    """What a record was asked for where that can differ from the sampling's, of a `Wish`."""
    asked: dict[str, int] = {}
    if record.phase == "decode" and "size" in record.asked:
        images, *_, height, width = record.asked["size"]
        asked = {name: whole_pixels(side) for name, side in (("width", width), ("height", height))}
        asked |= {"batch": images, "layers": 0, "tiles": record.asked["tiles"]}
    elif record.phase == "tables":
        asked = {"steps": record.asked["timesteps"]}
    return tuple(asked.items())


def ends(seconds: Range | None) -> list[float] | None:
    """For JSON."""
    return None if seconds is None else [figure(seconds.low), figure(seconds.high)]


def seconds_text(value: float) -> str:
    """Such as `840 ms`."""
    return duration(Range(value, value))


def _gib(count: int) -> str:
    return f"{count / GIB:.2f}"
