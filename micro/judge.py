"""Judges from pixels alone whether an image shows a scene: shapes, colours and places. What differs
from the border's median colour falls into blobs, whose edges the outlines are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import permutations
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy import ndimage

from ..caches import remembered
from .scene import BACKGROUNDS, COLOURS, POSITIONS, SIZES, Scene, SceneObject

PALETTE = COLOURS | BACKGROUNDS
# A pixel belongs to an object when it is this far from the background (RGB distance). The closest
# pair of palette colours (white and pink) is 122 apart, so half a blended edge still counts.
CONTRAST = 55.0
# Smaller blobs are specks: the smallest object, a small star, covers 1.0 % of the image.
SPECK = 0.0025
# Half a grid step: farther from its place than that and another place is nearer.
PLACE_TOLERANCE = 0.135
# A blob has the shape whose edge, tilted a little or not, its own edge follows best, if it stays
# this near on average, in radii: 1.5 pixels on a small object. Generated objects stay within 0.01;
# a hexagon is 0.055 from a circle, a U 0.1 from a square.
EDGE_DEVIATION = 0.05
TILTS = (-8, -4, 0, 4, 8)  # degrees
ASPECT_TOLERANCE = 1.2


# The outlines of the shapes: signed distances (negative inside) in units of the radius, x right and
# y down. Formulas after Inigo Quilez, "2D distance functions"
# (https://iquilezles.org/articles/distfunctions2d/).


def _triangle(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    slope = 1.85 / 1.05
    sides = (slope * x.abs() - (y + 1)) / math.hypot(slope, 1)
    return torch.maximum(sides, y - 0.85)


def _star(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    # The plane is folded into half a wedge, which leaves one straight edge.
    outer, inner, wedge = 1.1, 0.46, math.pi / 5
    angle = torch.atan2(x, -(y - 0.08))
    folded = (angle - 2 * wedge * torch.round(angle / (2 * wedge))).abs()
    radius = torch.hypot(x, y - 0.08)
    along, across = radius * torch.cos(folded), radius * torch.sin(folded)
    tip, notch = (outer, 0.0), (inner * math.cos(wedge), inner * math.sin(wedge))
    edge = (notch[0] - tip[0], notch[1] - tip[1])
    return ((along - tip[0]) * -edge[1] + (across - tip[1]) * edge[0]) / -math.hypot(*edge)


def _cross(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    arm = 0.33
    wide = torch.maximum(x.abs() - 1.0, y.abs() - arm)
    tall = torch.maximum(x.abs() - arm, y.abs() - 1.0)
    return torch.minimum(wide, tall)


def _heart(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scale = 1.75
    px, py = x.abs() / scale, (0.92 - y) / scale
    lobe = torch.hypot(px - 0.25, py - 0.75) - math.sqrt(2) / 4
    half = 0.5 * (px + py).clamp(min=0)
    squared = torch.minimum(px**2 + (py - 1) ** 2, (px - half) ** 2 + (py - half) ** 2)
    tip = squared.sqrt() * torch.sign(px - py)
    return torch.where(px + py > 1, lobe, tip) * scale


OUTLINES = {
    "circle": lambda x, y: torch.hypot(x, y) - 1.0,
    "square": lambda x, y: torch.maximum(x.abs(), y.abs()) - 0.88,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
    "diamond": lambda x, y: (x.abs() + y.abs() - 1.08) / math.sqrt(2),
    "ring": lambda x, y: (torch.hypot(x, y) - 0.78).abs() - 0.22,
    "heart": _heart,
}


@dataclass(frozen=True)
class Adherence:
    """Says what of a scene an image shows, of all its objects."""

    shape: bool
    colours: bool  # that of the background too
    position: bool  # and no object too many
    size: bool  # reported, not part of the score

    @property
    def score(self) -> float:
        """Returns the share of the three checks that hold: 1.0 is a fully right image."""
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
    """Compares an image, of PIL or (H, W, 3) in 0..255, with the scene that it should show."""
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
    """Cuts a mask where background and colour mix half and half; returns its box in `rough`."""
    axis = colour - level
    mask = rough & ((pixels - level) @ axis > 0.5 * axis @ axis)
    box = ndimage.find_objects(mask.astype(np.int8))[0]
    return mask[box], box


def _palette_name(rgb: np.ndarray) -> str:
    return min(PALETTE, key=lambda name: float(np.linalg.norm(rgb - np.array(PALETTE[name]))))


def _shape(mask: np.ndarray) -> str | None:
    for tilts in ((0,), TILTS):  # upright first: it is what most are, and a fifth of the work
        deviations = {shape: _edge_deviation(mask, shape, tilts) for shape in OUTLINES}
        name = min(deviations, key=deviations.__getitem__)
        if deviations[name] <= EDGE_DEVIATION:
            return name
    return None


def _edge_deviation(mask: np.ndarray, shape: str, tilts: Sequence[int]) -> float:
    """Measures how far the mask's edge is from the shape's on average, in radii, at the best tilt.

    An edge that is off by d over the length P costs d P of the area A, so the overlap falls to
    about 1 - d P / A: thin shapes lose more by the same d.
    """
    overlap = max(_tilted_overlap(mask, shape, tilt) for tilt in tilts)
    return (1 - overlap) / _edge_per_area(shape)


def _tilted_overlap(mask: np.ndarray, shape: str, tilt: int) -> float:
    """Returns intersection over union with the tilted shape; 0 where boxes' proportions differ."""
    height, width = mask.shape
    left, top, right, bottom = _outline_box(shape, tilt)
    aspect = (width / height) / ((right - left) / (bottom - top))
    if not 1 / ASPECT_TOLERANCE < aspect < ASPECT_TOLERANCE:
        return 0.0
    x = torch.linspace(left, right, 2 * width + 1)[1::2]
    y = torch.linspace(top, bottom, 2 * height + 1)[1::2]
    template = _inside(shape, tilt, x, y)
    return float((mask & template).sum() / (mask | template).sum())


def _inside(shape: str, tilt: int, x: torch.Tensor, y: torch.Tensor) -> np.ndarray:
    """Tells which points of the grid, x right and y down in radii, lie in the tilted shape."""
    x, y = torch.meshgrid(x, y, indexing="xy")
    cos, sin = math.cos(math.radians(tilt)), math.sin(math.radians(tilt))
    return (OUTLINES[shape](cos * x + sin * y, cos * y - sin * x) < 0).numpy()


@remembered
@lru_cache(maxsize=len(OUTLINES))
def _edge_per_area(shape: str) -> float:
    """Returns the outline's length over the area inside, in 1 / radius; a circle has 2."""
    axis, band = torch.linspace(-1.6, 1.6, 801), 0.01
    distance = OUTLINES[shape](*torch.meshgrid(axis, axis, indexing="xy"))
    return float((distance.abs() < band).sum() / (2 * band) / (distance < 0).sum())


@remembered
@lru_cache(maxsize=len(OUTLINES) * len(TILTS))
def _outline_box(shape: str, tilt: int = 0) -> tuple[float, float, float, float]:
    """Returns left, top, right, bottom of a tilted shape in units of its radius."""
    axis = torch.linspace(-1.3, 1.3, 521)
    inside: Any = _inside(shape, tilt, axis, axis)
    rows, columns = inside.any(axis=1).nonzero()[0], inside.any(axis=0).nonzero()[0]
    corners = (columns[0], rows[0], columns[-1], rows[-1])
    left, top, right, bottom = (axis[int(corner)].item() for corner in corners)
    return left, top, right, bottom
