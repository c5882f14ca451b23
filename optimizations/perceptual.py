"""LPIPS of two images, where a package for it and the weights of its backbone are here already.

Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric", 2018, with
the AlexNet backbone, which published comparisons use. Both packages download that backbone when it
is missing: they are asked only when its file is there, because nothing is downloaded here.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlparse

import numpy as np
import torch

from .hardware import first_line

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
