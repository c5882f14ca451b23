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
from ..record.phase import MeasuredPhase, measured, prompt_id
from .predict import Prediction

ROW_NAMES = {**PHASE_NAMES, "encode": "VAE encode", "decode": "VAE decode"}
ORDER = ("text", "encode", "tables", "sampling", "decode")


@dataclass(frozen=True)
class LastRun:
    """What a report is of: the MODEL's last run, with what CLIP and VAE did for it or now.

    Attributes:
        phases: In order.
        now: The id of the prompt that ComfyUI executes.
    """

    phases: tuple[MeasuredPhase, ...]
    now: str

    @property
    def last(self) -> MeasuredPhase:
        """The last sampling."""
        return self.of("sampling")[-1]

    @property
    def this_run(self) -> bool:
        """Whether this prompt sampled."""
        return self.last.prompt == self.now

    def of(self, name: str) -> tuple[MeasuredPhase, ...]:
        """Finds the phases of one name."""
        return tuple(phase for phase in self.phases if phase.name == name)


def last_run(model: ModelPatcher, clip: Any, vae: Any) -> LastRun | None:
    """Collects the phases of the parts; None where no sampling was measured."""
    own = measured(model) or ()
    sampled = [phase for phase in own if phase.name == "sampling"]
    if not sampled:
        return None
    prompts = (sampled[-1].prompt, prompt_id())
    parts = (getattr(part, "patcher", None) for part in (clip, vae))
    others = [it for part in parts for it in measured(part) or () if it.prompt in prompts]
    return LastRun((*own, *others), prompts[1])


@dataclass(frozen=True)
class Row:
    """One phase that ran, once or several times: measured beside predicted.

    Attributes:
        title: `text encode (2 times)`.
        phases: Measured, in order.
        predicted: The estimate of each that ran; fewer where there is none.
        run: Which run it is of, in words; empty where all are of one.
        seconds: Of all; None where one was not timed.
        predicted_seconds: None where one has no prediction.
        card, working: Bytes at the peak, measured and predicted; 0 where unknown.
    """

    name: str
    title: str
    phases: Sequence[MeasuredPhase]
    predicted: Sequence[Phase]
    run: str
    seconds: float | None
    predicted_seconds: Range | None
    card: tuple[int, int]
    working: tuple[int, int]

    @classmethod
    def of(
        cls,
        name: str,
        phases: Sequence[MeasuredPhase],
        predicted: Sequence[Phase] = (),
        whole: bool = False,
        run: str = "",
    ) -> Row:
        """Adds up times and takes the maxima of memory.

        Args:
            whole: Whether the estimate of the whole card holds.
        """
        count = f"{len(phases)} times" if len(phases) > 1 else ""
        which = ", ".join(filter(None, (count, run)))
        seconds = [phase.seconds for phase in phases]
        expected = [phase.seconds for phase in predicted]
        known = expected and None not in expected and len(expected) == len(phases)
        # The tables' weights pass the card once.
        working = [
            phase.activations + phase.workspace + phase.weights * (name == "tables")
            for phase in predicted
        ]
        card = max((phase.card_bytes for phase in predicted), default=0) * whole
        return cls(
            name,
            f"{ROW_NAMES[name]} ({which})" if which else ROW_NAMES[name],
            phases,
            predicted,
            run,
            None if None in seconds else sum(seconds),
            reduce(add, expected) if known else None,
            (_most(phases, "card_bytes"), card),
            (_most(phases, "working_bytes"), max(working, default=0)),
        )

    def time(self) -> str:
        """Formats the measured time."""
        return "not timed" if self.seconds is None else seconds_text(self.seconds)

    def path(self) -> list[str]:
        """Lists how it ran, each line once."""
        return list(dict.fromkeys(line for phase in self.phases for line in phase.path))

    def as_dict(self) -> dict[str, Any]:
        """Gives the figures for JSON, in seconds and GiB."""
        found = {"seconds": None if self.seconds is None else figure(self.seconds)}
        if any(phase.counted for phase in self.phases):
            found |= {
                "card_gib": gib(self.card[0]),
                "allocated_gib": gib(_most(self.phases, "allocated_bytes")),
                "paged_weights_gib": gib(_most(self.phases, "paged_bytes")),
                "working_gib": gib(self.working[0]) if self.working[0] else None,
            }
        predicted = None
        if self.predicted:
            most = max(self.predicted, key=lambda phase: phase.card_bytes)
            predicted = phase_json(most) | {"seconds": ends(self.predicted_seconds)}
            if not self.card[1]:
                predicted["card_gib"] = predicted["parts"]["resident"] = None
        return {
            "run": self.run or None,
            "predicted": predicted,
            "measured": found,
            "times": len(self.phases),
            "path": self.path(),
            "asked": [dict(phase.asked) for phase in self.phases],
        }


