"""Measures what quantizing loses, at layers' outputs and in images, and what to keep in bf16.

Errors of layers are taken as independent, so that their squares add up. With all 72 layers of the
micro model in fp8 the noise prediction is off by 0.0940; the root of the summed squares is 0.0942.
In int8 they are 0.0346 and 0.0349.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..hosts.diffusers.quantized import QuantizedLinear, quantizable, tensor_core_product
from ..spec.formats import BYTES_PER_SCALE
from ..verdict import first_line

# (found, exact), uint8 [H, W, 3] each, to 0 for equal images and about 1 for unlike ones.
Distance = Callable[[np.ndarray, np.ndarray], float]


class LayerError(NamedTuple):
    layer: str  # such as `transformer_blocks.0.attn.to_q`
    error: float  # relative, of its output
    outlier: float  # its largest activation, in root mean squares of the same pass
    bytes: int  # that it takes more when it stays in bf16 than in 8 bits by rows


def norms(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Returns [|found - exact|, |exact|] in Frobenius norms, in fp64 and on the device."""
    pair = found.float() - exact.float(), exact
    return torch.stack([torch.linalg.vector_norm(it, dtype=torch.float64) for it in pair])


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns |found - exact| / |exact|; 0 where both are 0, NaN or infinity where one has it."""
    return _ratio([norms(found, exact)])


def _ratio(pieces: Sequence[torch.Tensor]) -> float:
    lost, whole = torch.stack([*pieces]).norm(dim=0).tolist()
    return lost / whole if whole else math.inf if lost else 0.0


@contextmanager
def measured_layers(
    transformer: torch.nn.Module, precision: str, keep: Sequence[str] = ()
) -> Iterator[list[LayerError]]:
    """Multiplies every activation in the format too, inside of it, and compares; the list holds the
    layers afterwards. Weights are rounded anew in each pass, which takes no memory.
    """
    found: list[LayerError] = []
    get: Any = transformer.get_submodule
    modules = {name: get(name) for name in quantizable(transformer, keep)}
    # Of each layer's passes: on the device, so that no card waits.
    pieces: dict[Any, list[torch.Tensor]] = {layer: [] for layer in modules.values()}

    def compare(layer: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        x, product = inputs[0], tensor_core_product(precision, layer.weight.device)
        outlier = x.abs().amax() / x.float().square().mean().sqrt()
        lost = norms(QuantizedLinear(layer, product)(x), output)
        pieces[layer].append(torch.cat([lost, outlier.double()[None]]))

    handles = [layer.register_forward_hook(compare) for layer in pieces]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
    for name, layer in ((name, layer) for name, layer in modules.items() if pieces[layer]):
        rows, columns = layer.weight.shape
        outlier = max(float(piece[2]) for piece in pieces[layer])
        error = _ratio([piece[:2] for piece in pieces[layer]])
        found.append(LayerError(name, error, outlier, rows * columns - rows * BYTES_PER_SCALE))


def propose_keep(layers: Sequence[LayerError], target: float) -> list[LayerError]:
    """Keeps layers of the most squared error a byte until the others' sum is at most `target`."""
    kept: list[LayerError] = []
    rest = sum(layer.error**2 for layer in layers)
    for layer in sorted(layers, key=lambda layer: -(layer.error**2) / max(1, layer.bytes)):
        if rest > target**2:
            kept.append(layer)
            rest -= layer.error**2
    return [layer for layer in layers if layer in kept]


def keep_patterns(kept: Sequence[str], layers: Sequence[str]) -> list[str]:
    """Finds patterns for `--keep` that match `kept` alone: one for a kind kept in every block."""

    def kind(layer: str) -> str:
        return layer.split(".", 2)[2]

    some = {kind(layer) for layer in layers if layer not in kept}
    patterns = (layer if kind(layer) in some else f"*.{kind(layer)}" for layer in kept)
    return [*dict.fromkeys(patterns)]


def psnr(found: np.ndarray, exact: np.ndarray) -> float:
    """Returns the peak signal-to-noise ratio of uint8 images in dB; infinity for equal ones."""
    mean = float(np.mean((found.astype(np.float64) - exact) ** 2))
    return 10 * math.log10(255**2 / mean) if mean else math.inf


def load_lpips() -> tuple[Distance | None, str]:
    """Returns LPIPS (Zhang et al., 2018) with the AlexNet backbone and what computes it, or None
    and what is missing. The package downloads the backbone: it is asked only where that file is.
    """
    if not (find_spec("lpips") and find_spec("torchvision")):
        return None, "not measured: run `pip install lpips torchvision`"
    try:
        from lpips import LPIPS
        from torchvision.models import AlexNet_Weights

        name = AlexNet_Weights.IMAGENET1K_V1.url.rpartition("/")[2]
        folder = Path(torch.hub.get_dir(), "checkpoints")
        if not (folder / name).is_file():
            why = f"put {name}, torchvision's AlexNet weights (nothing here downloads them), into"
            return None, f"not measured: {why} {folder}"
        with warnings.catch_warnings():  # of arguments that torchvision has renamed since
            warnings.simplefilter("ignore")
            network = LPIPS(net="alex", verbose=False).eval().requires_grad_(False)
    except Exception as error:  # a package of another torch version raises anything
        return None, f"not measured: lpips fails: {first_line(error)}"

    @torch.inference_mode()
    def distance(*pair: np.ndarray) -> float:
        # [1, 3, H, W] in 0..1, which `normalize` brings to -1..1.
        images = (torch.from_numpy(np.array(it)).permute(2, 0, 1)[None] / 255 for it in pair)
        return float(network(*images, normalize=True))

    return distance, "lpips, AlexNet"
