"""The report of a run as a picture, in the layout of an estimate's."""

from __future__ import annotations

from ....charts.figures import tenths, usd
from ....charts.run_chart import Bar, Figure, Limit, RunPicture
from ....planning.phases import KEPT_FREE_BYTES, Range
from .rows import ROW_NAMES, PhaseRow, seconds_text
from .words import Told, answer, compared, heading, range_text, usable_bytes

SIGNS = {"as predicted": "good", "faster than predicted": "good", "slower than predicted": "tight"}


def report_picture(told: Told) -> RunPicture:
    """What was measured, with what was predicted in brackets and as a mark on each bar."""
    peak, known = told.most()
    usable = usable_bytes(told)
    counted = bool(peak and usable)
    step = ""
    if told.step is not None:
        step = f"A step took {seconds_text(told.step)}{_brackets(told.prediction.step)}."
    return RunPicture(
        sign=SIGNS.get(compared(told), "plain"),
        answer=answer(told).partition(" (")[0].partition(", without")[0],
        basis="measured" if told.predicted is None else "measured (predicted)",
        lines=[f"{_where(told)} {step}".strip()],
        about=heading(told.ran.last.asked),
        figures=_figures(told),
        bars=[_bar(row, counted=bool(peak)) for row in told.rows if row.measured],
        limit=Limit(peak, usable, usable + KEPT_FREE_BYTES, known) if counted else None,
    )


def nothing_to_draw(text: str) -> RunPicture:
    """The picture of a report that has no run."""
    return RunPicture("plain", "No run to report", lines=[text])


def _figures(told: Told) -> list[Figure]:
    seconds, figures = told.seconds, []
    peak, _ = told.most()
    if peak and (usable := usable_bytes(told)):
        figures.append(Figure("card memory", f"{tenths(peak)} of {tenths(usable)} GiB"))
    if seconds is None:
        return figures
    figures.append(Figure("in all", seconds_text(seconds), _brackets(told.predicted).strip()))
    if cost := told.cost(Range(seconds, seconds)):
        predicted = told.cost(told.predicted)
        below = f"({usd(predicted)})" if predicted else ""
        figures.append(Figure("cost of an image", usd(cost), below))
    return figures


def _brackets(seconds: Range | None) -> str:
    return f" ({range_text(seconds)})" if seconds else ""


def _where(told: Told) -> str:
    card, device = told.prediction.card, told.ran.last.measured.device
    earlier = "" if told.ran.this_run else ", in an earlier run"
    if card is None:
        return f"On {device}{earlier}, where nothing is predicted."
    return f"On {card.card.name}{earlier}."


def _bar(row: PhaseRow, *, counted: bool) -> Bar:
    """Of memory where it is counted, else of time."""
    name, time = ROW_NAMES[row.name], row.time()
    if counted:
        count = row.most("card_bytes")
        return Bar(name, {"measured": count}, f"{tenths(count)} GiB", time, row.predicted_card())
    predicted = row.predicted_seconds()
    expected = predicted.middle if predicted else 0
    return Bar(name, {"measured": row.total_seconds() or 0.0}, "", time, expected)
