"""The phases of a run: what was predicted of each and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from operator import add
from typing import Any

from comfy.model_patcher import ModelPatcher

from ....charts.answer import phase_json
from ....charts.figures import duration
from ....charts.words import PHASE_NAMES
from ....planning.phases import Phase, Range, figure, gib
from ....spec.transformer import whole_pixels
from ..record.meter import Measured
from ..record.record import Record, prompt_id, recorded
from .predict import Prediction

ROW_NAMES = {**PHASE_NAMES, "encode": "VAE encode", "decode": "VAE decode"}
ORDER = ("load", "text", "encode", "tables", "sampling", "decode")


@dataclass(frozen=True)
class LastRun:
    """The records of a report: the MODEL's last run, with what CLIP and VAE did for it or now.

    Attributes:
        records: In order.
        now: The id of the prompt that ComfyUI executes.
    """

    records: tuple[Record, ...]
    now: str

    @property
    def last(self) -> Record:
        """The last sampling."""
        return self.of("sampling")[-1]

    @property
    def this_run(self) -> bool:
        """Whether this prompt sampled."""
        return self.last.prompt == self.now

    def of(self, phase: str) -> tuple[Record, ...]:
        """The records of one phase."""
        return tuple(record for record in self.records if record.phase == phase)


def last_run(model: ModelPatcher, clip: Any, vae: Any) -> LastRun | None:
    """Collects the records of the parts; None where nothing was sampled."""
    own = recorded(model.model)
    sampled = [record for record in own if record.phase == "sampling"]
    if not sampled:
        return None
    prompts = (sampled[-1].prompt, prompt_id())
    parts = (getattr(clip, "cond_stage_model", None), getattr(vae, "first_stage_model", None))
    others = [record for part in parts for record in recorded(part) if record.prompt in prompts]
    return LastRun((*own, *others), prompts[1])


@dataclass(frozen=True)
class PhaseRow:
    """One phase that ran, once or several times.

    Attributes:
        records: In order.
        predicted: The estimate of each that ran; fewer where there is none.
        whole: Whether the estimate of the whole card holds.
        run: Which run it is of, in words; empty where all are of one.
    """

    name: str
    records: Sequence[Record]
    predicted: Sequence[Phase] = ()
    whole: bool = False
    run: str = ""

    @property
    def measured(self) -> list[Measured]:
        """Measurements of the records that had to run."""
        return [record.measured for record in self.records if record.measured is not None]

    def most(self, name: str) -> int:
        """The maximum of a figure; 0 where the device is not counted."""
        return max((getattr(measured, name) for measured in self.measured), default=0)

    def total_seconds(self) -> float | None:
        """Seconds of all records; None where nothing ran, or nothing recorded its end."""
        seconds = [measured.seconds for measured in self.measured]
        return sum(seconds) if seconds and None not in seconds else None

    def predicted_seconds(self) -> Range | None:
        """Predicted seconds of as many as ran; None where one has no prediction."""
        seconds = [phase.seconds for phase in self.predicted]
        if not seconds or None in seconds or len(seconds) < len(self.measured):
            return None
        return reduce(add, seconds)

    def predicted_card(self) -> int:
        """Predicted peak of the card in bytes; 0 without a prediction."""
        return max((phase.card_bytes for phase in self.predicted), default=0) * self.whole

    def predicted_working(self) -> int:
        """Activations and workspace; of the tables also the weights, which pass the card once."""
        return max(
            (
                phase.activations + phase.workspace + phase.weights * (self.name == "tables")
                for phase in self.predicted
            ),
            default=0,
        )

    @property
    def title(self) -> str:
        """`text encode (2 times)`."""
        count = f"{len(self.measured)} times" if len(self.measured) > 1 else ""
        which = ", ".join(filter(None, (count, self.run)))
        return f"{ROW_NAMES[self.name]} ({which})" if which else ROW_NAMES[self.name]

    def time(self) -> str:
        """What was measured, in words."""
        if not self.measured:
            return "did not run"
        took = self.total_seconds()
        return "not timed" if took is None else seconds_text(took)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, in seconds and GiB."""
        measured = predicted = None
        if self.measured:
            took = self.total_seconds()
            measured = {"seconds": None if took is None else figure(took)}
            if any(found.counted for found in self.measured):
                working = self.most("working_bytes")
                measured |= {
                    "card_gib": gib(self.most("card_bytes")),
                    "allocated_gib": gib(self.most("allocated_bytes")),
                    "paged_weights_gib": gib(self.most("paged_bytes")),
                    "working_gib": gib(working) if working else None,
                }
        if self.predicted:
            most = max(self.predicted, key=lambda phase: phase.card_bytes)
            predicted = phase_json(most) | {"seconds": ends(self.predicted_seconds())}
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


def rows_of(ran: LastRun, predictions: Sequence[Prediction]) -> list[PhaseRow]:
    """The phases that ran, in the order in which a first run has them.

    Args:
        predictions: of each sampling; the last is of the one that gave the images.
    """
    last = predictions[-1]
    prompts = 1 if last.request is None or last.request.cfg == "off" else 2

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


def _run(ran: LastRun, records: Sequence[Record]) -> str:
    if ran.this_run:
        return ""
    return "this run" if records[-1].prompt == ran.now else "an earlier run"


def _load(ran: LastRun) -> tuple[Record, ...]:
    """One record of all waits for weights, if phases recorded their end."""
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
    """What a record was asked for where that can differ from the sampling's, of a `RunRequest`."""
    asked: dict[str, int] = {}
    if record.phase == "decode" and "size" in record.asked:
        images, *_, height, width = record.asked["size"]
        asked = {name: whole_pixels(side) for name, side in (("width", width), ("height", height))}
        asked |= {"batch": images, "layers": 0, "tiles": record.asked["tiles"]}
    elif record.phase == "tables":
        asked = dict.fromkeys(("steps", "computed"), record.asked["timesteps"])
    return tuple(asked.items())


def ends(seconds: Range | None) -> list[float] | None:
    """For JSON."""
    return None if seconds is None else [figure(seconds.low), figure(seconds.high)]


def seconds_text(value: float) -> str:
    """Formats seconds: `840 ms`."""
    return duration(Range(value, value))
