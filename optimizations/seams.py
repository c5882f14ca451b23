"""Whether the lines where tiles meet show in an image."""

from __future__ import annotations

from collections.abc import Iterable

import torch

# How far from a seam, to each side, the lines lie that it is compared with: whole latent pixels,
# because the VAE makes steps of its own there.
NEIGHBOURS = range(8, 65, 8)


def seam_excess(image: torch.Tensor, rows: Iterable[int], columns: Iterable[int]) -> float:
    """How much stronger the image changes across seams than across lines beside them.

    Of each line it takes the mean absolute step between the pixels on both sides, and of the lines
    beside a seam the median, which an edge of the image along one of them leaves as it is.

    Args:
        image: (..., height, width), any range.
        rows, columns: a seam lies between row y - 1 and row y; at 8, 16, ... .

    Returns:
        The largest ratio of a seam's step to the usual one: about 1 where no seam shows; 0 without
        seams. Of an image that changes nowhere but at seams, infinity.
    """
    worst = 0.0
    for axis, seams in ((-2, sorted(set(rows))), (-1, sorted(set(columns)))):
        values = image.detach().to("cpu", torch.float64).movedim(axis, 0).flatten(1)
        steps = (values[1:] - values[:-1]).abs().mean(1)  # steps[y - 1] is across line y
        for seam in seams:
            beside = [
                line
                for distance in NEIGHBOURS
                for line in (seam - distance, seam + distance)
                if 0 < line < len(values) and line not in seams
            ]
            usual = steps[[line - 1 for line in beside]].median() if beside else steps.median()
            step = float(steps[seam - 1])
            if step:
                worst = max(worst, step / float(usual) if usual else float("inf"))
    return worst
