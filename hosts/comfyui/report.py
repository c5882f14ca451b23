"""The report after a run: six lines, the answer first, then what was predicted of each phase and
measured; a picture in the layout of an estimate's; and the same for programs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from comfy.model_patcher import ModelPatcher

from ...charts.figures import duration, folded, table, tenths, usd
from ...charts.run_chart import Bar, Figure, Limit, RunPicture
from ...families.registry import pixels_of
from ...planning.estimate import usd_range
from ...planning.phases import Range, figure
from ...spec.formats import GIB
from .contract import unsupported_model
from .record import MeasuredPhase, harmless, measured
from .report_rows import (
    PARTS_MISSING,
    ROW_NAMES,
    LastRun,
    Prediction,
    Row,
    ends,
    last_run,
    predict,
    rows_of,
    seconds_text,
)
from .sample.measure import is_recorded

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
    "Runs of this MODEL are not measured, because another pack loaded it: put Qwen-Image Optimize "
    "between it and the sampler, and connect its MODEL here."
)
FAILED = "The run could not be reported: ComfyUI's log says why."
# What sampling may take besides its steps before the report says so.
LONG_SECONDS, LONG_SHARE = 1.0, 0.25
# A run that takes so much more or less than predicted is called slower or faster.
LIKE_THE_PREDICTION = 0.15
SIGNS = {"as predicted": "good", "faster than predicted": "good", "slower than predicted": "tight"}
FIRST_RUN = "a first run also moves the model to the card, compiles kernels and tests attention"


@dataclass(frozen=True)
class RunReport:
    """Holds the report in words, its first lines, its picture, and the same for JSON."""

    text: str
    summary: str
    picture: RunPicture
    data: dict[str, Any]


def report_run(model: ModelPatcher, clip: Any = None, vae: Any = None) -> RunReport:
    """Reports the last run of a MODEL with what CLIP and VAE did for it. Never raises.

    Args:
        model: the MODEL that sampled, or one that it is a clone of.
        clip: the CLIP that encoded the prompts.
        vae: the VAE that decoded.
    """
    with harmless():
        report = _report(model, clip, vae)
        json.dumps(report.data)
        return report
    return _sentence(FAILED)


def _sentence(text: str) -> RunReport:
    picture = RunPicture("plain", "No run to report", lines=[text])
    return RunReport(text, text, picture, {"note": text})


def _report(model: ModelPatcher, clip: Any, vae: Any) -> RunReport:
    if fallback := unsupported_model(model):
        return _sentence(
            str(fallback).replace("it passes through unchanged", "its runs are not reported")
        )
    ran = last_run(model, clip, vae)
    if ran is None:
        if measured(model) is not None:
            return _sentence(NOT_MEASURED)
        return _sentence(NO_RUN if is_recorded(model) else UNWATCHED)
    sampled = ran.of("sampling")
    tiles = max((decode.asked.get("tiles", 0) for decode in ran.of("decode")), default=0)
    predictions = [predict(run, model, clip, vae, tiles) for run in sampled]
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
    notes += dict.fromkeys(it for run in sampled for it in run.asked.get("few_steps", ()))
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
    notes = []
    if clip is not None and not ran.of("text"):
        notes.append(
            "No text encode in this run: ComfyUI reused the prompts, or another pack loaded the "
            "CLIP, which is not measured."
        )
    if vae is not None and not ran.of("decode"):
        notes.append(
            "No VAE decode was measured in this run: only VAE Decode (Qwen-Image) is measured."
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


@dataclass(frozen=True)
class RunFacts:
    """Holds a run with its prediction."""

    ran: LastRun
    rows: Sequence[Row]
    prediction: Prediction  # of the last sampling
    notes: Sequence[str]
    beyond: float = 0.0  # seconds of sampling that were not steps; 0 where they are few

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in self.rows)

    @property
    def predicted(self) -> Range | None:
        """Adds up the predicted times of all phases; None where one has no prediction."""
        times = [row.predicted_seconds for row in self.rows]
        return None if None in times else reduce(add, times)

    @property
    def step(self) -> float | None:
        """Returns the seconds of the last sampling's step; None where it was not timed."""
        return self.ran.last.asked["step_seconds"]

    @property
    def usable(self) -> int:
        """Counts the bytes of the card that a run may use; 0 where nothing is predicted."""
        estimate = self.prediction.estimate
        return estimate.option.usable_bytes if estimate else 0

    def most(self) -> tuple[int, int]:
        """Finds the card's bytes in its fullest phase, measured and predicted; 0 where unknown."""
        measured, predicted = zip(*(row.card for row in self.rows), strict=True)
        return max(measured), max(predicted)

    def cost(self, seconds: Range | None) -> Range | None:
        """Counts the USD for an image; None without a price."""
        price = self.prediction.estimate and self.prediction.estimate.card.price()
        if not price or seconds is None:
            return None
        images = self.ran.last.asked["latent"][0]
        return usd_range(price.usd_per_hour, seconds.times(1 / images))


