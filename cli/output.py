"""Holds what commands share: packages, and images that are written whole or not at all."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingError, UnavailableError
from ..files import check_target, check_writable, write_whole
from ..spec.formats import METADATA_KEY

if TYPE_CHECKING:
    from PIL import Image


ROOT = Path(__file__).resolve().parent.parent
# What pip calls what is imported under another name.
PIP_NAMES = {"PIL": "pillow"}


def require_packages(
    what: str, names: Iterable[str], *, extra: str = "standalone", instead: str = ""
) -> None:
    """Checks that packages can be imported, without importing them.

    Args:
        what: needs them, as the sentence begins.
        names: of what is imported.
        extra: of this package, which brings them.
        instead: of installing, what else would do.

    Raises:
        UnavailableError: some are missing.
    """
    missing = [PIP_NAMES.get(name, name) for name in names if find_spec(name) is None]
    if missing:
        raise UnavailableError(
            f"{what} needs {', '.join(missing)}, which is not installed: run `pip install "
            f'".[{extra}]"` in {ROOT}{instead}.'
        )


def parse_size(text: str) -> tuple[int, int]:
    """Reads width and height of "1328x1328", as argparse calls it."""
    width, cross, height = text.lower().partition("x")
    if not (cross and width.isdecimal() and height.isdecimal()):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be WIDTHxHEIGHT in pixels, such as 1328x1328"
        )
    return int(width), int(height)


def check_png(option: str, path: str) -> None:
    """Refuses, before a long computation, an image that could not be written.

    Raises:
        SettingError: the name does not end in .png, or is a folder.
        UnavailableError: the folder cannot be written.
    """
    if not path.lower().endswith(".png"):
        raise SettingError(f"{option} is {path!r}, but must end in .png.")
    check_target(option, path)


def check_plot(path: str) -> None:
    """Refuses a plot as `check_png` does, and where a package is missing."""
    if not (find_spec("PIL") and find_spec("numpy")):
        raise UnavailableError(
            "--plot needs pillow and numpy: run `pip install pillow numpy`, or leave it out."
        )
    check_png("--plot", path)


def write_plot(image: Image.Image, path: str) -> None:
    write_whole(Path(path), png_bytes(image))


class ImageTarget:
    """Names the images of a run from `--output`.

    A file name is that file, and replaced: its name was typed. A batch numbers it, `name_00001.png`
    and on, also replacing. A folder, or nothing for the current one, takes the first numbers that
    are free: `image_00001.png`.
    """

    def __init__(self, output: str | None, *, stem: str = "image") -> None:
        self.path = path = Path(output) if output else Path()
        self.numbered = path.is_dir()
        self.folder, self.stem = (path, stem) if self.numbered else (path.parent, path.stem)
        if not self.numbered and path.suffix.lower() != ".png":
            raise SettingError(
                f"--output is {output!r}, but must end in .png or name an existing folder."
            )
        check_writable(self.folder)

    def paths(self, images: int) -> list[Path]:
        """Names so many images; call it late, because other runs may write here too."""
        if not self.numbered and images == 1:
            return [self.path]
        names = (self.folder / f"{self.stem}_{number:05}.png" for number in count(1))
        free = (path for path in names if not (self.numbered and path.exists()))
        return [next(free) for _ in range(images)]


def png_bytes(image: Image.Image, metadata: Mapping[str, Any] | None = None) -> bytes:
    """Encodes an RGB or RGBA image with `metadata`, if any, as JSON in a text chunk `qwen_l40s`."""
    import numpy as np
    from PIL.PngImagePlugin import PngInfo

    from ..hosts.png import encode

    text = PngInfo()
    if metadata is not None:
        text.add_text(METADATA_KEY, json.dumps(metadata))
    return b"".join(encode(np.asarray(image), text))


# A contact sheet: pixels between its images, and of its captions.
SHEET_MARGIN, FONT_SIZE, LINE_HEIGHT = 12, 14, 18


def write_sheet(
    path: Path, images: Sequence[Image.Image], captions: Sequence[str], columns: int = 0
) -> None:
    """Writes images of one size with captions on one sheet, a PNG; an existing file is replaced.
    Without `columns` the sheet has as many as rows.
    """
    from PIL import Image, ImageDraw, ImageFont

    pairs = list(zip(images, captions, strict=True))
    font = ImageFont.load_default(FONT_SIZE)
    width, height = pairs[0][0].size
    texts = [_wrap(caption, width, font) for _, caption in pairs]
    columns = columns or math.ceil(math.sqrt(len(pairs)))
    rows = math.ceil(len(pairs) / columns)
    step_x = width + SHEET_MARGIN
    step_y = height + SHEET_MARGIN + LINE_HEIGHT * max(map(len, texts))
    sheet = Image.new(
        "RGB", (SHEET_MARGIN + columns * step_x, SHEET_MARGIN + rows * step_y), "white"
    )
    draw = ImageDraw.Draw(sheet)
    for place, ((image, _), lines) in enumerate(zip(pairs, texts, strict=True)):
        x = SHEET_MARGIN + place % columns * step_x
        y = SHEET_MARGIN + place // columns * step_y
        sheet.paste(image, (x, y))
        for number, line in enumerate(lines):
            draw.text((x, y + height + 2 + number * LINE_HEIGHT), line, fill="black", font=font)
    write_whole(path, png_bytes(sheet))


def _wrap(caption: str, width: int, font: Any) -> list[str]:
    lines = [""]
    for word in caption.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines
