"""The picture of each workflow in the page's list of templates: a drawing of what it does.

Drawn from the workflow's own facts. The small pictures inside are painted by this program as
signs; no model made them, and each drawing's JPEG comment says so. A picture that the workflow
itself made takes its place with `--thumbnail`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SIDE, MOST_BYTES = 512, 30_000
DRAWN, MADE = "a drawing of what the workflow does", "made by the workflow"
BACKGROUND, PANEL, INK, FAINT = "#1d2127", "#2b313a", "#f2f4f7", "#9aa4b2"
BLUE, GREEN, ORANGE, RED = "#5b9cf5", "#4cc38a", "#f2a33c", "#e5646a"

Box = tuple[int, int, int, int]


class Drawing:
    """A square of `SIDE` pixels with a title, on which signs are placed."""

    def __init__(self, title: str, line: str) -> None:
        self.image = Image.new("RGB", (SIDE, SIDE), BACKGROUND)
        self.draw = ImageDraw.Draw(self.image)
        self.text((SIDE // 2, 54), title, 46)
        self.text((SIDE // 2, SIDE - 46), line, 32, FAINT)

    def text(self, at: tuple[int, int], words: str, size: int, colour: str = INK) -> None:
        """Centred at a point, smaller where it would be wider than the square."""
        font = ImageFont.load_default(size)
        while size > 10 and self.draw.textlength(words, font=font) > SIDE - 32:
            size -= 1
            font = ImageFont.load_default(size)
        self.draw.text(at, words, fill=colour, font=font, anchor="mm")

    def panel(self, box: Box, colour: str = PANEL, outline: str | None = None) -> None:
        """A rounded rectangle."""
        self.draw.rounded_rectangle(box, 14, fill=colour, outline=outline, width=4)

    def arrow(self, start: tuple[int, int], end: int) -> None:
        """From a point to the right."""
        x, y = start
        self.draw.line((x, y, end - 14, y), fill=INK, width=6)
        self.draw.polygon(((end, y), (end - 20, y - 13), (end - 20, y + 13)), fill=INK)

    def prompt(self, box: Box) -> None:
        """Lines of text."""
        self.panel(box)
        left, top, right, bottom = box
        step = (bottom - top) // 5
        for line, share in enumerate((0.9, 0.7, 0.85, 0.5), 1):
            y = top + line * step
            self.draw.line((left + 18, y, left + (right - left) * share, y), fill=FAINT, width=8)

    def picture(self, box: Box, sign: str = "circle", sky: str = "#31507c") -> None:
        """A framed picture: a hill under a sky, with a circle, square or star."""
        left, top, right, bottom = box
        width, height = right - left, bottom - top
        self.draw.rectangle(box, fill=sky)
        hill = (left - width // 3, bottom - height // 3, right - width // 5, bottom + height // 2)
        inside = Image.new("L", (SIDE, SIDE), 0)
        ImageDraw.Draw(inside).rectangle(box, fill=255)
        layer = self.image.copy()
        ImageDraw.Draw(layer).ellipse(hill, fill="#3c7a57")
        self.image.paste(layer, mask=inside)
        x, y, size = left + width * 2 // 3, top + height * 2 // 5, min(width, height) // 4
        if sign == "circle":
            self.draw.ellipse((x - size, y - size, x + size, y + size), fill=ORANGE)
        elif sign == "square":
            self.draw.rectangle((x - size, y - size, x + size, y + size), fill=RED)
        else:
            self.draw.regular_polygon((x, y, size), 3, fill="#d8d35a")
        self.draw.rectangle(box, outline=INK, width=4)

    def bar(self, box: Box, shares: Sequence[tuple[float, str]]) -> None:
        """A stacked bar, filled from the left."""
        left, top, right, bottom = box
        at = float(left)
        for share, colour in shares:
            end = at + share * (right - left)
            self.draw.rectangle((round(at), top, round(end), bottom), fill=colour)
            at = end
        self.draw.rectangle(box, outline=INK, width=3)


PROMPT: Box = (28, 150, 190, 362)
RESULT: Box = (290, 136, 484, 376)


def text_to_image(title: str, line: str, badge: str, colour: str = BLUE) -> Image.Image:
    """A prompt becomes a picture; a badge says by which setting."""
    drawing = Drawing(title, line)
    drawing.prompt(PROMPT)
    drawing.arrow((200, 256), 282)
    drawing.picture(RESULT)
    drawing.panel((190, 186, 300, 234), colour)
    drawing.text((245, 210), badge, 30, BACKGROUND)
    return drawing.image


def batch(title: str, line: str) -> Image.Image:
    """A prompt becomes eight pictures."""
    drawing = Drawing(title, line)
    drawing.prompt((28, 176, 158, 336))
    drawing.arrow((166, 256), 222)
    for place in range(8):
        x, y = 232 + place % 2 * 132, 110 + place // 2 * 78
        sky = ("#31507c", "#6a4b7d", "#2f6f73", "#7a5a38")[place % 4]
        drawing.picture((x, y, x + 118, y + 70), ("circle", "square", "triangle")[place % 3], sky)
    return drawing.image


def edit(title: str, line: str, references: int, mask: bool = False) -> Image.Image:
    """Pictures and a prompt become a picture."""
    drawing = Drawing(title, line)
    height = 200 // references
    for place in range(references):
        top = 104 + place * (height + 8)
        drawing.picture((28, top, 190, top + height), ("circle", "square", "triangle")[place])
    if mask:
        drawing.draw.ellipse((90, 116, 182, 252), fill="#f2f4f7")
        drawing.text((136, 184), "mask", 26, BACKGROUND)
    drawing.prompt((28, 336, 190, 412))
    drawing.arrow((200, 256), 282)
    drawing.picture(RESULT, "square" if mask else "triangle", "#31507c" if mask else "#6a4b7d")
    return drawing.image


def report(title: str, line: str) -> Image.Image:
    """A picture, and two bars: predicted and measured."""
    drawing = Drawing(title, line)
    drawing.picture((156, 100, 356, 262))
    for top, share, colour, words in (
        (294, 0.74, BLUE, "predicted"),
        (364, 0.70, GREEN, "measured"),
    ):
        drawing.bar((40, top, 472, top + 52), ((share, colour),))
        drawing.text((140, top + 27), words, 30, BACKGROUND)
    return drawing.image


DRAWINGS: dict[str, Callable[[], Image.Image]] = {
    "text_to_image_bf16": lambda: text_to_image("Text to image", "as trained, 1328x1328", "bf16"),
    "text_to_image_fp8": lambda: text_to_image("Text to image", "half the download", "fp8", ORANGE),
    "text_to_image_int8": lambda: text_to_image(
        "Text to image", "two thirds of the memory", "int8", GREEN
    ),
    "lightning_4_steps": lambda: text_to_image("Lightning", "Lightning LoRA", "4 steps", ORANGE),
    "lightning_8_steps": lambda: text_to_image("Lightning", "Lightning LoRA", "8 steps", ORANGE),
    "lora": lambda: text_to_image("Text to image", "with a LoRA", "LoRA", "#c58af9"),
    "text_to_image_2048": lambda: text_to_image("Large picture", "decoded in tiles", "2048"),
    "batch_of_8": lambda: batch("Batch of 8", "one prompt, eight pictures"),
    "edit_2511": lambda: edit("Edit", "one picture and a prompt", 1),
    "edit_2511_three_references": lambda: edit("Edit", "three references", 3),
    "inpaint": lambda: edit("Inpaint", "only what you mask", 1, mask=True),
    "micro_report": lambda: report("Micro report", "nothing to download"),
    "layered": lambda: edit("Layered", "a picture taken apart", 1),
    "advise": lambda: report("Advise", "which card"),
    "save_quantized": lambda: report("Save quantized", "int8 or fp8"),
    "estimate_generate_report": lambda: report("Estimate, run, report", "and compare"),
}


def write(path: Path, picture: Image.Image, comment: str) -> None:
    """A JPEG of at most `SIDE` pixels and `MOST_BYTES`."""
    small = picture.convert("RGB")
    small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    for quality in range(92, 20, -6):
        data = io.BytesIO()
        small.save(data, "JPEG", quality=quality, optimize=True, comment=comment)
        if data.tell() <= MOST_BYTES:
            break
    path.write_bytes(data.getvalue())


def comment_of(path: Path) -> str:
    """`DRAWN`, `MADE`, or nothing."""
    with Image.open(path) as picture:
        comment = picture.info.get("comment", b"")
    return comment.decode("utf-8", "replace") if isinstance(comment, bytes) else comment