def summary_lines(facts: RunFacts) -> list[str]:
    return [
        answer(facts) + ".",
        heading(facts.ran.last.asked),
        f"Time: {_times(facts)}.",
        f"Memory: {_memory(facts)}.",
        f"Cost: {_cost(facts)}.",
        f"Next: {_next(facts)}.",
    ]


def answer(facts: RunFacts) -> str:
    took = f"{'' if facts.ran.this_run else 'An earlier run '}took {seconds_text(facts.seconds)}"
    took = took[0].upper() + took[1:]
    if facts.predicted is None:
        return f"{took}, without a prediction"
    return f"{took}, {compared(facts)} ({duration(facts.predicted)})"


def compared(facts: RunFacts) -> str:
    """Compares the time of a run with its prediction; empty without one."""
    if facts.predicted is None:
        return ""
    low, high = facts.predicted
    if facts.seconds > high * (1 + LIKE_THE_PREDICTION):
        return "slower than predicted"
    if facts.seconds < low * (1 - LIKE_THE_PREDICTION):
        return "faster than predicted"
    return "as predicted"


def _times(facts: RunFacts) -> str:
    each = [f"{ROW_NAMES[row.name]} {seconds_text(row.seconds)}" for row in facts.rows]
    if facts.step is not None:
        each.append(f"a step {seconds_text(facts.step)}")
    return ", ".join(each)


def _memory(facts: RunFacts) -> str:
    measured, predicted = facts.most()
    if not measured:
        return f"not counted on {facts.ran.last.device}, only on CUDA cards"
    of = f" of {tenths(facts.usable)}" if facts.usable else ""
    known = f", {tenths(predicted)} predicted" if predicted else ""
    return f"{tenths(measured)}{of} GiB of the card at the peak{known}"


def _cost(facts: RunFacts) -> str:
    cost = facts.cost(Range(facts.seconds, facts.seconds))
    return f"{usd(cost)} an image" if cost else "unknown, without a price for this device"


def _next(facts: RunFacts) -> str:
    if not facts.ran.this_run:
        return "change the seed and run again for new figures"
    if facts.beyond:
        return f"run again, because {FIRST_RUN}"
    if facts.prediction.estimate is not None:
        if why := facts.ran.last.not_fused:
            return why.remedy or f"see above why fused blocks did not run: {why}"
        if not facts.prediction.whole:
            return PARTS_MISSING[0].lower() + PARTS_MISSING[1:-1]
    return "nothing to change; the json output holds these figures for programs"


