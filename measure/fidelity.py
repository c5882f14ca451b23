"""Measures of what a lossy setting loses: relative errors, PSNR and LPIPS."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlparse

import numpy as np
import torch

from ..machine.card import first_line


class ErrorSum:
    """Relative error over many pieces: |found - exact| / |exact| in Frobenius norms of them all.

    The sums stay on the device, so that adding to them does not wait for a card.
    """

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None  # float64 [2]: squares of what is lost, of all

    def add(self, found: torch.Tensor, exact: torch.Tensor, weight: float = 1.0) -> None:
        """Adds a piece of any shape, whose norms count `weight` times."""
        lost = torch.linalg.vector_norm(found.float() - exact.float())
        sums = torch.stack((lost, torch.linalg.vector_norm(exact.float()))).double()
        sums = (sums * weight).square_()
        self._sums = sums if self._sums is None else self._sums.add_(sums)

    @property
    def error(self) -> float:
        """0 where nothing was added or everything is 0; NaN or infinity where a piece has it."""
        if self._sums is None:
            return 0.0
        lost, whole = self._sums.tolist()
        if whole == 0:
            return 0.0 if lost == 0 else math.inf
        return math.sqrt(lost / whole)


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """|found - exact| / |exact| in Frobenius norms."""
    total = ErrorSum()
    total.add(found, exact)
    return total.error


def psnr(found: np.ndarray, exact: np.ndarray) -> float:
    """Peak signal-to-noise ratio of 8-bit images, 10 log10(255^2 / mean squared error), in dB.

    Args:
        found, exact: uint8, of one shape.

    Returns:
        Infinity for equal images.
    """
    difference = found.astype(np.float64) - exact.astype(np.float64)
    mean = float(np.mean(difference * difference))
    return 10 * math.log10(255**2 / mean) if mean else math.inf


# LPIPS (Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric",
# 2018) with the AlexNet backbone, which published comparisons use. Both packages for it download
# that backbone: they are asked only where its file is here already.

# (found, exact), uint8 [H, W, 3] each, to 0 for equal images and about 1 for unlike ones.
Distance = Callable[[np.ndarray, np.ndarray], float]


def load_lpips() -> tuple[Distance | None, str]:
    """Returns the measure and the package that computes it, or None and what is missing."""
    package = next((name for name in ("lpips", "torchmetrics") if find_spec(name)), None)
    if package is None or not find_spec("torchvision"):
        return None, "not measured: run `pip install lpips torchvision`"
    try:
        backbone = _backbone()
        if not os.path.isfile(backbone):
            return None, (
                f"not measured: put {os.path.basename(backbone)}, torchvision's AlexNet weights "
                f"(nothing here downloads them), into {os.path.dirname(backbone)}"
            )
        with warnings.catch_warnings():  # of arguments that torchvision has renamed since
            warnings.simplefilter("ignore")
            network = _network(package).eval().requires_grad_(False)
    except Exception as error:  # packages of other torch versions raise anything
        return None, f"not measured: {package} fails: {first_line(error)}"

    @torch.inference_mode()
    def distance(found: np.ndarray, exact: np.ndarray) -> float:
        # [1, 3, H, W] in 0..1; both packages bring it to -1..1 with `normalize`.
        pair = (
            torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255
            for image in (found, exact)
        )
        options = {"normalize": True} if package == "lpips" else {}
        return float(network(*pair, **options))

    return distance, f"{package}, AlexNet"


def _backbone() -> str:
    """Where both packages look before they download."""
    from torchvision.models import AlexNet_Weights

    name = Path(urlparse(AlexNet_Weights.IMAGENET1K_V1.url).path).name
    return os.path.join(torch.hub.get_dir(), "checkpoints", name)


def _network(package: str) -> torch.nn.Module:
    if package == "lpips":
        from lpips import LPIPS

        return LPIPS(net="alex", verbose=False)
    from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

    return LearnedPerceptualImagePatchSimilarity(net_type="alex", normalize=True)
