"""One phase of a run: what was predicted of it beside what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from operator import add
from typing import Any

from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ....charts.figures import duration
from ....charts.words import PHASE_NAMES
from ....planning.phases import Phase, Range, figure, gib
from ....spec import GIB, whole_pixels
from ..record.meter import Measured, harmless
from ..record.record import Record, prompt_id, recorded
from ..record.sampling import Recorder
from ..sample.optimize import why_not
from .run import Prediction, Ran, choose, predict

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
    """What a record was asked for where that can differ from the sampling's, of a `RunRequest`."""
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


# What was predicted beside what was measured, of a run of a MODEL, phase by phase.
#
# One line for each phase: ComfyUI shows text in a proportional font, in which columns do not stand.

NO_RUN = (
    "Nothing was sampled with this MODEL since it was loaded: connect the MODEL that the sampler "
    "takes."
)
UNWATCHED = (
    "Runs of this MODEL are not measured, because it is of another loader: put Optimize Qwen-Image "
    "(L40S) between it and the sampler, and connect its MODEL here."
)
FAILED = "The run could not be reported: ComfyUI's log says why."
# What sampling may take beside its steps before the report says so.
LONG_SECONDS, LONG_SHARE = 1.0, 0.25


@dataclass(frozen=True)
class RunReport:
    """The report in words, and the same for JSON."""

    text: str
    data: dict[str, Any] = field(default_factory=dict)

    def json(self) -> str:
        """One object."""
        return json.dumps(self.data)


def report_run(
    model: ModelPatcher, clip: Any = None, vae: Any = None, images: Any = None
) -> RunReport:
    """Reports the run of a MODEL that gave images, in which the others may have had a part.

    It never fails: where it cannot report, it says so.

    Args:
        model: the MODEL that sampled, or one that it is a clone of.
        clip: the CLIP that encoded the prompts; None for none.
        vae: the VAE that decoded; None for none.
        images: (batch, height, width, channels); None reports the last run.
    """
    with harmless():
        report = _report(model, clip, vae, images)
        report.json()
        return report
    return _sentence(FAILED)


def _sentence(text: str) -> RunReport:
    return RunReport(text, {"note": text})


def _report(model: ModelPatcher, clip: Any, vae: Any, images: Any) -> RunReport:
    if sentence := why_not(model):
        return _sentence(
            sentence.replace("it passes through unchanged", "its runs are not reported")
        )
    beside = [
        *recorded(getattr(clip, "cond_stage_model", None)),
        *recorded(getattr(vae, "first_stage_model", None)),
    ]
    ran = choose(recorded(model.model), beside, images, prompt_id())
    if ran is None:
        return _sentence(NO_RUN if _is_watched(model) else UNWATCHED)
    sampled = ran.of("sampling")
    predictions = _predictions(sampled, model, clip, vae, _tiles(ran))
    rows = rows_of(ran, predictions)
    notes = [*ran.notes, *_missing(clip, vae, ran), *predictions[-1].notes]
    if len(sampled) > 1:
        notes.append(
            f"{len(sampled)} samplings ran up to these images: times are of all, the step of the "
            "last"
        )
    if sentence := _beside_steps(sampled):
        notes.append(sentence)
    notes += _about_memory(ran.last)
    return RunReport(
        _text(rows, ran.last, predictions[-1], notes), _data(rows, ran, predictions[-1], notes)
    )


def _predictions(
    sampled: Sequence[Record], model: ModelPatcher, clip: Any, vae: Any, tiles: int
) -> list[Prediction]:
    """Of each sampling; equal ones are predicted once."""

    kinds = {_kind(record): record for record in sampled}
    found = {
        kind: predict(record.asked, record.path, model, clip, vae, tiles)
        for kind, record in kinds.items()
    }
    return [found[_kind(record)] for record in sampled]


def _kind(record: Record) -> str:
    """The same for runs that were asked for the same."""
    asked = {name: value for name, value in record.asked.items() if "seconds" not in name}
    return json.dumps([asked, record.path], sort_keys=True)


def _tiles(ran: Ran) -> int:
    return max((record.asked.get("tiles", 0) for record in ran.of("decode")), default=0)