def _most(phases: Sequence[MeasuredPhase], name: str) -> int:
    return max(getattr(phase, name) for phase in phases)


def rows_of(ran: LastRun, predictions: Sequence[Prediction]) -> list[Row]:
    """Sorts the phases that ran as a first run has them, with the estimate of each.

    Args:
        predictions: of each sampling; the last is of the one that gave the images.
    """
    last = predictions[-1]
    prompts = 1 if last.request is None or last.request.cfg == "off" else 2

    @cache
    def estimates(*settings: tuple[str, int]) -> Mapping[str, Phase]:
        return last.changed(**dict(settings))

    def predicted(phase: MeasuredPhase) -> Phase | None:
        found = estimates(*_settings(phase)).get(phase.name)
        if found is not None and phase.name == "text" and found.seconds is not None:
            return replace(found, seconds=found.seconds.times(1 / prompts))
        return found

    def row(name: str, phases: Sequence[MeasuredPhase], found: Sequence[Phase | None]) -> Row:
        run = ""
        if not ran.this_run:
            run = "this run" if phases[-1].prompt == ran.now else "an earlier run"
        return Row.of(name, phases, [it for it in found if it is not None], last.whole, run)

    rows = []
    if load := _load(ran):
        rows.append(row("load", load, [last.phases.get("load") if last.whole else None]))
    for name in ORDER:
        if not (phases := ran.of(name)):
            continue
        if name == "sampling":
            found = [each.phases.get(name) for each in predictions]
        else:
            found = list(map(predicted, phases))
        rows.append(row(name, phases, found))
    return rows


def _load(ran: LastRun) -> list[MeasuredPhase]:
    """Sums the waits for weights as one phase; none where nothing waited."""
    found = [
        phase
        for phase in ran.phases
        if phase.name != "tables" and phase.prompt == ran.last.prompt
        if phase.waited_seconds is not None
    ]
    if not found:
        return []
    load = MeasuredPhase("load", None, found[0].device, prompt=ran.last.prompt)
    load.seconds = sum(phase.waited_seconds for phase in found)
    load.card_bytes = _most(found, "loaded_bytes")
    return [load]


def _settings(phase: MeasuredPhase) -> tuple[tuple[str, int], ...]:
    """Names the fields of a `RunRequest` in which a phase can differ from the sampling."""
    asked: dict[str, int] = {}
    if phase.name == "decode" and "size" in phase.asked:
        images, *_, height, width = phase.asked["size"]
        asked = {name: whole_pixels(side) for name, side in (("width", width), ("height", height))}
        asked |= {"batch": images, "layers": 0, "tiles": phase.asked["tiles"]}
    elif phase.name == "tables":
        asked = dict.fromkeys(("steps", "computed"), phase.asked["timesteps"])
    return tuple(asked.items())


def ends(seconds: Range | None) -> list[float] | None:
    """Gives a range's ends, for JSON."""
    return None if seconds is None else [figure(seconds.low), figure(seconds.high)]


def seconds_text(value: float) -> str:
    """Formats seconds: `840 ms`."""
    return duration(Range(value, value))
