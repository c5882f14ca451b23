"""The phases of a run: what was predicted of each and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
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
    """Holds what a report is of: the MODEL's last run, with what CLIP and VAE did for it or now.

    Attributes:
        phases: In order.
        now: The id of the prompt that ComfyUI executes.
    """

    phases: tuple[MeasuredPhase, ...]
    now: str

    @property
    def last(self) -> MeasuredPhase:
        return self.of("sampling")[-1]

    @property
    def this_run(self) -> bool:
        return self.last.prompt == self.now

    def of(self, name: str) -> tuple[MeasuredPhase, ...]:
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
    """Holds a phase that ran, once or several times: measured beside predicted.

    Attributes:
        phases: Measured, in order.
        predicted: The estimate of each that ran; fewer where there is none.
        whole: Whether the estimate of the whole card holds.
        run: Which run it is of, in words; empty where all are of one.
    """

    name: str
    phases: Sequence[MeasuredPhase]
    predicted: Sequence[Phase] = ()
    whole: bool = False
    run: str = ""

    @property
    def title(self) -> str:
        """Names it: `text encode (2 times)`."""
        count = f"{len(self.phases)} times" if len(self.phases) > 1 else ""
        which = ", ".join(filter(None, (count, self.run)))
        return f"{ROW_NAMES[self.name]} ({which})" if which else ROW_NAMES[self.name]

    @property
    def seconds(self) -> float:
        """Adds up the measured times."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def predicted_seconds(self) -> Range | None:
        """Adds up the predicted times; None where one has no prediction."""
        expected = [phase.seconds for phase in self.predicted]
        known = expected and None not in expected and len(expected) == len(self.phases)
        return reduce(add, expected) if known else None

    @property
    def card(self) -> tuple[int, int]:
        """Finds the bytes of the card at the peak, measured and predicted; 0 where unknown."""
        predicted = max((phase.card_bytes for phase in self.predicted), default=0) * self.whole
        return _most(self.phases, "card_bytes"), predicted

    @property
    def working(self) -> tuple[int, int]:
        """Finds the bytes of working memory at the peak, as `card`."""
        # The tables' weights pass the card once.
        predicted = (
            phase.activations + phase.workspace + phase.weights * (self.name == "tables")
            for phase in self.predicted
        )
        return _most(self.phases, "working_bytes"), max(predicted, default=0)

    def path(self) -> list[str]:
        """Lists how it ran, each line once."""
        return list(dict.fromkeys(line for phase in self.phases for line in phase.path))

    def as_dict(self) -> dict[str, Any]:
        """Gives the figures for JSON, in seconds and GiB."""
        found = {"seconds": figure(self.seconds)}
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
    last, rows = predictions[-1], []
    for name in ("load", *ORDER):
        phases = _load(ran) if name == "load" else ran.of(name)
        if not phases:
            continue
        by = predictions if name == "sampling" else [last] * len(phases)
        found = [_predicted(phase, each) for phase, each in zip(phases, by, strict=True)]
        run = ""
        if not ran.this_run:
            run = "this run" if phases[-1].prompt == ran.now else "an earlier run"
        rows.append(Row(name, phases, [it for it in found if it is not None], last.whole, run))
    return rows


def _predicted(phase: MeasuredPhase, prediction: Prediction) -> Phase | None:
    if phase.name == "load" and not prediction.whole:
        return None
    found = prediction.phases(**_settings(phase)).get(phase.name)
    if found is None or phase.name != "text" or found.seconds is None:
        return found
    prompts = 1 if prediction.estimate.request.cfg == "off" else 2
    return replace(found, seconds=found.seconds.times(1 / prompts))


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


def _settings(phase: MeasuredPhase) -> dict[str, int]:
    """Names the fields of a `RunRequest` in which a phase can differ from the sampling."""
    if phase.name == "decode" and "size" in phase.asked:
        images, *_, height, width = phase.asked["size"]
        asked = {name: whole_pixels(side) for name, side in (("width", width), ("height", height))}
        return asked | {"batch": images, "layers": 0, "tiles": phase.asked["tiles"]}
    if phase.name == "tables":
        return dict.fromkeys(("steps", "computed"), phase.asked["timesteps"])
    return {}


def ends(seconds: Range | None) -> list[float] | None:
    return None if seconds is None else [figure(seconds.low), figure(seconds.high)]


def seconds_text(value: float) -> str:
    """Formats seconds: `840 ms`."""
    return duration(Range(value, value))