def report_text(facts: RunFacts) -> str:
    paths = [
        f"{ROW_NAMES[row.name]}: {line}" if row.name in ("text", "tables") else line
        for row in facts.rows
        for line in row.path()
    ]
    estimate = facts.prediction.estimate
    basis = [f"Times: {estimate.basis.text}"] if estimate else []
    blocks = [
        summary_lines(facts),
        _table(facts),
        folded(paths),
        folded([*basis, *(f"Note: {note}" for note in facts.notes)]),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _table(facts: RunFacts) -> list[str]:
    """Leaves out the columns of which nothing is known."""
    rows = [["time and GiB", "time", "predicted", "card", "predicted", "working", "predicted"]]
    for row in facts.rows:
        memory = (*row.card, *row.working) if row.card[0] else (0, 0, 0, 0)
        times = [seconds_text(row.seconds), range_text(row.predicted_seconds)]
        rows.append([row.title, *times, *map(_gib, memory)])
        if row.name == "sampling" and facts.step is not None:
            step = [seconds_text(facts.step), range_text(facts.prediction.step)]
            rows.append(["  a step", *step, *[""] * 4])
    total = [seconds_text(facts.seconds), range_text(facts.predicted)]
    rows.append(["total", *total, *[""] * 4])
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    return table(list(zip(*columns, strict=True)), right=range(1, 7))


def range_text(seconds: Range | None) -> str:
    return "" if seconds is None else duration(seconds)


def _gib(count: int) -> str:
    return f"{count / GIB:.2f}" if count else ""


def heading(asked: Mapping[str, Any]) -> str:
    batch, channels, *frames, height, width = asked["latent"]
    side = pixels_of(channels)
    words = [f"{side * width}x{side * height}", f"batch {batch}"]
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
    return f"Sampled: {', '.join(words)}"


def report_picture(facts: RunFacts) -> RunPicture:
    peak, known = facts.most()
    limit = None
    if peak and facts.usable:
        limit = Limit(peak, facts.usable, facts.prediction.estimate.card.memory_bytes, known)
    step = ""
    if facts.step is not None:
        step = f"A step took {seconds_text(facts.step)}{_brackets(facts.prediction.step)}."
    return RunPicture(
        sign=SIGNS.get(compared(facts), "plain"),
        answer=answer(facts).partition(" (")[0].partition(", without")[0],
        basis="measured" if facts.predicted is None else "measured (predicted)",
        lines=[f"{_where(facts)} {step}".strip()],
        about=heading(facts.ran.last.asked),
        figures=_figures(facts),
        bars=[_bar(row, counted=bool(peak)) for row in facts.rows],
        limit=limit,
    )


def _figures(facts: RunFacts) -> list[Figure]:
    figures = []
    peak, _ = facts.most()
    if peak and facts.usable:
        figures.append(Figure("card memory", f"{tenths(peak)} of {tenths(facts.usable)} GiB"))
    took, predicted = seconds_text(facts.seconds), _brackets(facts.predicted).strip()
    figures.append(Figure("in all", took, predicted))
    if cost := facts.cost(Range(facts.seconds, facts.seconds)):
        predicted = facts.cost(facts.predicted)
        below = f"({usd(predicted)})" if predicted else ""
        figures.append(Figure("cost of an image", usd(cost), below))
    return figures


def _brackets(seconds: Range | None) -> str:
    return f" ({range_text(seconds)})" if seconds else ""


def _where(facts: RunFacts) -> str:
    estimate = facts.prediction.estimate
    earlier = "" if facts.ran.this_run else ", in an earlier run"
    if estimate is None:
        return f"On {facts.ran.last.device}{earlier}, where nothing is predicted."
    return f"On {estimate.card.name}{earlier}."


def _bar(row: Row, *, counted: bool) -> Bar:
    name, time = ROW_NAMES[row.name], seconds_text(row.seconds)
    if counted:
        count, expected = row.card
        return Bar(name, {"measured": count}, f"{tenths(count)} GiB", time, expected)
    expected = row.predicted_seconds.middle if row.predicted_seconds else 0
    return Bar(name, {"measured": row.seconds}, "", time, expected)
