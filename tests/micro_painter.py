"""Paints scenes as images: the truth that the judge is tested on.

Each shape is a signed distance to its outline, so that edges are anti-aliased over one pixel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from qwen_l40s.micro.judge import OUTLINES
from qwen_l40s.micro.scene import BACKGROUNDS, COLOURS, POSITIONS, SHAPES, SIZES, Scene

IMAGE_SIDE = 256
# A scene is never painted twice the same: places shift by up to 2 % of the side, sizes by 6 %,
# colours by 7 levels.
SHIFT, STRETCH, TINT = 0.02, 0.06, 7.0
_FIELDS = 4  # shape, colour, position, size of one encoded object


def encode_scenes(scenes: Sequence[Scene]) -> torch.Tensor:
    """Encodes scenes as int64 table indices (N, 1 + 2 x 4): the background, then each object.

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
    """Measures how far each scene's outline is, (N, H, W) as `x` and `y`.

    All are in units of the radius; x points right, y down.
    """
    out = torch.full_like(x + y, 4.0)
    for index, name in enumerate(SHAPES):
        rows = (shape == index).nonzero()[:, 0]
        if len(rows):
            out[rows] = OUTLINES[name](x[rows], y[rows])
    return out
