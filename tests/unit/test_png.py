"""PNG files: the pixels that PIL reads, the bytes of the texts, the size beside PIL's."""

import io
import json
import struct
import tracemalloc
import zlib
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from qwen_l40s.cli.output import png_bytes
from qwen_l40s.hosts import png

ROOT = Path(__file__).resolve().parents[2]
PICTURES = [
    *sorted((ROOT / "docs" / "images").glob("*.png")),
    *sorted((ROOT / "workflows").glob("*.jpg")),
]
MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}


@pytest.fixture(params=["isal", "zlib"])
def deflater(request, monkeypatch):
    if request.param == "zlib":
        monkeypatch.setattr(png, "deflate", zlib)
    else:
        pytest.importorskip("isal", reason="it has no wheel for this machine")


def decoded(data):
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        return image


def chunks(data):
    place = 8
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        yield data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        place += length + 12


@pytest.mark.parametrize("channels", MODES)
@pytest.mark.parametrize("size", [(1, 1), (1, 700), (700, 1), (333, 517)])
def test_the_pixels_are_the_same(deflater, monkeypatch, channels, size):
    monkeypatch.setattr(png, "PART_BYTES", 5000)  # several parts, of several rows and of one
    random = np.random.default_rng(channels)
    noise = random.integers(0, 256, (*size, channels), np.uint8)
    slope = (np.add.outer(*map(np.arange, size))[..., None] // 3 + noise % 3).astype(np.uint8)
    for pixels in (noise, slope, noise[::-1, ::-1]):
        image = decoded(b"".join(png.encode(pixels)))
        assert image.mode == MODES[channels]
        assert np.array_equal(np.asarray(image).reshape(pixels.shape), pixels)


def test_texts_are_the_bytes_of_pil(deflater):
    info = PngInfo()
    info.add_text("prompt", '{"1": "na\\u00efve"}')
    info.add_text("qwen_l40s", "a text of 画 in UTF-8")
    pixels = np.zeros((2, 2, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", pnginfo=info)
    ours, theirs = (
        [chunk for chunk in chunks(data) if chunk[0] != b"IDAT"]
        for data in (b"".join(png.encode(pixels, info)), buffer.getvalue())
    )
    assert ours == theirs


def test_files_are_about_as_small_as_save_images():
    pytest.importorskip("isal", reason="it has no wheel for this machine")
    ratios = []
    for path in PICTURES:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        buffer = io.BytesIO()
        image.save(buffer, "PNG", compress_level=4)
        theirs = len(buffer.getvalue())
        ours = sum(map(len, png.encode(np.asarray(image))))
        assert ours <= max(1.18 * theirs, theirs + 2**16), path.name
        ratios.append(ours / theirs)
    assert median(ratios) <= 1.10


def test_a_large_image_takes_little_memory(deflater):
    pixels = np.zeros((1024, 8192, 4), np.float32)
    tracemalloc.start()
    try:
        for _ in png.encode(pixels):
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**23


def test_the_command_writes_its_images_with_it():
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (48, 64, 3), np.uint8))
    settings = {"prompt": "a 画", "seed": 3}
    pixels = b"".join(png.encode(np.asarray(image)))
    found = png_bytes(image, settings)
    assert decoded(found).text == {"qwen_l40s": json.dumps(settings)}
    kinds = {b"IHDR", b"IDAT", b"IEND"}
    assert [each for each in chunks(found) if each[0] in kinds] == list(chunks(pixels))
