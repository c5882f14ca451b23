"""Paints scenes as images: the training data, and the truth that the judge is tested on.

Each shape is a signed distance to its outline (negative inside), so that edges are anti-aliased
over one pixel. Formulas after Inigo Quilez, "2D distance functions"
(https://iquilezles.org/articles/distfunctions2d/).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from .scene import BACKGROUNDS, COLOURS, POSITIONS, SHAPES, SIZES, Scene

IMAGE_SIDE = 256
# A scene is never painted twice the same: places shift by up to 2 % of the side, sizes by 6 %,
# colours by 7 levels.
SHIFT, STRETCH, TINT = 0.02, 0.06, 7.0
_FIELDS = 4  # shape, colour, position, size of one encoded object


def encode_scenes(scenes: Sequence[Scene]) -> torch.Tensor:
    """Scenes as int64 table indices (N, 1 + 2 x 4): the background, then each object.

    -1 stands where there is no second object.
    """
    rows = []
    for scene in scenes:
        row = [list(BACKGROUNDS).index(scene.background)]
        for thing in scene.objects:
            row += [
                SHAPES.index(thing.shape),
                list(COLOURS).index(thing.colour),
                list(POSITIONS).index(thing.position),
                list(SIZES).index(thing.size),
            ]
        rows.append(row + [-1] * (1 + 2 * _FIELDS - len(row)))
    return torch.tensor(rows)


def paint(
    scenes: Sequence[Scene] | torch.Tensor, *, generator: torch.Generator, side: int = IMAGE_SIDE
) -> torch.Tensor:
    """Paints scenes (or their encoding) on the generator's device.

    Returns:
        (N, 3, side, side) float32 in 0..255.
    """
    device = generator.device
    codes = (scenes if isinstance(scenes, torch.Tensor) else encode_scenes(scenes)).to(device)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=device, generator=generator) * 2 - 1

    def table(values: Iterable[float | tuple[int, ...]]) -> torch.Tensor:
        return torch.tensor(list(values), device=device, dtype=torch.float32)

    count = codes.shape[0]
    image = table(BACKGROUNDS.values())[codes[:, 0]] + TINT * rand(count, 3)
    image = image[:, :, None, None].expand(count, 3, side, side)
    axis = (torch.arange(side, device=device) + 0.5) / side
    for first in (1, 1 + _FIELDS):
        shape, colour, position, size = codes[:, first : first + _FIELDS].unbind(1)
        present = (shape >= 0)[:, None, None]
        centre = table(POSITIONS.values())[position] + SHIFT * rand(count, 2)
        radius = table(SIZES.values())[size] * (1 + STRETCH * rand(count))
        x = (axis[None, None, :] - centre[:, 0, None, None]) / radius[:, None, None]
        y = (axis[None, :, None] - centre[:, 1, None, None]) / radius[:, None, None]
        distance = _distance(shape, x.expand(-1, side, -1), y.expand(-1, -1, side))
        pixels = distance * radius[:, None, None] * side
        cover = ((0.5 - pixels).clamp(0, 1) * present)[:, None]
        tint = (table(COLOURS.values())[colour] + TINT * rand(count, 3))[:, :, None, None]
        image = torch.lerp(image, tint, cover)
    return image.clamp(0, 255)


def _distance(shape: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Distance to the outline of each scene's shape, (N, H, W) as `x` and `y`.

    All are in units of the radius; x points right, y down.
    """
    out = torch.full_like(x + y, 4.0)
    for index, name in enumerate(SHAPES):
        rows = (shape == index).nonzero()[:, 0]
        if len(rows):
            out[rows] = OUTLINES[name](x[rows], y[rows])
    return out


def _circle(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.hypot(x, y) - 1.0


def _square(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.maximum(x.abs(), y.abs()) - 0.88


def _diamond(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.abs() + y.abs() - 1.08) / math.sqrt(2)


def _triangle(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Upright, its base at y = 0.85, its tip at y = -1."""
    slope = 1.85 / 1.05
    sides = (slope * x.abs() - (y + 1)) / math.hypot(slope, 1)
    return torch.maximum(sides, y - 0.85)


def _star(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Five points of radius 1.1, inner radius 0.42 of it.

    The plane is folded into half a wedge, which leaves one straight edge.
    """
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


def _ring(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (torch.hypot(x, y) - 0.78).abs() - 0.22


def _heart(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scale = 1.75
    px, py = x.abs() / scale, (0.92 - y) / scale
    lobe = torch.hypot(px - 0.25, py - 0.75) - math.sqrt(2) / 4
    half = 0.5 * (px + py).clamp(min=0)
    squared = torch.minimum(px**2 + (py - 1) ** 2, (px - half) ** 2 + (py - half) ** 2)
    tip = squared.sqrt() * torch.sign(px - py)
    return torch.where(px + py > 1, lobe, tip) * scale


OUTLINES = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
    "diamond": _diamond,
    "ring": _ring,
    "heart": _heart,
}
