"""Many images with captions on one sheet: a PNG, or one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SettingError
from .output import check_writable, png_bytes, write_whole

if TYPE_CHECKING:
    from PIL import Image, ImageFont

SUFFIXES = (".png", ".html")
MARGIN = 12  # pixels
FONT_SIZE = 14
LINE_HEIGHT = 18

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 14px sans-serif; margin: 24px; }}
main {{ display: grid; gap: 16px; grid-template-columns: repeat(auto-fill, minmax(256px, 1fr)); }}
figure {{ margin: 0; }}
img {{ width: 100%; }}
</style>
<h1>{title}</h1>
<main>
{figures}
</main>
</html>
"""


def check_sheet_path(path: Path) -> None:
    """Checks before the long computation that the sheet can be written.

    Raises:
        SettingError: the suffix is neither .png nor .html.
        UnavailableError: the folder is not writable.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise SettingError(f"--grid {str(path)!r} must end in {' or '.join(SUFFIXES)}.")
    check_writable(path.parent)


def write_sheet(
    path: Path, images: Sequence[Image.Image], captions: Sequence[str], *, title: str
) -> None:
    """Writes images of one size in the format of the suffix; an existing file is replaced."""
    pairs = list(zip(images, captions, strict=True))
    write_whole(path, _html(pairs, title) if path.suffix.lower() == ".html" else _png(pairs))


def _html(pairs: Sequence[tuple[Image.Image, str]], title: str) -> bytes:
    figures = "\n".join(
        f'<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,'
        f'{base64.b64encode(png_bytes(image)).decode()}"><figcaption>{html.escape(caption)}</figcaption></figure>'
        for image, caption in pairs
    )
    return PAGE.format(title=html.escape(title), figures=figures).encode()


def _png(pairs: Sequence[tuple[Image.Image, str]]) -> bytes:
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(FONT_SIZE)
    width, height = pairs[0][0].size
    texts = [_wrap(caption, width, font) for _, caption in pairs]
    columns = math.ceil(math.sqrt(len(pairs)))
    rows = math.ceil(len(pairs) / columns)
    step_x = width + MARGIN
    step_y = height + MARGIN + LINE_HEIGHT * max(map(len, texts))
    sheet = Image.new("RGB", (MARGIN + columns * step_x, MARGIN + rows * step_y), "white")
    draw = ImageDraw.Draw(sheet)
    for place, ((image, _), lines) in enumerate(zip(pairs, texts, strict=True)):
        x = MARGIN + place % columns * step_x
        y = MARGIN + place // columns * step_y
        sheet.paste(image, (x, y))
        for number, line in enumerate(lines):
            draw.text((x, y + height + 2 + number * LINE_HEIGHT), line, fill="black", font=font)
    return png_bytes(sheet)


def _wrap(caption: str, width: int, font: ImageFont.FreeTypeFont) -> list[str]:
    lines = [""]
    for word in caption.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines
