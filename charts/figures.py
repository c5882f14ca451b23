"""Writes figures as people read them: units, ranges, columns and lines."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence

from ..planning.phases import Range
from ..spec.formats import GIB

LINE = 100  # characters


def duration(seconds: Range) -> str:
    """Writes `12 ms`, `280 to 470 ms`, `1.2 to 1.9 s`, `3.1 min`, in the larger end's unit."""
    for unit, name in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        # 90 seconds and minutes are read more easily than 1.5 of the next unit.
        if seconds.high >= (unit if unit == 1 else 1.5 * unit):
            return between(seconds.times(1 / unit), significant, name)
    return between(seconds.times(1000), significant, "ms")


def usd(cost: Range) -> str:
    """Writes `$0.0028 to 0.0047`."""
    return f"${between(cost, dollars)}"


def between(values: Range, form: Callable[[float], str], unit: str = "") -> str:
    """Writes one figure where both ends read the same, else both."""
    low, high = form(values.low), form(values.high)
    return f"{low if low == high else f'{low} to {high}'} {unit}".strip()


def significant(value: float) -> str:
    """Writes two digits below 10, else whole: `0.84`, `8.4`, `84`, `840`."""
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def dollars(value: float) -> str:
    """Writes cents from one dollar on; below it two digits that say something: `0.0028`."""
    if value >= 1 or value == 0:
        return f"{value:,.2f}"
    places = 2
    while places < 9 and value * 10**places < 10:
        places += 1
    return f"{value:.{places}f}"


def many(count: int, thing: str) -> str:
    """Writes `1 layer`, `3 layers`."""
    return f"{count} {thing}{'s' * (count != 1)}"


def tenths(count: float) -> str:
    """Writes bytes as GiB with one decimal and without the unit: `43.0`."""
    return f"{count / GIB:.1f}"


def tenths_between(low: float, high: float) -> str:
    """Subtracts two figures as they are printed, so that a reader's subtraction agrees."""
    return f"{abs(float(tenths(high)) - float(tenths(low))):.1f}"


def adding_up(counts: Sequence[float]) -> list[str]:
    """Rounds GiB of parts up or down so that they add up to `tenths` of their sum."""
    exact = [10 * count / GIB for count in counts]
    whole = [int(count) for count in exact]
    missing = round(10 * float(tenths(sum(counts)))) - sum(whole)
    by_rest = sorted(range(len(exact)), key=lambda place: whole[place] - exact[place])
    for place in by_rest[:missing]:
        whole[place] += 1
    return [f"{count / 10:.1f}" for count in whole]


def file_size(count: int) -> str:
    """Writes binary units, small ones too: `38.1 GiB`, `4.5 KiB`, `512 B`."""
    for unit, suffix in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {suffix}"
    return f"{count} B"


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Writes lines of columns as wide as their longest entry; those in `right` end flush."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            entry.rjust(width) if column in right else entry.ljust(width)
            for column, (entry, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def folded(texts: Iterable[str], indent: str = "") -> list[str]:
    """Folds texts into lines that a terminal shows whole."""
    fold = textwrap.TextWrapper(LINE, indent, f"{indent}  ", break_on_hyphens=False)
    return [line for text in texts for line in fold.wrap(text)]
