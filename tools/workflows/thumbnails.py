"""The picture of each workflow in the page's list of templates: a drawing of what it does.

A list of templates is looked through, not read: what tells a workflow from the next one is the
largest thing in its drawing. The small pictures inside are painted by this program as signs; no
model made them, and each drawing's JPEG comment says so. `--thumbnail` puts a picture that the
workflow itself made in the same frame.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SIDE, MOST_BYTES = 512, 30_000
# Signs are drawn between these rows; the page lays a badge over the corner at the top left of a
# tile, so that they move up and the title stands below them.
TOP, BOTTOM, MOVED_TO = 88, 432, 44
DRAWN, MADE = "a drawing of what the workflow does", "made by the workflow"
BACKGROUND, PANEL, INK, FAINT = "#1d2127", "#2b313a", "#f2f4f7", "#9aa4b2"
BLUE, GREEN, ORANGE, RED, PURPLE = "#5b9cf5", "#4cc38a", "#f2a33c", "#e5646a", "#c58af9"
DAY, DUSK, SEA, NIGHT, SKIN = "#31507c", "#8a4b2f", "#1f6b63", "#4d3b74", "#e8c39e"

Box = tuple[int, int, int, int]


class Drawing:
    """A square of `SIDE` pixels: signs above, a title and a line below."""

    def __init__(self, title: str, line: str) -> None:
        self.image = Image.new("RGB", (SIDE, SIDE), BACKGROUND)
        self.draw = ImageDraw.Draw(self.image)
        self.title, self.line = title, line

    def square(self) -> Image.Image:
        """The finished tile."""
        signs = self.image.crop((0, TOP, SIDE, BOTTOM))
        self.draw.rectangle((0, 0, SIDE, SIDE), fill=BACKGROUND)
        self.image.paste(signs, (0, MOVED_TO))
        self.text((SIDE // 2, SIDE - 88), self.title, 48)
        self.text((SIDE // 2, SIDE - 34), self.line, 32, FAINT)
        return self.image

    def text(
        self, at: tuple[int, int], words: str, size: int, colour: str = INK, anchor: str = "mm"
    ) -> None:
        """At a point, smaller where it would be wider than the square."""
        font = ImageFont.load_default(size)
        while size > 10 and self.draw.textlength(words, font=font) > SIDE - 32:
            size -= 1
            font = ImageFont.load_default(size)
        self.draw.text(at, words, fill=colour, font=font, anchor=anchor)

    def panel(self, box: Box, colour: str = PANEL) -> None:
        """A rounded rectangle."""
        self.draw.rounded_rectangle(box, 14, fill=colour)

    def badge(self, box: Box, words: str, size: int, colour: str) -> None:
        """Large words on a colour."""
        self.panel(box, colour)
        self.text(((box[0] + box[2]) // 2, (box[1] + box[3]) // 2), words, size, BACKGROUND)

    def arrow(self, start: tuple[int, int], end: int) -> None:
        """From a point to the right."""
        x, y = start
        self.draw.line((x, y, end - 14, y), fill=INK, width=8)
        self.draw.polygon(((end, y), (end - 24, y - 17), (end - 24, y + 17)), fill=INK)

    def prompt(self, box: Box) -> None:
        """Lines of text."""
        self.panel(box)
        left, top, right, bottom = box
        step = (bottom - top) // 4
        for line, share in enumerate((0.88, 0.7, 0.8), 1):
            y = top + line * step
            self.draw.line((left + 16, y, left + (right - left) * share, y), fill=FAINT, width=8)

    def picture(self, box: Box, signs: Sequence[str] = ("circle",), sky: str = DAY) -> None:
        """A framed picture: a hill under a sky, with circles, squares or triangles."""
        left, top, right, bottom = box
        width, height = right - left, bottom - top
        self.draw.rectangle(box, fill=sky)
        hill = (left - width // 3, bottom - height // 3, right - width // 5, bottom + height // 2)
        inside = Image.new("L", (SIDE, SIDE), 0)
        ImageDraw.Draw(inside).rectangle(box, fill=255)
        layer = self.image.copy()
        ImageDraw.Draw(layer).ellipse(hill, fill="#3c7a57")
        self.image.paste(layer, mask=inside)
        for index, sign in enumerate(signs):
            x = left + width * (2 * index + 1) // (2 * len(signs))
            x = left + width * 2 // 3 if len(signs) == 1 else x
            size = min(width // (1 + len(signs)), height) // (4 if len(signs) == 1 else 2)
            size = min(width, height) // 4 if len(signs) == 1 else size
            self.sign(sign, x, top + height * 2 // 5, size)
        self.draw.rectangle(box, outline=INK, width=4)

    def sign(self, sign: str, x: int, y: int, size: int) -> None:
        """A circle, a square or a triangle around a point."""
        box = (x - size, y - size, x + size, y + size)
        if sign == "circle":
            self.draw.ellipse(box, fill=ORANGE)
        elif sign == "square":
            self.draw.rectangle(box, fill=RED)
        else:
            self.draw.regular_polygon((x, y, size), 3, fill="#d8d35a")

    def person(self, box: Box, clothes: str) -> None:
        """A framed figure in a shirt."""
        left, top, right, bottom = box
        middle, unit = (left + right) // 2, (bottom - top) // 10
        self.draw.rectangle(box, fill=DAY)
        for x in (middle - unit * 2 // 3, middle + unit * 2 // 3):
            self.draw.line((x, top + 6 * unit, x, bottom - unit // 2), fill=PANEL, width=unit)
        self.draw.circle((middle, top + unit * 3 // 2), unit, SKIN)
        self.garment(middle, top + 5 * unit, 2 * unit, clothes)
        self.draw.rectangle(box, outline=INK, width=4)

    def garment(self, x: int, y: int, size: int, colour: str) -> None:
        """A shirt around a point."""
        half = ((0.35, -1), (0.8, -0.85), (1.25, -0.1), (0.85, 0.1), (0.6, -0.25), (0.6, 1))
        shirt = [*half, *((-across, down) for across, down in reversed(half))]
        self.draw.polygon([(x + size * across, y + size * down) for across, down in shirt], colour)

    def noise(self, box: Box, share: float) -> None:
        """Grey squares over a share of a picture."""
        dice = random.Random(1)
        for y in range(box[1] + 4, box[3] - 8, 8):
            for x in range(box[0] + 4, box[2] - 8, 8):
                if dice.random() < share:
                    grey = dice.randrange(60, 220)
                    self.draw.rectangle((x, y, x + 8, y + 8), fill=(grey, grey, grey))

    def checks(self, box: Box) -> None:
        """What shows through where a layer is transparent."""
        left, top, right, bottom = box
        self.draw.rectangle(box, fill="#d5d9df")
        for row, y in enumerate(range(top, bottom, 16)):
            for x in range(left + 16 * (row % 2), right, 32):
                fits = (x, y, min(x + 15, right), min(y + 15, bottom))
                self.draw.rectangle(fits, fill="#aab1bb")
        self.draw.rectangle(box, outline=INK, width=4)

    def bar(self, box: Box, share: float, colour: str) -> None:
        """A bar, filled from the left."""
        left, top, right, bottom = box
        self.panel(box)
        self.panel((left, top, left + round(share * (right - left)), bottom), colour)

    def tick(self, x: int, y: int, size: int, colour: str = GREEN) -> None:
        """The sign of a yes."""
        corners = ((x - size, y), (x - size // 3, y + size * 2 // 3), (x + size, y - size * 2 // 3))
        self.draw.line(corners, fill=colour, width=size // 3, joint="curve")


def framed(title: str, line: str, picture: Image.Image) -> Image.Image:
    """A picture that a workflow made."""
    drawing = Drawing(title, line)
    small = picture.convert("RGB").resize((320, 320), Image.Resampling.LANCZOS)
    drawing.image.paste(small, (96, 100))
    drawing.draw.rectangle((96, 100, 416, 420), outline=INK, width=4)
    return drawing.square()


def text_to_image(line: str, badge: str, colour: str, sky: str) -> Image.Image:
    """A prompt becomes a picture, in a precision."""
    drawing = Drawing("Text to image", line)
    drawing.picture((36, 104, 476, 420), sky=sky)
    drawing.prompt((56, 124, 236, 214))
    drawing.badge((56, 286, 296, 400), badge, min(92, 400 // len(badge)), colour)
    return drawing.square()


def step_cache() -> Image.Image:
    """Steps in a row; those that are skipped are empty."""
    drawing = Drawing("Step cache", "nearly the same picture, sooner")
    drawing.picture((36, 104, 476, 332))
    for step in range(8):
        x = 36 + step * 56
        box = (x, 352, x + 48, 420)
        drawing.panel(box, PANEL if step in (3, 5, 6) else GREEN)
    drawing.badge((56, 124, 296, 204), "26 of 50 steps", 36, GREEN)
    return drawing.square()


def lightning(steps: int, colour: str) -> Image.Image:
    """Noise becomes a picture in a few steps."""
    drawing = Drawing("Lightning", "text to image, no CFG")
    columns, rows = 4, steps // 4
    width, height = 104, 126 if rows == 1 else 92
    top = 110
    for step in range(steps):
        x, y = 36 + step % columns * 112, top + step // columns * (height + 8)
        box = (x, y, x + width, y + height)
        drawing.picture(box)
        drawing.noise(box, 1 - (step + 1) / steps)
        drawing.draw.rectangle(box, outline=INK, width=3)
    bottom = top + rows * (height + 8)
    drawing.badge((36, bottom + 12, 476, 420), f"{steps} steps", 92, colour)
    return drawing.square()


def lora() -> Image.Image:
    """A LoRA for panoramas."""
    drawing = Drawing("With a LoRA", "here 360 degree panoramas")
    drawing.picture((20, 120, 492, 300), ("circle", "triangle", "square"), NIGHT)
    drawing.badge((120, 320, 392, 416), "LoRA", 72, PURPLE)
    return drawing.square()


def large() -> Image.Image:
    """A large picture in tiles."""
    drawing = Drawing("Large picture", "decoded without seams")
    box = (86, 96, 426, 424)
    drawing.picture(box, sky=SEA)
    for place in range(1, 4):
        x, y = 86 + place * 85, 96 + place * 82
        drawing.draw.line((x, 96, x, 424), fill=INK, width=2)
        drawing.draw.line((86, y, 426, y), fill=INK, width=2)
    drawing.badge((136, 310, 376, 400), "2048", 76, BLUE)
    return drawing.square()


def batch() -> Image.Image:
    """A prompt becomes eight pictures."""
    drawing = Drawing("Batch of 8", "one prompt, eight pictures")
    for place in range(8):
        x, y = 24 + place % 4 * 118, 122 + place // 4 * 150
        sky = (DAY, NIGHT, SEA, DUSK)[(place + place // 4) % 4]
        sign = ("circle", "square", "triangle")[place % 3]
        drawing.picture((x, y, x + 110, y + 138), (sign,), sky)
    return drawing.square()


def edit(title: str, line: str, badge: str = "") -> Image.Image:
    """A picture before and after."""
    drawing = Drawing(title, line)
    drawing.picture((24, 130, 204, 330))
    drawing.arrow((216, 230), 296)
    drawing.picture((308, 130, 488, 330), ("triangle",), NIGHT)
    if badge:
        drawing.badge((124, 346, 388, 424), badge, 60, "#ffd84d")
    else:
        drawing.prompt((124, 346, 388, 424))
    return drawing.square()


def try_on() -> Image.Image:
    """A person and a garment become one picture."""
    drawing = Drawing("Try on clothes", "a person, a garment, 4 steps")
    drawing.person((24, 104, 164, 304), FAINT)
    drawing.draw.rectangle((24, 316, 164, 426), fill=INK)
    drawing.garment(94, 372, 40, PURPLE)
    drawing.arrow((178, 264), 248)
    drawing.person((262, 104, 488, 426), PURPLE)
    return drawing.square()


def controlnet() -> Image.Image:
    """Edges become a picture."""
    drawing = Drawing("ControlNet", "painted along edges")
    drawing.draw.rectangle((24, 120, 224, 400), fill="#000", outline=INK, width=4)
    drawing.draw.ellipse((107, 182, 207, 282), outline=INK, width=4)
    drawing.draw.arc((-42, 307, 184, 540), 246, 348, fill=INK, width=4)
    drawing.arrow((232, 260), 284)
    drawing.picture((292, 120, 492, 400))
    return drawing.square()


def three_references() -> Image.Image:
    """Three pictures become one."""
    drawing = Drawing("Three into one", "edit with three pictures")
    for place, sign in enumerate(("circle", "square", "triangle")):
        top = 100 + place * 110
        drawing.picture((24, top, 174, top + 102), (sign,), (DAY, NIGHT, SEA)[place])
        drawing.badge((32, top + 8, 68, top + 44), str(place + 1), 32, INK)
    drawing.arrow((186, 262), 254)
    drawing.picture((264, 140, 492, 384), ("circle", "square", "triangle"), DUSK)
    return drawing.square()


def inpaint() -> Image.Image:
    """Only what is masked is painted anew."""
    drawing = Drawing("Inpaint", "only what you mask")
    drawing.picture((24, 120, 224, 400))
    drawing.draw.ellipse((90, 160, 214, 300), fill=INK)
    drawing.text((152, 230), "mask", 40, BACKGROUND)
    drawing.arrow((232, 260), 284)
    drawing.picture((292, 120, 492, 400), ("triangle",))
    return drawing.square()


def layered() -> Image.Image:
    """A picture taken apart."""
    drawing = Drawing("Layers", "a picture taken apart")
    drawing.picture((24, 170, 184, 370), ("circle",))
    drawing.arrow((192, 270), 246)
    for place, sign in enumerate(("triangle", "square", "circle")):
        x, y = 254 + place * 62, 286 - place * 84
        drawing.checks((x, y, x + 112, y + 136))
        drawing.sign(sign, x + 56, y + 84, 36)
    return drawing.square()


def estimate() -> Image.Image:
    """The three questions that an estimate answers."""
    drawing = Drawing("Estimate", "before a run, with no model")
    drawing.bar((36, 108, 476, 172), 0.84, BLUE)
    drawing.tick(430, 140, 26)
    for top, words, sign in (
        (190, "Does it fit?", "GiB"),
        (270, "How long?", "min"),
        (350, "How much?", "$"),
    ):
        drawing.panel((36, top, 476, top + 68))
        drawing.text((56, top + 34), words, 44, anchor="lm")
        drawing.text((456, top + 34), sign, 44, GREEN, anchor="rm")
    return drawing.square()


def report(title: str, line: str, sky: str, badge: str = "") -> Image.Image:
    """A picture, and two bars: predicted and measured."""
    drawing = Drawing(title, line)
    drawing.picture((136, 98, 376, 252), sky=sky)
    if badge:
        drawing.badge((156, 182, 296, 240), badge, 46, GREEN)
    for top, share, colour, words in (
        (268, 0.84, BLUE, "predicted"),
        (348, 0.78, GREEN, "measured"),
    ):
        drawing.bar((36, top, 476, top + 68), share, colour)
        drawing.text((60, top + 34), words, 42, BACKGROUND, anchor="lm")
    return drawing.square()


def advise() -> Image.Image:
    """Cards, the cheapest first."""
    drawing = Drawing("Which card?", "ranked by cost of an image")
    for place, (share, colour) in enumerate(((0.42, GREEN), (0.66, BLUE), (0.94, ORANGE))):
        top = 108 + place * 106
        drawing.text((60, top + 44), str(place + 1), 56)
        drawing.bar((100, top, 476, top + 88), share, colour)
        drawing.text((124, top + 44), "$" * (place + 1), 52, BACKGROUND, anchor="lm")
    return drawing.square()


def save_quantized() -> Image.Image:
    """A large file becomes a smaller one."""
    drawing = Drawing("Save quantized", "a smaller file, once")
    drawing.badge((28, 108, 228, 420), "bf16", 72, BLUE)
    drawing.arrow((240, 280), 300)
    drawing.badge((310, 212, 486, 420), "int8", 66, GREEN)
    return drawing.square()


FRAMES = {
    "micro_text_to_image": ("Try it: micro", "nothing to download"),
    "micro_qwen_image_21": ("Try it: micro 2.1", "nothing to download"),
}
DRAWINGS: dict[str, Callable[[], Image.Image]] = {
    "text_to_image_bf16": lambda: text_to_image("most faithful", "bf16", BLUE, DAY),
    "text_to_image_cached": step_cache,
    "text_to_image_fp8": lambda: text_to_image("half the download", "fp8", ORANGE, DUSK),
    "text_to_image_int8": lambda: text_to_image("smaller cards", "int8", GREEN, SEA),
    "lightning_4_steps": lambda: lightning(4, "#ffd84d"),
    "lightning_8_steps": lambda: lightning(8, ORANGE),
    "lora": lora,
    "controlnet": controlnet,
    "text_to_image_2048": large,
    "batch_of_8": batch,
    "qwen_image_21": lambda: text_to_image("Qwen-Image-2.1", "2.1", PURPLE, NIGHT),
    "qwen_image_21_2048": lambda: text_to_image("Qwen-Image-2.1", "2048", PURPLE, SEA),
    "qwen_image_21_turbo": lambda: text_to_image("2.1-Turbo, 8 steps", "Turbo", "#ffd84d", DUSK),
    "qwen_image_21_edit": lambda: edit("Edit, 2 pictures", "Qwen-Image-2.1", "2.1"),
    "edit_2511": lambda: edit("Edit a picture", "as the prompt says"),
    "edit_2511_lightning": lambda: edit("Edit, Lightning", "a picture, no CFG", "4 steps"),
    "edit_2511_three_references": three_references,
    "try_on": try_on,
    "inpaint": inpaint,
    "layered": layered,
    "estimate": estimate,
    "estimate_generate_report": lambda: report("Estimate, run, report", "compared", DAY),
    "micro_report": lambda: report("Try a report", "nothing to download", SEA, "micro"),
    "advise": advise,
    "save_quantized": save_quantized,
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
