"""The outlines of the shapes, as signed distances (negative inside) in units of the radius.

x points right, y down.

Formulas after Inigo Quilez, "2D distance functions"
(https://iquilezles.org/articles/distfunctions2d/).
"""

from __future__ import annotations

import math

import torch


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
