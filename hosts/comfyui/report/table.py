"""The report after a run: predicted and measured, a line for each phase.

ComfyUI shows text in a proportional font, so there are lines and no columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ....charts.figures import duration
from ....planning.phases import figure
from ..record.meter import harmless
from ..record.record import Record
from ..record.sampling import Recorder
from ..sample.optimize import unsupported_model
from .predict import Prediction, predict
from .rows import ROW_NAMES, LastRun, PhaseRow, ends, last_run, rows_of, seconds_text

NO_RUN = (
    "Nothing was sampled with this MODEL since it was loaded: connect the MODEL that the sampler "
    "takes."
)
EARLIER = (
    "Nothing was sampled with this MODEL in this run, because ComfyUI kept what an earlier one "
    "gave: these are the figures of the last run of this MODEL"
)
UNWATCHED = (
    "Runs of this MODEL are not measured, because it is of another loader: put Optimize Qwen-Image "
    "between it and the sampler, and connect its MODEL here."
)
FAILED = "The run could not be reported: ComfyUI's log says why."
# What sampling may take besides its steps before the report says so.
LONG_SECONDS, LONG_SHARE = 1.0, 0.25


@dataclass(frozen=True)
class RunReport:
    """The report in words, and the same for JSON."""

    text: str
    data: dict[str, Any] = field(default_factory=dict)

    def json(self) -> str:
        """One object."""
        return json.dumps(self.data)


def report_run(model: ModelPatcher, clip: Any = None, vae: Any = None) -> RunReport:
    """Reports the last run of a MODEL with what CLIP and VAE did for it. Never raises.

    Args:
        model: the MODEL that sampled, or one that it is a clone of.
        clip: the CLIP that encoded the prompts.
        vae: the VAE that decoded.
    """
    with harmless():
        report = _report(model, clip, vae)
        report.json()
        return report
    return _sentence(FAILED)


def _sentence(text: str) -> RunReport:
    return RunReport(text, {"note": text})


def _report(model: ModelPatcher, clip: Any, vae: Any) -> RunReport:
    if fallback := unsupported_model(model):
        return _sentence(
            fallback.reason.replace("it passes through unchanged", "its runs are not reported")
        )
    ran = last_run(model, clip, vae)
    if ran is None:
        return _sentence(NO_RUN if _is_watched(model) else UNWATCHED)
    sampled = ran.of("sampling")
    predictions = _predictions(sampled, model, clip, vae, _tiles(ran))
    rows = rows_of(ran, predictions)
    notes = [] if ran.this_run else [EARLIER]
    notes += [*_missing(clip, vae, ran), *predictions[-1].notes]
    if len(sampled) > 1:
        notes.append(f"{len(sampled)} samplings ran: times are of all, the step is of the last")
    if sentence := _beyond_steps(sampled):
        notes.append(sentence)
    notes += _about_memory(ran.last)
    return RunReport(
        _text(rows, ran.last, predictions[-1], notes), _data(rows, ran, predictions[-1], notes)
    )


def _predictions(
    sampled: Sequence[Record], model: ModelPatcher, clip: Any, vae: Any, tiles: int
) -> list[Prediction]:
    """Predictions for each sampling; equal ones are computed once."""

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


def _tiles(ran: LastRun) -> int:
    return max((record.asked.get("tiles", 0) for record in ran.of("decode")), default=0)


def _beyond_steps(sampled: Sequence[Record]) -> str:
    """A sentence where sampling took far longer than its steps."""
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


def _missing(clip: Any, vae: Any, ran: LastRun) -> list[str]:
    """Why a connected part has no line."""
    notes = []
    if clip is not None and not ran.of("text"):
        notes.append(
            "text encode: not in this run; prompts that ComfyUI kept, and CLIPs of other loaders, "
            "are not measured"
        )
    if vae is not None and not ran.of("decode"):
        notes.append("VAE decode: not in this run, or not by VAE Decode Qwen-Image, which measures")
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
        f"{ROW_NAMES[row.name]}: {line}" if row.name in ("text", "tables") else line
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
    rows: Sequence[PhaseRow], ran: LastRun, prediction: Prediction, notes: Sequence[str]
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
