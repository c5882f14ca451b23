"""`--plot`: checked before the work, written after it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SettingError, UnavailableError
from .images import check_target, png_bytes, write_whole

if TYPE_CHECKING:
    from PIL import Image


def check_plot(path: str) -> None:
    """Refuses what could not be written.

    Raises:
        SettingError: the name does not end in .png, or is a folder.
        UnavailableError: PIL is missing, or the folder cannot be written.
    """
    if not path.lower().endswith(".png"):
        raise SettingError(f"--plot {path!r} must end in .png.")
    if find_spec("PIL") is None:
        raise UnavailableError(
            "--plot needs pillow, not installed here: run `pip install pillow`, or leave it out."
        )
    check_target("--plot", path)


def write_plot(image: Image.Image, path: str) -> None:
    """Writes a PNG whole or not at all."""
    write_whole(Path(path), png_bytes(image))
