"""Measures of what a lossy setting loses: relative errors, PSNR, and planted outliers.

Random Gaussian layers have no outliers, and trained ones do: a few channels that are many times as
large as all others. A format that looks good without them is measured with them too.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlparse

import numpy as np
import torch

from ..machine.card import first_line

OUTLIER_SHARE = 0.001  # of the channels
OUTLIER_FACTORS = (30.0, 100.0)
# Where they are planted, in this order: channels of the activations, the weight's input channels
# (other ones than the activations'), its output channels.
PLACES: Mapping[str, tuple[bool, bool, bool]] = {
    "activations": (True, False, False),
    "weight columns": (False, True, False),
    "weight rows": (False, False, True),
    "activations and weight columns": (True, True, False),
}


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


def outlier_channels(
    width: int, generator: torch.Generator, share: float = OUTLIER_SHARE
) -> torch.Tensor:
    """Draws the indices of a share of `width` channels, at least one; int64, on the CPU."""
    return torch.randperm(width, generator=generator)[: max(1, round(width * share))]


def plant(x: torch.Tensor, channels: torch.Tensor, factor: float, dim: int = -1) -> torch.Tensor:
    """Multiplies channels of x along `dim`; returns a new tensor of its dtype."""
    factors = torch.ones(x.shape[dim], device=x.device)
    factors[channels.to(x.device)] = factor
    shape = [1] * x.dim()
    shape[dim] = -1
    return (x.float() * factors.view(shape)).to(x.dtype)


def planted_operands(
    m: int, n: int, k: int, place: str = "", factor: float = 1.0, *, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gaussian activations and weights of one layer, with outliers.

    The Gaussian numbers and the channels are the same for every place and factor of a seed.

    Args:
        place: a key of `PLACES`, or empty for no outliers.

    Returns:
        x (M, K) of variance 1 and weight (N, K) of variance 1 / K, before the outliers are planted;
        fp32 of values that bf16 has.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator)
    weight = torch.randn(n, k, generator=generator) * k**-0.5
    drawn = [outlier_channels(width, generator) for width in (k, k, n)]
    if place:
        in_x, in_columns, in_rows = PLACES[place]
        x = plant(x, drawn[0], factor) if in_x else x
        weight = plant(weight, drawn[1], factor) if in_columns else weight
        weight = plant(weight, drawn[2], factor, dim=0) if in_rows else weight
    return x.bfloat16().float(), weight.bfloat16().float()


# LPIPS of two images, where a package for it and the weights of its backbone are here already.
#
# Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric", 2018, with
# the AlexNet backbone, which published comparisons use. Both packages download that backbone when
# it
# is missing: they are asked only when its file is there, because nothing is downloaded here.

# (found, exact), uint8 [H, W, 3] each, to 0 for equal images and about 1 for unlike ones.
Distance = Callable[[np.ndarray, np.ndarray], float]


def load_lpips() -> tuple[Distance | None, str]:
    """Returns the measure and the package that computes it, or None and what is missing."""
    package = next((name for name in ("lpips", "torchmetrics") if find_spec(name)), None)
    if package is None or not find_spec("torchvision"):
        return None, "not measured: `pip install lpips torchvision` brings what computes it"
    try:
        backbone = _backbone()
        if not os.path.isfile(backbone):
            return None, (
                f"not measured: the weights of its backbone, {os.path.basename(backbone)} of "
                "torchvision's AlexNet, are not downloaded by this command and must lie in "
                f"{os.path.dirname(backbone)}"
            )
        with warnings.catch_warnings():  # of arguments that torchvision has renamed since
            warnings.simplefilter("ignore")
            network = _network(package).eval().requires_grad_(False)
    except Exception as error:  # packages of other torch versions raise anything
        return None, f"not measured: {package} is installed and fails: {first_line(error)}"

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
