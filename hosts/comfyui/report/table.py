"""The report after a run: its words, its picture, and the same for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from comfy.model_patcher import ModelPatcher

from ....charts.run_chart import RunPicture
from ....planning.phases import figure
from ..record.phase import MeasuredPhase, harmless, measured
from ..record.sampling import is_recorded
from ..sample.optimize import unsupported_model
from .predict import predict
from .rows import LastRun, ends, last_run, rows_of, seconds_text
from .words import FIRST_RUN, RunFacts, report_picture, report_text, summary_lines

NO_RUN = (
    "Nothing was sampled with this MODEL since it was loaded: connect the MODEL that goes into the "
    "sampler."
)
NOT_MEASURED = (
    "This MODEL's last run was not measured, because this node was not there, or as ComfyUI's log "
    "says: change the seed and run again."
)
EARLIER = (
    "Nothing was sampled in this run, because ComfyUI reused an earlier result. These figures are "
    "from its last run."
)
UNWATCHED = (
    "Runs of this MODEL are not measured, because another pack loaded it: put Optimize Qwen-Image "
    "between it and the sampler, and connect its MODEL here."
)
FAILED = "The run could not be reported: ComfyUI's log says why."
# What sampling may take besides its steps before the report says so.
LONG_SECONDS, LONG_SHARE = 1.0, 0.25


@dataclass(frozen=True)
class RunReport:
    """Holds the report in words, its first lines, its picture, and the same for JSON."""

    text: str
    summary: str
    picture: RunPicture
    data: dict[str, Any] = field(default_factory=dict)

    def json(self) -> str:
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
    picture = RunPicture("plain", "No run to report", lines=[text])
    return RunReport(text, text, picture, {"note": text})


def _report(model: ModelPatcher, clip: Any, vae: Any) -> RunReport:
    if fallback := unsupported_model(model):
        return _sentence(
            fallback.reason.replace("it passes through unchanged", "its runs are not reported")
        )
    ran = last_run(model, clip, vae)
    if ran is None:
        if measured(model) is not None:
            return _sentence(NOT_MEASURED)
        return _sentence(NO_RUN if is_recorded(model) else UNWATCHED)
    sampled = ran.of("sampling")
    tiles = max((decode.asked.get("tiles", 0) for decode in ran.of("decode")), default=0)
    predictions = [predict(run.asked, run.path, model, clip, vae, tiles) for run in sampled]
    rows = rows_of(ran, predictions)
    notes = [] if ran.this_run else [EARLIER]
    notes += [*_missing(clip, vae, ran), *predictions[-1].notes]
    if len(sampled) > 1:
        notes.append(
            f"{len(sampled)} samplings ran: times cover all of them, the step is from the last."
        )
    beyond = _beyond_steps(sampled)
    if beyond:
        notes.append(f"{seconds_text(beyond)} of sampling were not steps: {FIRST_RUN}.")
    notes += _about_memory(ran.last)
    facts = RunFacts(ran, rows, predictions[-1], notes, beyond)
    return RunReport(
        report_text(facts), "\n".join(summary_lines(facts)), report_picture(facts), _data(facts)
    )


def _beyond_steps(sampled: Sequence[MeasuredPhase]) -> float:
    """Counts the seconds that were no steps, where they are many; else 0."""
    total = steps = 0.0
    for run in sampled:
        step = run.asked["step_seconds"]
        if step is None:
            return 0.0
        total += run.seconds
        steps += run.asked["evaluations"] * step
    return total - steps if total - steps >= max(LONG_SECONDS, LONG_SHARE * steps) else 0.0


def _missing(clip: Any, vae: Any, ran: LastRun) -> list[str]:
    """Says why a connected part has no line."""
    notes = []
    if clip is not None and not ran.of("text"):
        notes.append(
            "No text encode in this run: ComfyUI reused the prompts, or another pack loaded the "
            "CLIP, which is not measured."
        )
    if vae is not None and not ran.of("decode"):
        notes.append(
            "No VAE decode was measured in this run: only VAE Decode Qwen-Image is measured."
        )
    return notes


def _about_memory(last: MeasuredPhase) -> list[str]:
    if last.counted:
        return [
            "Predictions assume that all models are loaded; the one for load, that none is.",
            "Card memory is what the driver reports: all programs, and torch's reserve.",
        ]
    if last.device.type == "cpu":
        return ["Memory is not measured on the CPU."]
    return [f"Memory and steps are measured on CUDA cards only; this ran on {last.device}."]


def _data(facts: RunFacts) -> dict[str, Any]:
    step, prediction = facts.step, facts.prediction
    estimate = prediction.estimate
    return {
        "this_run": facts.ran.this_run,
        "phases": {row.name: row.as_dict() for row in facts.rows},
        "step_ms": {
            "predicted": None if prediction.step is None else ends(prediction.step.times(1000)),
            "measured": None if step is None else figure(1000 * step),
        },
        "step_bound_by": estimate and estimate.bound,
        "measured_seconds": figure(facts.seconds),
        "predicted_seconds": ends(facts.predicted),
        "basis": estimate and estimate.basis.text,
        "notes": list(facts.notes),
    }
