"""The picture of each workflow in the page's list of templates: what it made, or a placeholder.

A comment in the JPEG says which of the two it is.
"""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SIDE, MOST_BYTES = 512, 30_000
PLACEHOLDER, MADE = "placeholder", "made by the workflow"
NOT_YET = "placeholder: not made by this workflow yet"
BACKGROUND, TEXT, FAINT = "#23272e", "#f0f0f0", "#9aa4b2"


def placeholder(title: str) -> Image.Image:
    """Says the title, and that the workflow did not make it."""
    picture = Image.new("RGB", (SIDE, SIDE), BACKGROUND)
    draw = ImageDraw.Draw(picture)
    for text, at, size, colour in (
        (title, SIDE // 2 - 24, 34, TEXT),
        (NOT_YET, SIDE // 2 + 36, 20, FAINT),
    ):
        font = ImageFont.load_default(size)
        while size > 10 and draw.textlength(text, font=font) > SIDE - 40:
            size -= 1
            font = ImageFont.load_default(size)
        draw.text((SIDE // 2, at), text, fill=colour, font=font, anchor="mm")
    return picture


def write(path: Path, picture: Image.Image, comment: str) -> None:
    """A JPEG of at most `SIDE` pixels and `MOST_BYTES`."""
    small = picture.convert("RGB")
    small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    for quality in range(92, 20, -6):
        held = io.BytesIO()
        small.save(held, "JPEG", quality=quality, optimize=True, comment=comment)
        if held.tell() <= MOST_BYTES:
            break
    path.write_bytes(held.getvalue())


def comment_of(path: Path) -> str:
    """`PLACEHOLDER`, `MADE`, or nothing."""
    with Image.open(path) as picture:
        comment = picture.info.get("comment", b"")
    return comment.decode("utf-8", "replace") if isinstance(comment, bytes) else comment
