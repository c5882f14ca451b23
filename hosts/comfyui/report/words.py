"""The report of a run in words: six lines, the answer first, then what was predicted of each phase
and what was measured; and as a picture, in the layout of an estimate's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from ....charts.figures import duration, folded, table, tenths, usd
from ....charts.run_chart import Bar, Figure, Limit, RunPicture
from ....charts.words import usable_bytes
from ....planning.estimate import usd_range
from ....planning.phases import Range
from ....spec.families import pixels_of
from ....spec.formats import GIB
from .predict import PARTS_MISSING, Prediction
from .rows import ROW_NAMES, LastRun, Row, seconds_text

# A run that takes so much more or less than predicted is called slower or faster.
LIKE_THE_PREDICTION = 0.15
SIGNS = {"as predicted": "good", "faster than predicted": "good", "slower than predicted": "tight"}
FIRST_RUN = "a first run also moves the model to the card, compiles kernels and tests attention"


@dataclass(frozen=True)
class RunFacts:
    """Holds a run with its prediction: the rows, the last sampling's prediction, notes on both.

    Attributes:
        beyond: Seconds of sampling that were not steps; 0 where they are few.
    """

    ran: LastRun
    rows: Sequence[Row]
    prediction: Prediction
    notes: Sequence[str]
    beyond: float = 0.0

    @property
    def seconds(self) -> float:
        """Adds up the measured times of all phases."""
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
        return usable_bytes(estimate.card) if estimate else 0

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
    """Says the answer, what ran, times, memory, cost, and what to do next."""
    return [
        answer(facts) + ".",
        heading(facts.ran.last.asked),
        f"Time: {_times(facts)}.",
        f"Memory: {_memory(facts)}.",
        f"Cost: {_cost(facts)}.",
        f"Next: {_next(facts)}.",
    ]


def answer(facts: RunFacts) -> str:
    """Says how long it took, and whether that was predicted."""
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
    notes = facts.prediction.notes
    if any("fused blocks" in note for note in notes):
        return "put Optimize Qwen-Image before the sampler, because fused blocks did not run"
    if PARTS_MISSING in notes:
        return PARTS_MISSING[0].lower() + PARTS_MISSING[1:-1]
    return "nothing to change; the json output holds these figures for programs"


def report_text(facts: RunFacts) -> str:
    """Writes the six lines, then all figures, the path of each part, and notes."""
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
    """Formats predicted seconds; empty for None."""
    return "" if seconds is None else duration(seconds)


def _gib(count: int) -> str:
    return f"{count / GIB:.2f}" if count else ""


def heading(asked: Mapping[str, Any]) -> str:
    """Names what was sampled, in one line."""
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
    """Draws what was measured, with what was predicted in brackets and as a mark on each bar."""
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
