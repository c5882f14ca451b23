"""A run as a picture: the answer, its figures, and a bar for each phase, or for each card in one of
costs. Predicted and measured runs have one layout. A node shows it a third as wide as it is, so the
type is large and there is little of it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image, ImageFont

WIDTH = 1280  # pixels
# A picture brings its own ground and a frame, so that it stands on a light page and on a dark one.
PAPER, FRAME = "#17202a", "#66768a"
INK, FAINT, GRID = "#f2f5f8", "#aeb9c5", "#364452"
DARK = "#10171f"  # text on a bright bar
GOOD, WARN, BAD = "#2bc48a", "#ffb000", "#ff7043"
# A node gives a picture 400 pixels of width and 220 of height, at which the least is still read.
ANSWER, FIGURE, LEAST = 80, 48, 34  # font sizes
LINE = 46  # pixels from one line of the least size to the next
SIDE = 40  # pixels of margin
NAMES, SIZES, TIMES = 216, 160, 270  # pixels at both ends of the bars, at the least
BAR = 32
SIGNS = {"good": GOOD, "tight": WARN, "bad": BAD, "plain": INK}
HOST_MEMORY = "in host memory"
COLOURS = {
    "transformer": "#56b4e9",
    "text encoder": "#d58fb8",
    "working memory": "#f0e442",
    "other": "#9aa5b1",
    HOST_MEMORY: WARN,
    "measured": "#56b4e9",
    "USD an image": "#56b4e9",
}


@dataclass(frozen=True)
class Figure:
    """One of the large figures, with a smaller line below it."""

    label: str
    value: str
    below: str = ""


@dataclass(frozen=True)
class Bar:
    """One phase.

    Attributes:
        parts: {a name of `COLOURS`: how much}, bytes, or seconds where memory is not counted.
        value: The same as words; empty where they are all seconds.
    """

    name: str
    parts: Mapping[str, float]
    value: str = ""
    time: str = ""


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
        basis: What all figures are, such as "predicted".
        about: What ran or is to run, in a fainter line.
        figures: At most three; of memory the first.
        limit: None where memory is not counted.
    """

    sign: str
    answer: str
    basis: str = ""
    lines: Sequence[str] = ()
    about: str = ""
    figures: Sequence[Figure] = ()
    bars: Sequence[Bar] = ()
    limit: Limit | None = None


def run_chart(shown: RunPicture) -> Image.Image:
    """Draws it: an RGB picture, 1280 pixels wide and as high as it takes."""
    page = Page()
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
        indent = ANSWER + 24
        _sign(page, shown.sign, (SIDE, page.y, SIDE + ANSWER, page.y + ANSWER))
    middle, room = page.y + ANSWER / 2, WIDTH - 2 * SIDE - indent
    size = fitting(shown.answer, room - 30 - text_width(shown.basis, LEAST), ANSWER)
    page.text((SIDE + indent, middle), shown.answer, size=size, fill=colour)
    page.text((WIDTH - SIDE, middle), shown.basis, fill=FAINT, anchor="rm")
    page.y += ANSWER + 14
    for text, ink in (*((line, INK) for line in shown.lines), (shown.about, FAINT)):
        for line in wrapped(text, LEAST, WIDTH - 2 * SIDE) if text else ():
            page.text((SIDE, page.y + LINE / 2), line, fill=ink)
            page.y += LINE


def _sign(page: Page, sign: str, box: tuple[float, float, float, float]) -> None:
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
    page.y += 12
    page.draw.line((SIDE, page.y, WIDTH - SIDE, page.y), fill=GRID, width=3)
    page.y += 12


def _figures(page: Page, shown: RunPicture) -> None:
    width, gap = (WIDTH - 2 * SIDE) / 3, 30
    for place, figure in enumerate(shown.figures):
        left, room = SIDE + place * width, width - gap
        page.text((left, page.y + LINE / 2), figure.label, fill=FAINT)
        middle = page.y + LINE + FIGURE * 0.6
        page.text((left, middle), figure.value, size=fitting(figure.value, room, FIGURE))
        below = middle + FIGURE * 0.6 + LINE / 2
        if place == 0 and shown.limit is not None:
            _peak(page, shown, left, left + room, below)
        else:
            size = fitting(figure.below, room, LEAST)
            page.text((left, below), figure.below, size=size, fill=FAINT)
    page.y += 2 * LINE + round(1.2 * FIGURE)


def _peak(page: Page, shown: RunPicture, left: float, right: float, middle: float) -> None:
    limit = shown.limit
    scale = (right - left) / max(limit.capacity, limit.peak)
    top, bottom = middle - BAR / 2, middle + BAR / 2
    page.draw.rectangle((left, top, left + limit.capacity * scale, bottom), fill=GRID)
    colour = SIGNS["good" if shown.sign == "plain" else shown.sign]
    page.draw.rectangle((left, top, max(left + 4, left + limit.peak * scale), bottom), fill=colour)
    _mark(page, left + limit.usable * scale, middle, INK)


