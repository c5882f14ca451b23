"""The report of a run in words: six lines, the answer first, then what was predicted of each phase
and what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from ....charts.figures import duration, folded, table, tenths, usd
from ....planning.estimate import usd_range
from ....planning.phases import KEPT_FREE_BYTES, Range
from ....spec import GIB
from .predict import PARTS_MISSING, Prediction
from .rows import ROW_NAMES, LastRun, PhaseRow, seconds_text

# A run that takes so much more or less than predicted is called slower or faster.
LIKE_THE_PREDICTION = 0.15
FIRST_RUN = "a first run also moves the model to the card, compiles kernels and tests attention"


@dataclass(frozen=True)
class Told:
    """What a report tells: the rows, the last sampling's prediction, and sentences about both.

    Attributes:
        beyond: Seconds of sampling that were not steps; 0 where they are few.
    """

    ran: LastRun
    rows: Sequence[PhaseRow]
    prediction: Prediction
    notes: Sequence[str]
    beyond: float = 0.0

    @property
    def seconds(self) -> float | None:
        """Of all phases; None where one was not timed."""
        times = [row.total_seconds() for row in self.rows if row.measured]
        return None if None in times else sum(times)

    @property
    def predicted(self) -> Range | None:
        """The same as predicted; None where a phase has no prediction."""
        times = [row.predicted_seconds() for row in self.rows if row.measured]
        return None if None in times or not times else reduce(add, times)

    @property
    def step(self) -> float | None:
        """Seconds of the last sampling's step."""
        return self.ran.last.asked["step_seconds"]

    @property
    def images(self) -> int:
        """Of the last sampling."""
        return self.ran.last.asked["latent"][0]

    def most(self) -> tuple[int, int]:
        """(measured, predicted) bytes of the card in its fullest phase; 0 where unknown."""
        measured = max((row.most("card_bytes") for row in self.rows), default=0)
        return measured, max((row.predicted_card() for row in self.rows), default=0)

    def cost(self, seconds: Range | None) -> Range | None:
        """Of an image; None without a price."""
        card = self.prediction.card and self.prediction.card.card
        price = card and card.price()
        if not price or seconds is None:
            return None
        return usd_range(price.usd_per_hour, seconds.times(1 / self.images))


def summary_lines(told: Told) -> list[str]:
    """The answer, what ran, times, memory, cost, and what to do next."""
    return [
        answer(told) + ".",
        heading(told.ran.last.asked),
        f"Time: {_times(told)}.",
        f"Memory: {_memory(told)}.",
        f"Cost: {_cost(told)}.",
        f"Next: {_next(told)}.",
    ]


def answer(told: Told) -> str:
    """How long it took, and whether that was predicted."""
    if told.seconds is None:
        return f"Not timed on {told.ran.last.measured.device}"
    took = f"{'' if told.ran.this_run else 'An earlier run '}took {seconds_text(told.seconds)}"
    took = took[0].upper() + took[1:]
    if told.predicted is None:
        return f"{took}, without a prediction"
    return f"{took}, {compared(told)} ({duration(told.predicted)})"


def compared(told: Told) -> str:
    """How the time of a run is against its prediction; empty without either."""
    if told.seconds is None or told.predicted is None:
        return ""
    low, high = told.predicted
    if told.seconds > high * (1 + LIKE_THE_PREDICTION):
        return "slower than predicted"
    if told.seconds < low * (1 - LIKE_THE_PREDICTION):
        return "faster than predicted"
    return "as predicted"


def _times(told: Told) -> str:
    each = [f"{ROW_NAMES[row.name]} {row.time()}" for row in told.rows]
    if told.step is not None:
        each.append(f"a step {seconds_text(told.step)}")
    return ", ".join(each)


def _memory(told: Told) -> str:
    measured, predicted = told.most()
    if not measured:
        return f"not counted on {told.ran.last.measured.device}, only on CUDA cards"
    of = f" of {tenths(usable_bytes(told))}" if usable_bytes(told) else ""
    known = f", {tenths(predicted)} predicted" if predicted else ""
    return f"{tenths(measured)}{of} GiB of the card at the peak{known}"


def usable_bytes(told: Told) -> int:
    """Of the card, less what ComfyUI keeps free; 0 where the card is not known."""
    card = told.prediction.card
    return max(0, card.card.memory_bytes - KEPT_FREE_BYTES) if card else 0


def _cost(told: Told) -> str:
    cost = told.seconds and told.cost(Range(told.seconds, told.seconds))
    return f"{usd(cost)} an image" if cost else "unknown, without a price for this device"


def _next(told: Told) -> str:
    if not told.ran.this_run:
        return "change the seed and run again for new figures"
    if told.beyond:
        return f"run again, because {FIRST_RUN}"
    notes = told.prediction.notes
    if any("fused blocks" in note for note in notes):
        return "put Optimize Qwen-Image before the sampler, because fused blocks did not run"
    if PARTS_MISSING in notes:
        return PARTS_MISSING[0].lower() + PARTS_MISSING[1:-1]
    return "nothing to change; the json output holds these figures for programs"


def report_text(told: Told) -> str:
    """The six lines, then all figures, the path of each part, and notes."""
    paths = [
        f"{ROW_NAMES[row.name]}: {line}" if row.name in ("text", "tables") else line
        for row in told.rows
        for line in row.as_dict()["path"]
    ]
    basis = [f"Times: {told.prediction.basis}"] if told.prediction.basis else []
    blocks = [
        summary_lines(told),
        _time_table(told),
        _memory_table(told),
        [line for path in paths for line in folded(path, "")],
        [
            line
            for text in (*basis, *(f"Note: {note}" for note in told.notes))
            for line in folded(text, "")
        ],
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _time_table(told: Told) -> list[str]:
    rows = [["time", "measured", "predicted"]]
    for row in told.rows:
        rows.append(
            [row.title, row.time(), range_text(row.predicted_seconds() if row.measured else None)]
        )
        if row.name == "sampling" and told.step is not None:
            rows.append(["  a step", seconds_text(told.step), range_text(told.prediction.step)])
    total = "not timed" if told.seconds is None else seconds_text(told.seconds)
    rows.append(["total", total, range_text(told.predicted)])
    if not any(row[2] for row in rows[1:]):
        rows = [row[:2] for row in rows]
    return table(rows, right=(1, 2))


def _memory_table(told: Told) -> list[str]:
    rows = [["GiB", "card", "predicted", "working", "predicted"]]
    for row in told.rows:
        if row.most("card_bytes"):
            pairs = (
                (row.most("card_bytes"), row.predicted_card()),
                (row.most("working_bytes"), row.predicted_working()),
            )
            rows.append([row.title, *(_gib(count) for pair in pairs for count in pair)])
    return table(rows, right=range(1, 5)) if len(rows) > 1 else []


def range_text(seconds: Range | None) -> str:
    """Empty for None."""
    return "" if seconds is None else duration(seconds)


def _gib(count: int) -> str:
    return f"{count / GIB:.2f}" if count else ""


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
    return f"Sampled: {', '.join(words)}"
