"""Image files on this machine, opened with Pillow."""

from __future__ import annotations

import warnings
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from ..errors import SettingError

# What is asked of Pillow, so that a file cannot reach its readers of documents and video.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


def check_image(path: Path, used_by: str) -> None:
    """Reads the first picture of a file to its end.

    Args:
        used_by: the node that wants it, for the message.

    Raises:
        SettingError: the file is missing, empty, no image, damaged, cut off or too large.
    """
    try:
        if path.stat().st_size == 0:
            raise SettingError(f"{path}, which {used_by} loads, is empty: give an image.")
        with warnings.catch_warnings():
            # From 89 megapixels Pillow warns, and cameras make those; from 179 it refuses.
            warnings.simplefilter("ignore")
            with Image.open(path, formats=_formats()) as image:
                image.load()
    except SettingError:
        raise
    except UnidentifiedImageError as error:
        raise SettingError(
            f"{path}, which {used_by} loads, is no image that can be read: give one of "
            f"{', '.join(FORMATS)}."
        ) from error
    except Image.DecompressionBombError as error:
        raise SettingError(
            f"{path}, which {used_by} loads, is too large ({error}): scale it down first."
        ) from error
    except Exception as error:  # a damaged file makes Pillow's readers fail in many ways
        raise SettingError(
            f"{path}, which {used_by} loads, cannot be read ({error}): save the image again."
        ) from error


def png_text(path: Path, key: str) -> str | None:
    """A text chunk of a PNG file; None where it has no such chunk.

    Raises:
        SettingError: the file is no PNG or is damaged.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path, formats=("PNG",)) as image:
                text = image.info.get(key)
    except Exception as error:  # a damaged file makes Pillow's readers fail in many ways
        raise SettingError(
            f"{path} cannot be read as a PNG ({error}): give a workflow file in API form, or a PNG "
            "that ComfyUI saved."
        ) from error
    return text if isinstance(text, str) else None


def _formats() -> list[str]:
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]
