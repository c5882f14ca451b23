"""What the pictures share: fonts, colours, and text that is neither cut off nor on other text."""

from __future__ import annotations

import unicodedata
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
