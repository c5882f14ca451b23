"""The report of a run as a picture, in the layout of an estimate's."""

from __future__ import annotations

from ....charts.figures import tenths, usd
from ....charts.run_chart import Bar, Figure, Limit, RunPicture
from ....planning.phases import KEPT_FREE_BYTES, Range
from .rows import ROW_NAMES, PhaseRow, seconds_text
from .words import Told, answer, compared, heading, range_text, usable_bytes

SIGNS = {"as predicted": "good", "faster than predicted": "good", "slower than predicted": "tight"}


def report_picture(told: Told) -> RunPicture:
    """What was measured, and after it what was predicted."""
    figures = _figures(told)
    peak, _ = told.most()
    usable = usable_bytes(told)
    verdict = compared(told)
    heads = ["measured", "predicted"] if any(figure.second for figure in figures) else ["measured"]
    return RunPicture(
        sign=SIGNS.get(verdict, "plain"),
        answer=answer(told).partition(" (")[0].partition(", without")[0],
        lines=[_where(told)],
        about=[heading(told.ran.last.asked)],
        heads=heads,
        figures=figures,
        bars=[_bar(row, counted=bool(peak)) for row in told.rows if row.measured],
        limit=Limit(peak, usable, usable + KEPT_FREE_BYTES) if peak and usable else None,
    )


def nothing_to_draw(text: str) -> RunPicture:
    """The picture of a report that has no run."""
    return RunPicture("plain", "No run to report", [text], [], [], [], [])


def _figures(told: Told) -> list[Figure]:
    seconds, figures = told.seconds, []
    peak, known = told.most()
    if peak and (usable := usable_bytes(told)):
        text = f"{tenths(peak)} of {tenths(usable)} GiB"
        figures.append(Figure("Card memory", text, tenths(known) if known else ""))
    if seconds is not None:
        figures.append(Figure("In all", seconds_text(seconds), range_text(told.predicted)))
    if told.step is not None:
        figures.append(Figure("A step", seconds_text(told.step), range_text(told.prediction.step)))
    if seconds is not None and (cost := told.cost(Range(seconds, seconds))):
        predicted = told.cost(told.predicted)
        figures.append(Figure("An image", usd(cost), usd(predicted) if predicted else ""))
    return figures


def _where(told: Told) -> str:
    card, device = told.prediction.card, told.ran.last.measured.device
    earlier = "" if told.ran.this_run else ", in an earlier run"
    if card is None:
        return f"Measured on {device}{earlier}; nothing is predicted there."
    return f"Measured on {card.card.name}{earlier}."


def _bar(row: PhaseRow, *, counted: bool) -> Bar:
    """Of memory where it is counted, else of time."""
    name, time = ROW_NAMES[row.name], row.time()
    if counted:
        count = row.most("card_bytes")
        return Bar(name, {"measured": count}, tenths(count), time, row.predicted_card())
    predicted = row.predicted_seconds()
    expected = predicted.middle if predicted else 0
    return Bar(name, {"measured": row.total_seconds() or 0.0}, "", time, expected)