def _beside_steps(sampled: Sequence[Record]) -> str:
    """Where sampling took far longer than its steps: what else it did."""
    total = steps = 0.0
    for record in sampled:
        measured, step = record.measured, record.asked["step_seconds"]
        if measured is None or measured.seconds is None or step is None:
            return ""
        total += measured.seconds
        steps += record.asked["evaluations"] * step
    if total - steps < max(LONG_SECONDS, LONG_SHARE * steps):
        return ""
    return (
        f"{seconds_text(total - steps)} of sampling were not steps: a first run brings the model "
        "to the card, and on a new machine compiles kernels and measures attention"
    )


def _is_watched(model: ModelPatcher) -> bool:
    wrappers = model.get_all_wrappers(WrappersMP.OUTER_SAMPLE)
    return any(isinstance(getattr(wrapper, "__self__", None), Recorder) for wrapper in wrappers)


def _missing(clip: Any, vae: Any, ran: Ran) -> list[str]:
    """What is not in the report of the parts that are connected, and why."""
    notes = []
    if clip is not None and not ran.of("text"):
        notes.append(
            "text encode: not in this run; prompts that ComfyUI kept, and CLIPs of other loaders, "
            "are not measured"
        )
    if vae is not None and not ran.of("decode"):
        notes.append(
            "VAE decode: not in this run, or not by VAE Decode Qwen-Image (L40S), which measures"
        )
    return notes


def _about_memory(last: Record) -> list[str]:
    measured = last.measured
    if measured.counted:
        return [
            "predictions are of a run when everything is loaded, and of load when nothing is",
            "what was measured on the card is of every program, with torch's reserve",
        ]
    if measured.device == "cpu":
        return ["memory is not counted on the processor"]
    return [f"memory and steps are measured on CUDA cards alone, and this ran on {measured.device}"]


def _text(
    rows: Sequence[PhaseRow], last: Record, prediction: Prediction, notes: Sequence[str]
) -> str:
    lines = []
    for row in rows:
        lines.append(row.line())
        if row.name == "sampling" and (step := last.asked["step_seconds"]) is not None:
            lines.append(f"a step: {seconds_text(step)} in the median")
            if prediction.step is not None:
                lines[-1] += f" (predicted {duration(prediction.step)})"
    paths = [
        f"{NAMES[row.name]}: {line}" if row.name in ("text", "tables") else line
        for row in rows
        for line in row.as_dict()["path"]
    ]
    blocks = [
        [heading(last.asked)],
        lines,
        paths,
        [line for line in (prediction.basis, *(f"note: {note}" for note in notes)) if line],
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def heading(asked: Mapping[str, Any]) -> str:
    """What was sampled, in one line."""
    batch, _, *frames, height, width = asked["latent"]
    words = [f"{8 * width}x{8 * height}", f"batch {batch}"]
    if frames and frames[0] > 1:
        words.append(f"{frames[0]} frames")
    steps = asked["steps"]
    words.append(f"{asked['evaluations'] if steps is None else steps} steps")
    if steps not in (None, asked["evaluations"]):
        words.append(f"{asked['evaluations']} evaluations")
    words.append(f"{asked['passes']} forward passes")
    if asked["cfg"] is not None:
        words.append(f"CFG {asked['cfg']:g}")
    words.append(f"{asked['text_tokens']} text tokens")
    if asked["references"]:
        words.append(f"{len(asked['references'])} references")
    return f"sampled: {', '.join(words)}"


def _data(
    rows: Sequence[PhaseRow], ran: Ran, prediction: Prediction, notes: Sequence[str]
) -> dict[str, Any]:
    step = ran.last.asked["step_seconds"]
    times = [time for row in rows if (time := row.total_seconds()) is not None]
    return {
        "this_run": ran.this_run,
        "phases": {row.name: row.as_dict() for row in rows},
        "step_ms": {
            "predicted": None if prediction.step is None else ends(prediction.step.times(1000)),
            "measured": None if step is None else figure(1000 * step),
        },
        "measured_seconds": figure(sum(times)),
        "basis": prediction.basis or None,
        "notes": list(notes),
    }
