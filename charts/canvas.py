"""What the pictures share: fonts, colours, and text that is neither cut off nor on other text."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image, ImageDraw, ImageFont

WIDTH = 1280  # pixels
MARGIN = 36
# Font sizes of pictures that are looked at in full; `memory_chart` has larger ones of its own.
TITLE, TEXT, SMALL = 26, 18, 16
LINE_HEIGHT = 1.35
# A picture brings its own ground and a frame, so that it stands on a light page and on a dark one.
PAPER, FRAME = "#17202a", "#66768a"
INK, FAINT, GRID = "#f2f5f8", "#aeb9c5", "#364452"
DARK = "#10171f"  # text on a bright bar
GOOD, WARN, BAD = "#2bc48a", "#ffb000", "#ff7043"
# Distinct with red-green blindness too; the first belongs to what a picture is about.
PALETTE = (
    *(GOOD, "#f2a541", "#6ea8ff", "#c58be0", "#ff6f91", "#b5c45a", "#35c2d6"),
    *("#c9a08e", "#e8d44d", "#a9c3de", "#ffb3c1", "#90a4ae", "#a6d06a", "#b39ddb"),
)


def font(size: int) -> ImageFont.FreeTypeFont:
    """PIL's own font, which is there wherever PIL is."""
    from PIL import ImageFont

    return ImageFont.load_default(size)


def text_width(text: str, size: int) -> float:
    """Pixels that one line takes."""
    return font(size).getlength(text)


def plain(text: str) -> str:
    """One line of what the font can draw: accents and line breaks go, the rest becomes "?"."""
    decomposed = unicodedata.normalize("NFKD", " ".join(text.split()))
    letters = (letter for letter in decomposed if not unicodedata.combining(letter))
    return "".join(
        letter if letter.isascii() and letter.isprintable() else "?" for letter in letters
    )


def wrapped(text: str, size: int, width: float) -> list[str]:
    """Lines of at most `width` pixels; a word that is longer is broken."""
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


def ticks(highest: float, most: int = 8) -> list[float]:
    """Round values from 0 to at most `highest`: steps of 1, 2 or 5 times a power of ten."""
    exponent = math.floor(math.log10(highest / most))
    steps = (factor * 10.0**power for power in (exponent, exponent + 1) for factor in (1, 2, 5))
    step = next(step for step in steps if highest / step <= most)
    return [step * count for count in range(int(highest / step) + 1)]


class Page:
    """Draws from top to bottom on as much height as it takes.

    Attributes:
        y: Where the next line begins.
    """

    def __init__(self, most_height: int) -> None:
        from PIL import Image, ImageDraw

        self.image: Image.Image = Image.new("RGB", (WIDTH, most_height), PAPER)
        self.draw: ImageDraw.ImageDraw = ImageDraw.Draw(self.image)
        self.y = MARGIN

    def paragraph(self, text: str, size: int = TEXT, fill: str = INK, indent: int = 0) -> None:
        """Text over the whole width, in as many lines as it takes."""
        for line in wrapped(text, size, WIDTH - 2 * MARGIN - indent):
            self.draw.text((MARGIN + indent, self.y), line, fill=fill, font=font(size))
            self.y += round(size * LINE_HEIGHT)

    def legend(self, entries: Iterable[tuple[str, str]]) -> None:
        """Squares of (name, colour), in as many rows as they take."""
        x, row = MARGIN, round(SMALL * LINE_HEIGHT) + 4
        for name, colour in entries:
            label = wrapped(name, SMALL, WIDTH - 2 * MARGIN - 28)[0]
            width = 28 + round(text_width(label, SMALL))
            if x > MARGIN and x + width > WIDTH - MARGIN:
                x, self.y = MARGIN, self.y + row
            self.draw.rectangle((x, self.y + 2, x + 17, self.y + 19), fill=colour)
            self.text((x + 26, self.y + 11), label, anchor="lm", size=SMALL)
            x += width + 26
        self.y += row

    def text(
        self,
        place: tuple[float, float],
        text: str,
        *,
        size: int = TEXT,
        fill: str = INK,
        anchor: str = "lm",
    ) -> None:
        """One line; the anchor is PIL's."""
        self.draw.text(place, plain(text), fill=fill, font=font(size), anchor=anchor)

    def label(
        self,
        x: float,
        y: float,
        text: str,
        span: tuple[float, float],
        *,
        fill: str = INK,
        size: int = SMALL,
    ) -> None:
        """One line centred on `x`, moved as far as it takes to stay between the ends of `span`."""
        half = text_width(plain(text), size) / 2
        x = max(span[0] + half, min(span[1] - half, x))
        self.text((x, y), text, size=size, fill=fill, anchor="mm")

    def finish(self) -> Image.Image:
        """The picture, cut below what was drawn last, in its frame."""
        height = min(self.image.height, round(self.y) + MARGIN)
        self.draw.rectangle((0, 0, WIDTH - 1, height - 1), outline=FRAME, width=3)
        return self.image.crop((0, 0, WIDTH, height))


def dashed(
    draw: ImageDraw.ImageDraw, x: float, top: float, bottom: float, fill: str, width: int = 2
) -> None:
    """A vertical line of dashes."""
    y = top
    while y < bottom:
        draw.line((x, y, x, min(y + 8, bottom)), fill=fill, width=width)
        y += 14


def colours(count: int) -> list[str]:
    """So many colours; from the fifteenth on they repeat."""
    return [PALETTE[place % len(PALETTE)] for place in range(count)]


def luminance(colour: str) -> float:
    """From 0 for black to 1 for white (WCAG 2)."""
    shares = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = [
        share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """From 1, the same, to 21; small text is read easily from 4.5 on (WCAG 2)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
