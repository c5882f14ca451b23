"""Judges from pixels alone whether an image shows a scene: shapes, colours and places.

Classical image analysis, no model. The background is the median colour along the border; what
differs from it falls into connected blobs; each blob has a median colour, a place on the grid, and
the shape whose outline, fitted to its bounding box, overlaps it best.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import permutations

import numpy as np
import torch
from PIL import Image
from scipy import ndimage

from .painter import OUTLINES
from .scene import BACKGROUNDS, COLOURS, POSITIONS, SIZES, Scene, SceneObject

PALETTE = COLOURS | BACKGROUNDS
# A pixel belongs to an object when it is this far from the background (RGB distance). The closest
# pair of palette colours (white and pink) is 122 apart, so half a blended edge still counts.
CONTRAST = 55.0
# Smaller blobs are specks: the smallest object, a small star, covers 1.0 % of the image.
SPECK = 0.0025
# Half a grid step: farther from its place than that and another place is nearer.
PLACE_TOLERANCE = 0.135
# A blob has a shape when it overlaps that one this much, and every other one clearly less. Painted
# objects have at least 0.95; a star turned by 7 degrees still passes; at 0.65 a T was a cross.
SHAPE_OVERLAP = 0.7
SHAPE_MARGIN = 0.06
ASPECT_TOLERANCE = 1.2


@dataclass(frozen=True)
class Adherence:
    """What of a scene an image shows.

    Attributes:
        shape: every object has its shape.
        colours: the background and every object have their colour.
        position: every object is at its place, and there is none too many.
        size: every object is nearest to its size; reported, not part of the score.
    """

    shape: bool
    colours: bool
    position: bool
    size: bool

    @property
    def score(self) -> float:
        """Share of the three checks that hold: 1.0 is a fully right image."""
        return (self.shape + self.colours + self.position) / 3

    def as_dict(self) -> dict[str, bool | float]:
        return {"score": round(self.score, 3), **asdict(self)}


@dataclass(frozen=True)
class _Blob:
    shape: str | None
    colour: str
    x: float
    y: float
    half_side: float


def adherence(image: Image.Image | np.ndarray, scene: Scene) -> Adherence:
    """Compares an image with the scene that it should show.

    Args:
        image: PIL image, or uint8 / float array (H, W, 3) in 0..255.
        scene: the scene, as `parse_prompt` reads it.
    """
    pixels = np.asarray(
        image.convert("RGB") if isinstance(image, Image.Image) else image, dtype=np.float32
    )
    background, blobs = _analyse(pixels)
    if len(blobs) != len(scene.objects):
        return Adherence(shape=False, colours=False, position=False, size=False)
    return max(
        (_compare(order, background, scene) for order in permutations(blobs)),
        key=lambda result: (result.score, result.position, result.size),
    )


def _compare(blobs: tuple[_Blob, ...], background: str, scene: Scene) -> Adherence:
    pairs = list(zip(blobs, scene.objects, strict=True))
    return Adherence(
        shape=all(blob.shape == thing.shape for blob, thing in pairs),
        colours=background == scene.background
        and all(blob.colour == thing.colour for blob, thing in pairs),
        position=all(_at(blob, thing) for blob, thing in pairs),
        size=all(_size(blob, thing.shape) == thing.size for blob, thing in pairs),
    )


def _at(blob: _Blob, thing: SceneObject) -> bool:
    x, y = POSITIONS[thing.position]
    return max(abs(blob.x - x), abs(blob.y - y)) < PLACE_TOLERANCE


def _size(blob: _Blob, shape: str) -> str:
    left, top, right, bottom = _outline_box(shape)
    radius = blob.half_side / ((right - left + bottom - top) / 4)
    return min(SIZES, key=lambda name: abs(np.log(SIZES[name] / radius)))


def _analyse(pixels: np.ndarray) -> tuple[str, list[_Blob]]:
    """The background's colour and the blobs on it, of an image (H, W, 3)."""
    height, width, _ = pixels.shape
    edge = max(1, round(0.02 * min(height, width)))
    border = np.ones((height, width), bool)
    border[edge:-edge, edge:-edge] = False
    level = np.median(pixels[border], axis=0)
    labels, count = ndimage.label(np.linalg.norm(pixels - level, axis=2) > CONTRAST)
    blobs = []
    for index, box in enumerate(ndimage.find_objects(labels, count), start=1):
        rough = labels[box] == index
        if rough.sum() < SPECK * height * width:
            continue
        core = ndimage.binary_erosion(rough, iterations=2)
        colour = np.median(pixels[box][core if core.any() else rough], axis=0)
        mask, (rows, columns) = _halfway(pixels[box], rough, level, colour)
        top, left = box[0].start + rows.start, box[1].start + columns.start
        blobs.append(
            _Blob(
                shape=_shape(mask),
                colour=_palette_name(colour),
                x=(left + mask.shape[1] / 2) / width,
                y=(top + mask.shape[0] / 2) / height,
                half_side=sum(mask.shape) / 2 / (height + width),
            )
        )
    return _palette_name(level), blobs


def _halfway(
    pixels: np.ndarray, rough: np.ndarray, level: np.ndarray, colour: np.ndarray
) -> tuple[np.ndarray, tuple[slice, slice]]:
    """The blob's mask cut where background and colour mix half and half, and its box in `rough`.

    A soft edge widens the rough mask.
    """
    axis = colour - level
    mask = rough & ((pixels - level) @ axis > 0.5 * axis @ axis)
    box = ndimage.find_objects(mask.astype(np.int8))[0]
    return mask[box], box


def _palette_name(rgb: np.ndarray) -> str:
    return min(PALETTE, key=lambda name: float(np.linalg.norm(rgb - np.array(PALETTE[name]))))


def _shape(mask: np.ndarray) -> str | None:
    """The shape that a blob's mask overlaps best, or None when that is not much or not clear."""
    overlaps = {shape: _overlap(mask, shape) for shape in OUTLINES}
    name = max(overlaps, key=overlaps.__getitem__)
    runner_up = max(overlap for shape, overlap in overlaps.items() if shape != name)
    clear = overlaps[name] >= SHAPE_OVERLAP and overlaps[name] - runner_up >= SHAPE_MARGIN
    return name if clear else None


def _overlap(mask: np.ndarray, shape: str) -> float:
    """Intersection over union with the shape, fitted to the mask's box; 0 where the box differs."""
    height, width = mask.shape
    left, top, right, bottom = _outline_box(shape)
    aspect = (width / height) / ((right - left) / (bottom - top))
    if not 1 / ASPECT_TOLERANCE < aspect < ASPECT_TOLERANCE:
        return 0.0
    x = torch.linspace(left, right, 2 * width + 1)[1::2]
    y = torch.linspace(top, bottom, 2 * height + 1)[1::2]
    template = (OUTLINES[shape](*torch.meshgrid(x, y, indexing="xy")) < 0).numpy()
    return float((mask & template).sum() / (mask | template).sum())


@lru_cache(maxsize=len(OUTLINES))
def _outline_box(shape: str) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of a shape in units of its radius."""
    axis = torch.linspace(-1.3, 1.3, 521)
    x, y = torch.meshgrid(axis, axis, indexing="xy")
    inside = OUTLINES[shape](x, y) < 0
    left, right = x[inside].aminmax()
    top, bottom = y[inside].aminmax()
    return left.item(), top.item(), right.item(), bottom.item()
