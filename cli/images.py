"""Writes images whole or not at all, with their settings inside, and over no file unasked."""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingError, plain_write_errors

if TYPE_CHECKING:
    from PIL import Image

METADATA_KEY = "qwen_l40s"


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
            raise SettingError(f"--output {output!r} must end in .png or be a folder that exists.")
        check_writable(self.folder)

    def paths(self, images: int) -> list[Path]:
        """Names for so many images; call it late, because other runs may write here too."""
        if not self.numbered and images == 1:
            return [self.path]
        names = (self.folder / f"{self.stem}_{number:05}.png" for number in count(1))
        free = (path for path in names if not (self.numbered and path.exists()))
        return [next(free) for _ in range(images)]


def check_writable(folder: Path) -> None:
    """Creates and removes a file, because permissions alone do not show a read-only or full disk.

    Raises:
        UnavailableError: no file can be written in `folder`.
    """
    with plain_write_errors(folder), tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"\0")


def check_target(option: str, text: str) -> None:
    """Refuses a file that could not be written.

    Raises:
        SettingError: it is a folder.
        UnavailableError: no file can be written beside it.
    """
    if Path(text).is_dir():
        raise SettingError(f"{option} {text!r} is a folder: name a file in it.")
    check_writable(Path(text).parent)


def write_whole(path: Path, data: bytes) -> None:
    """Writes beside the target and renames: `path` is the old file or the new one, never a part.

    Raises:
        UnavailableError: the folder is not writable or the disk is full.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with plain_write_errors(path):
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def png_bytes(image: Image.Image, metadata: Mapping[str, Any] | None = None) -> bytes:
    """Encodes a PNG that carries `metadata`, if any, as JSON in its text chunk `qwen_l40s`."""
    from PIL.PngImagePlugin import PngInfo

    text = PngInfo()
    if metadata is not None:
        text.add_text(METADATA_KEY, json.dumps(metadata))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", pnginfo=text)
    return buffer.getvalue()
