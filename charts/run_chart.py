"""A run as a picture that answers in three seconds: whether it fits, how long, how much.

What is predicted and what was measured have the same layout: the answer, its figures, and a bar for
each phase. A node shows the picture a third as wide as it is, so the type is large and there is
little of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .canvas import (
    BAD,
    DARK,
    FAINT,
    GOOD,
    GRID,
    INK,
    PAPER,
    WARN,
    WIDTH,
    Page,
    dashed,
    text_width,
    wrapped,
)

if TYPE_CHECKING:
    from PIL import Image

# Font sizes: 420 pixels of a node show them as 11 to 28.
ANSWER, FIGURE, LABEL, LEAST = 88, 60, 40, 36
SIDE = 48  # pixels of margin
VALUES, SECOND = 350, 830  # where the figures' two columns begin
NAMES, TIMES, SIZES = 246, 300, 104  # pixels at both ends of the phases' bars
BAR, ROW = 46, 66
SIGNS = {"good": GOOD, "tight": WARN, "bad": BAD, "plain": INK}
COLOURS = {
    "transformer": "#56b4e9",
    "text encoder": "#d58fb8",
    "working memory": "#f0e442",
    "other": "#9aa5b1",
    "beyond the card": BAD,
    "measured": "#56b4e9",
}


@dataclass(frozen=True)
class Figure:
    """A line of figures; the second is what was predicted where the first was measured."""

    label: str
    value: str
    second: str = ""


@dataclass(frozen=True)
class Bar:
    """One phase.

    Attributes:
        parts: {a name of `COLOURS`: how much}, bytes, or seconds where memory is not counted.
        value: The same as words; empty where they are all seconds.
        time: How long it lasted or is to last.
        expected: What was predicted of the sum; 0 where nothing was.
    """

    name: str
    parts: Mapping[str, float]
    value: str = ""
    time: str = ""
    expected: float = 0


@dataclass(frozen=True)
class Limit:
    """The card's memory: the peak of a run, what a run may use, and what there is."""

    peak: int
    usable: int
    capacity: int


@dataclass(frozen=True)
class RunPicture:
    """What a picture of a run shows, from top to bottom.

    Attributes:
        sign: One of `SIGNS`.
        answer: One or a few words.
        lines: Sentences below it.
        about: What ran or is to run, and other fainter lines.
        heads: What the columns of figures hold, such as "predicted".
        limit: None where memory is not counted.
    """

    sign: str
    answer: str
    lines: Sequence[str]
    about: Sequence[str]
    heads: Sequence[str]
    figures: Sequence[Figure]
    bars: Sequence[Bar]
    limit: Limit | None = None


def run_chart(shown: RunPicture) -> Image.Image:
    """Draws it: an RGB picture, 1280 pixels wide and as high as it takes."""
    page = Page(3200)
    page.y = SIDE
    _answer(page, shown)
    if shown.figures:
        _rule(page)
        _figures(page, shown)
    if shown.bars:
        _rule(page)
        _phases(page, shown)
    return page.finish()


def _answer(page: Page, shown: RunPicture) -> None:
    colour, indent = SIGNS[shown.sign], 0
    if shown.sign != "plain":
        indent = ANSWER + 30
        _sign(page, shown.sign, (SIDE, page.y + 4, SIDE + ANSWER, page.y + 4 + ANSWER))
    size = fitting(shown.answer, WIDTH - 2 * SIDE - indent, ANSWER)
    page.text((SIDE + indent, page.y + 4 + ANSWER / 2), shown.answer, size=size, fill=colour)
    page.y += ANSWER + 28
    for lines, size, ink in ((shown.lines, LABEL, INK), (shown.about, LEAST, FAINT)):
        for line in filter(None, lines):
            _lines(page, line, size, ink)


def _lines(page: Page, text: str, size: int, ink: str) -> None:
    for line in wrapped(text, size, WIDTH - 2 * SIDE):
        page.text((SIDE, page.y + size * 0.65), line, size=size, fill=ink)
        page.y += round(size * 1.3)


def _sign(page: Page, sign: str, box: tuple[float, float, float, float]) -> None:
    """A tick, an exclamation mark or a cross, for those who do not see the colour."""
    left, top, right, _ = box
    size, draw = right - left, page.draw

    def at(*shares: float) -> list[tuple[float, float]]:
        points = zip(shares[::2], shares[1::2], strict=True)
        return [(left + x * size, top + y * size) for x, y in points]

    if sign == "tight":
        draw.polygon(at(0.5, 0.02, 1, 0.95, 0, 0.95), fill=WARN)
        draw.line(at(0.5, 0.35, 0.5, 0.65), fill=DARK, width=11)
        (x, y), *_ = at(0.5, 0.8)
        draw.ellipse((x - 7, y - 7, x + 7, y + 7), fill=DARK)
        return
    draw.ellipse(box, fill=SIGNS[sign])
    if sign == "good":
        draw.line(at(0.25, 0.52, 0.43, 0.7, 0.76, 0.32), fill=DARK, width=12, joint="curve")
    else:
        for line in ((0.3, 0.3, 0.7, 0.7), (0.7, 0.3, 0.3, 0.7)):
            draw.line(at(*line), fill=DARK, width=12)


def _rule(page: Page) -> None:
    page.y += 20
    page.draw.line((SIDE, page.y, WIDTH - SIDE, page.y), fill=GRID, width=3)
    page.y += 20


def _figures(page: Page, shown: RunPicture) -> None:
    """A line of large figures each, under the heads of their columns."""
    for x, head in zip((VALUES, SECOND), shown.heads, strict=False):
        page.text((x, page.y + LEAST * 0.6), head, size=LEAST, fill=FAINT)
    page.y += round(LEAST * 1.4)
    two = any(figure.second for figure in shown.figures)
    for place, figure in enumerate(shown.figures):
        middle = page.y + FIGURE * 0.7
        page.text((SIDE, middle), figure.label, size=LABEL, fill=FAINT)
        room = (SECOND - 24 if two else WIDTH - SIDE) - VALUES
        page.text((VALUES, middle), figure.value, size=fitting(figure.value, room, FIGURE))
        if figure.second:
            size = fitting(figure.second, WIDTH - SIDE - SECOND, LABEL + 6)
            page.text((SECOND, middle), figure.second, size=size, fill=FAINT)
        page.y += round(FIGURE * 1.4)
        if place == 0 and shown.limit is not None:
            _peak(page, shown)


def _peak(page: Page, shown: RunPicture) -> None:
    """The peak against the card: what a run may use ends at a line."""
    limit, top = shown.limit, page.y + 10
    scale = (WIDTH - 2 * SIDE) / max(limit.capacity, limit.peak)
    bottom, line = top + BAR, SIDE + limit.usable * scale
    page.draw.rectangle((SIDE, top, SIDE + limit.capacity * scale, bottom), fill=GRID)
    colour = SIGNS["good" if shown.sign == "plain" else shown.sign]
    page.draw.rectangle((SIDE, top, max(SIDE + 4, SIDE + limit.peak * scale), bottom), fill=colour)
    page.draw.rectangle((line - 6, top - 10, line + 6, bottom + 10), fill=PAPER)
    page.draw.rectangle((line - 3, top - 10, line + 3, bottom + 10), fill=INK)
    page.y = bottom + 26


def _phases(page: Page, shown: RunPicture) -> None:
    """Bars, with the limit of the card across all of them."""
    left, sized = SIDE + NAMES, any(bar.value for bar in shown.bars)
    right = WIDTH - SIDE - TIMES - (SIZES if sized else 0) - 16
    longest = max(
        [bar.expected for bar in shown.bars] + [sum(bar.parts.values()) for bar in shown.bars]
    )
    if shown.limit is not None:
        longest = max(longest, shown.limit.usable)
    scale = (right - left) / (longest or 1)
    if sized:
        page.text(
            (right + 16 + SIZES, page.y + LEAST * 0.6), "GiB", size=LEAST, fill=FAINT, anchor="rm"
        )
    page.text((WIDTH - SIDE, page.y + LEAST * 0.6), "time", size=LEAST, fill=FAINT, anchor="rm")
    page.y += round(LEAST * 1.4)
    top = page.y
    for bar in shown.bars:
        middle = page.y + ROW / 2
        page.text((SIDE, middle), bar.name, size=LABEL)
        _bar(page, bar, left, middle - BAR / 2, scale)
        if bar.value:
            page.text((right + 16 + SIZES, middle), bar.value, size=LABEL, anchor="rm")
        size = fitting(bar.time, TIMES - 24, LABEL)
        page.text((WIDTH - SIDE, middle), bar.time, size=size, fill=FAINT, anchor="rm")
        page.y += ROW
    if shown.limit is not None:
        dashed(page.draw, left + shown.limit.usable * scale, top, page.y, INK, 3)
    page.y += 12
    _legend(page, shown)


def _bar(page: Page, bar: Bar, left: float, top: float, scale: float) -> None:
    x = left
    for name, count in bar.parts.items():
        if count:
            end = x + count * scale
            # A gap tells neighbours apart whose colours do not.
            page.draw.rectangle((x, top, max(x + 2, end - 3), top + BAR), fill=COLOURS[name])
            x = end
    if bar.expected:
        end = left + bar.expected * scale
        page.draw.rectangle((end - 4, top - 6, end + 4, top + BAR + 6), fill=PAPER)
        page.draw.rectangle((end - 2, top - 6, end + 2, top + BAR + 6), fill=WARN)


def _legend(page: Page, shown: RunPicture) -> None:
    used = {name for bar in shown.bars for name, count in bar.parts.items() if count}
    entries = [(name, colour) for name, colour in COLOURS.items() if name in used]
    if len(entries) == 1:
        entries = []
    if any(bar.expected for bar in shown.bars):
        entries.append(("predicted", WARN))
    if shown.limit is not None:
        entries.append(("limit", INK))
    x, height = SIDE, round(LEAST * 1.4)
    for name, colour in entries:
        width = 44 + text_width(name, LEAST) + 30
        if x > SIDE and x + width > WIDTH - SIDE:
            x, page.y = SIDE, page.y + height
        middle = page.y + height / 2
        thin = name in ("predicted", "limit")
        page.draw.rectangle(
            (x + 12 * thin, middle - 15, x + (17 if thin else 30), middle + 15), fill=colour
        )
        page.text((x + 44, middle), name, size=LEAST, fill=FAINT)
        x += width
    page.y += height if entries else 0


def fitting(text: str, room: float, most: int) -> int:
    """The largest font size of a line that has so many pixels; `LEAST` at the least."""
    return next((size for size in range(most, LEAST, -2) if text_width(text, size) <= room), LEAST)
