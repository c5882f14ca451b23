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
# Font sizes. A node shows the picture at about half its size: 15 is the least that can be read.
TITLE, TEXT, SMALL = 26, 18, 16
LINE_HEIGHT = 1.35
INK, FAINT, GRID = "#1f2933", "#616e7c", "#e4e7eb"
GOOD, BAD = "#0b7a5b", "#c8102e"
# Distinct with red-green blindness too; the first belongs to what a picture is about.
PALETTE = (
    *("#0b7a5b", "#d9822b", "#3d6fb6", "#8a4f9e", "#c2185b", "#5c6b2e", "#00838f"),
    *("#8d6e63", "#b8a000", "#6b8fb5", "#e07b91", "#455a64", "#7e9d3c", "#9575cd"),
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

        self.image: Image.Image = Image.new("RGB", (WIDTH, most_height), "white")
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
        """The picture, cut below what was drawn last."""
        return self.image.crop((0, 0, WIDTH, min(self.image.height, round(self.y) + MARGIN)))


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


def ink_on(colour: str) -> str:
    """White or dark, whichever is read more easily on a colour (luma of Rec. 601)."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else "#ffffff"
