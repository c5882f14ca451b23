"""The report of a run as a picture, in the layout of an estimate's."""

from __future__ import annotations

from ....charts.figures import tenths, usd
from ....charts.run_chart import Bar, Figure, Limit, RunPicture
from ....planning.phases import Range
from .rows import ROW_NAMES, Row, seconds_text
from .words import RunFacts, answer, compared, heading, range_text

SIGNS = {"as predicted": "good", "faster than predicted": "good", "slower than predicted": "tight"}


def report_picture(facts: RunFacts) -> RunPicture:
    """Draws what was measured, with what was predicted in brackets and as a mark on each bar."""
    peak, known = facts.most()
    limit = None
    if peak and facts.usable:
        limit = Limit(peak, facts.usable, facts.prediction.card.card.memory_bytes, known)
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


def nothing_to_draw(text: str) -> RunPicture:
    """Draws a sentence where there is no run."""
    return RunPicture("plain", "No run to report", lines=[text])


def _figures(facts: RunFacts) -> list[Figure]:
    seconds, figures = facts.seconds, []
    peak, _ = facts.most()
    if peak and facts.usable:
        figures.append(Figure("card memory", f"{tenths(peak)} of {tenths(facts.usable)} GiB"))
    if seconds is None:
        return figures
    figures.append(Figure("in all", seconds_text(seconds), _brackets(facts.predicted).strip()))
    if cost := facts.cost(Range(seconds, seconds)):
        predicted = facts.cost(facts.predicted)
        below = f"({usd(predicted)})" if predicted else ""
        figures.append(Figure("cost of an image", usd(cost), below))
    return figures


def _brackets(seconds: Range | None) -> str:
    return f" ({range_text(seconds)})" if seconds else ""


def _where(facts: RunFacts) -> str:
    card, device = facts.prediction.card, facts.ran.last.device
    earlier = "" if facts.ran.this_run else ", in an earlier run"
    if card is None:
        return f"On {device}{earlier}, where nothing is predicted."
    return f"On {card.card.name}{earlier}."


def _bar(row: Row, *, counted: bool) -> Bar:
    name, time = ROW_NAMES[row.name], row.time()
    if counted:
        count, expected = row.card
        return Bar(name, {"measured": count}, f"{tenths(count)} GiB", time, expected)
    expected = row.predicted_seconds.middle if row.predicted_seconds else 0
    return Bar(name, {"measured": row.seconds or 0.0}, "", time, expected)
