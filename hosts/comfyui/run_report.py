"""What was predicted beside what was measured, of the last run of a MODEL, phase by phase."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ...charts.words import duration, table
from ...planning.estimate import figure
from .patch import why_not
from .run_record import Record, Records, prompt_id
from .run_rows import NAMES, NONE, ORDER, PhaseRow, ends, row_of, seconds_text
from .run_wish import Prediction, predict
from .sampling_record import Recorder

HEAD = (
    "",
    *("time: predicted", "measured"),
    *("card, GiB: predicted", "measured"),
    *("beside weights: predicted", "measured"),
)
NO_RUN = (
    "Nothing was sampled with this MODEL since it was loaded: connect the MODEL that the sampler "
    "takes, and the images that come of it, so that the report comes after the run."
)
UNWATCHED = (
    "Runs of this MODEL are not measured, because it is of another loader: put Optimize Qwen-Image "
    "(L40S) between it and the sampler, and connect its MODEL here."
)
# What sampling may take beside its steps before the report says so.
LONG_SECONDS, LONG_SHARE = 1.0, 0.25
EARLIER = (
    "Nothing was sampled with this MODEL in this run, because ComfyUI kept what an earlier one "
    "gave: these are the figures of that one."
)


@dataclass(frozen=True)
class RunReport:
    """The report in words, and the same for JSON."""

    text: str
    data: dict[str, Any] = field(default_factory=dict)

    def json(self) -> str:
        """One object."""
        return json.dumps(self.data)


def report_run(model: ModelPatcher, clip: Any = None, vae: Any = None) -> RunReport:
    """Reports the last run of a MODEL, in which the others may have had a part.

    Args:
        model: the MODEL that sampled, or one that it is a clone of.
        clip: the CLIP that encoded the prompts; None for none.
        vae: the VAE that decoded; None for none.
    """
    if sentence := why_not(model):
        sentence = sentence.replace("it passes through unchanged", "its runs are not reported")
        return RunReport(sentence, {"note": sentence})
    ran = Records.of(model.model).last
    sampled = [record for record in ran if record.phase == "sampling"]
    if not sampled:
        sentence = NO_RUN if _is_watched(model) else UNWATCHED
        return RunReport(sentence, {"note": sentence})
    last = sampled[-1]
    beside = [
        record
        for part in (clip, vae)
        if part is not None
        for record in Records.of(part).last
        if record.prompt == last.prompt
    ]
    records = [*ran, *beside]
    decoded = [record.asked.get("tiles", 0) for record in beside if record.phase == "decode"]
    prediction = predict(last.asked, last.path, model, clip, vae, max(decoded, default=0))
    rows = [row for name in ORDER if (row := row_of(name, records, prediction)).records]
    notes = [*_missing(clip, vae, records), *prediction.notes]
    if last.prompt != prompt_id():
        notes.insert(0, EARLIER)
    if len(sampled) > 1:
        notes.append(
            f"{len(sampled)} samplings ran: the prediction is of the last, and the times are of all"
        )
    if sentence := _beside_steps(sampled):
        notes.append(sentence)
    if last.measured.counted:
        notes.append("predictions are of a run when everything is loaded")
        notes.append("what was measured on the card is of every program, with torch's reserve")
    else:
        notes.append("memory is not counted on the processor")
    return RunReport(_text(rows, last, prediction, notes), _data(rows, last, prediction, notes))


def _beside_steps(sampled: Sequence[Record]) -> str:
    """Where sampling took far longer than its steps: what else it did."""
    total = steps = 0.0
    for record in sampled:
        if record.measured is None or record.asked["step_seconds"] is None:
            return ""
        total += record.measured.seconds
        steps += record.asked["evaluations"] * record.asked["step_seconds"]
    if total - steps < max(LONG_SECONDS, LONG_SHARE * steps):
        return ""
    return (
        f"{seconds_text(total - steps)} of sampling were not steps: a first run brings the model "
        "to the card, and on a new machine compiles kernels and measures attention"
    )


def _is_watched(model: ModelPatcher) -> bool:
    wrappers = model.get_all_wrappers(WrappersMP.OUTER_SAMPLE)
    return any(isinstance(getattr(wrapper, "__self__", None), Recorder) for wrapper in wrappers)


def _missing(clip: Any, vae: Any, records: Sequence[Record]) -> list[str]:
    """What is not in the report of the parts that are connected, and why."""
    known = {record.phase for record in records}
    notes = []
    if clip is not None and "text" not in known:
        notes.append(
            "text encode: not in this run; prompts that ComfyUI kept, and CLIPs of other loaders, "
            "are not measured"
        )
    if vae is not None and "decode" not in known:
        notes.append(
            "VAE decode: not in this run, or not by VAE Decode Qwen-Image (L40S), which measures"
        )
    return notes


def _text(
    rows: Sequence[PhaseRow], last: Record, prediction: Prediction, notes: Sequence[str]
) -> str:
    cells = [list(HEAD)]
    for row in rows:
        cells.append(row.cells())
        if row.name == "sampling":
            cells.append(_step_cells(last.asked, prediction))
    paths = [
        f"{NAMES[row.name]}: {line}" if row.name in ("text", "tables") else line
        for row in rows
        for line in row.as_dict()["path"]
    ]
    blocks = [
        [heading(last.asked)],
        table(cells, right=range(1, len(HEAD))),
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


def _step_cells(asked: Mapping[str, Any], prediction: Prediction) -> list[str]:
    predicted, measured = prediction.step, asked["step_seconds"]
    return [
        "  a step, median",
        NONE if predicted is None else duration(predicted),
        NONE if measured is None else seconds_text(measured),
        *[""] * 4,
    ]


def _data(
    rows: Sequence[PhaseRow], last: Record, prediction: Prediction, notes: Sequence[str]
) -> dict[str, Any]:
    measured = last.asked["step_seconds"]
    total = sum(row.total_seconds() for row in rows)
    return {
        "this_run": last.prompt == prompt_id(),
        "phases": {row.name: row.as_dict() for row in rows},
        "step_ms": {
            "predicted": None if prediction.step is None else ends(prediction.step.times(1000)),
            "measured": None if measured is None else figure(1000 * measured),
        },
        "measured_seconds": figure(total),
        "basis": prediction.basis or None,
        "notes": list(notes),
    }