def _mark(page: Page, x: float, middle: float, colour: str) -> None:
    for half, fill in ((5, PAPER), (2, colour)):
        box = (x - half, middle - BAR / 2 - 5, x + half, middle + BAR / 2 + 5)
        page.draw.rectangle(box, fill=fill)


def _phases(page: Page, shown: RunPicture) -> None:
    sizes = SIZES if any(bar.value for bar in shown.bars) else 0
    names = max(NAMES, *(text_width(bar.name, LEAST) + 24 for bar in shown.bars))
    left, right = SIDE + names, WIDTH - SIDE - TIMES - sizes
    longest = max(sum(bar.parts.values()) for bar in shown.bars)
    if shown.limit is not None:
        longest = max(longest, shown.limit.usable)
    scale, top = (right - left) / (longest or 1), page.y
    for bar in shown.bars:
        middle = page.y + LINE / 2
        page.text((SIDE, middle), bar.name)
        _bar(page, bar, left, middle, scale)
        page.text((right + sizes, middle), bar.value, anchor="rm")
        size = fitting(bar.time, TIMES - 24, LEAST)
        page.text((WIDTH - SIDE, middle), bar.time, size=size, fill=FAINT, anchor="rm")
        page.y += LINE
    if shown.limit is not None:
        x = left + shown.limit.usable * scale
        for y in range(round(top), round(page.y), 14):
            page.draw.line((x, y, x, min(y + 8, page.y)), fill=INK, width=3)
    page.y += 6
    _legend(page, shown)
    page.y -= 12


def _bar(page: Page, bar: Bar, left: float, middle: float, scale: float) -> None:
    x = left
    for name, count in bar.parts.items():
        if count:
            end = x + count * scale
            # A gap tells neighbours apart whose colours do not.
            box = (x, middle - BAR / 2, max(x + 2, end - 3), middle + BAR / 2)
            page.draw.rectangle(box, fill=COLOURS[name])
            x = end


def _legend(page: Page, shown: RunPicture) -> None:
    used = {name for bar in shown.bars for name, count in bar.parts.items() if count}
    entries = [(name, colour) for name, colour in COLOURS.items() if name in used]
    if len(entries) == 1:
        entries = []
    if shown.limit is not None:
        entries.append(("limit", INK))
    x = SIDE
    for name, colour in entries:
        width = 44 + text_width(name, LEAST) + 30
        if x > SIDE and x + width > WIDTH - SIDE:
            x, page.y = SIDE, page.y + LINE
        middle = page.y + LINE / 2
        thin = name == "limit"
        page.draw.rectangle(
            (x + 12 * thin, middle - 15, x + (17 if thin else 30), middle + 15), fill=colour
        )
        page.text((x + 44, middle), name, fill=FAINT)
        x += width
    page.y += LINE if entries else 0


class Page:
    """Draws from top to bottom on as much height as it takes; the next line begins at `y`."""

    def __init__(self) -> None:
        from PIL import Image, ImageDraw

        self.image = Image.new("RGB", (WIDTH, 3200), PAPER)
        self.draw = ImageDraw.Draw(self.image)
        self.y = SIDE - 8

    def text(
        self,
        place: tuple[float, float],
        text: str,
        *,
        size: int = LEAST,
        fill: str = INK,
        anchor: str = "lm",
    ) -> None:
        self.draw.text(place, plain(text), fill=fill, font=font(size), anchor=anchor)

    def finish(self) -> Image.Image:
        """Cuts the picture below what was drawn last, and frames it."""
        height = min(self.image.height, round(self.y) + SIDE - 4)
        self.draw.rectangle((0, 0, WIDTH - 1, height - 1), outline=FRAME, width=3)
        return self.image.crop((0, 0, WIDTH, height))


def font(size: int) -> ImageFont.FreeTypeFont:
    """Returns PIL's own font, which is there wherever PIL is."""
    from PIL import ImageFont

    return ImageFont.load_default(size)


def text_width(text: str, size: int) -> float:
    return font(size).getlength(text)


def plain(text: str) -> str:
    """Keeps what the font can draw: accents and line breaks go, the rest becomes "?"."""
    decomposed = unicodedata.normalize("NFKD", " ".join(text.split()))
    letters = (letter for letter in decomposed if not unicodedata.combining(letter))
    return "".join(
        letter if letter.isascii() and letter.isprintable() else "?" for letter in letters
    )


def wrapped(text: str, size: int, width: float) -> list[str]:
    """Folds a text into lines of at most `width` pixels; a word that is longer is broken."""
    lines = [""]
    for word in plain(text).split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if text_width(longer, size) <= width:
            lines[-1] = longer
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:
            if lines[-1] and text_width(lines[-1] + letter, size) > width:
                lines.append("")
            lines[-1] += letter
    return lines


def fitting(text: str, room: float, most: int) -> int:
    """Finds the largest font size of a line that has so many pixels; `LEAST` at the least."""
    return next((size for size in range(most, LEAST, -2) if text_width(text, size) <= room), LEAST)
