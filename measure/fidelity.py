"""What quantizing loses: at each layer's output and in images, and which layers to keep in bf16.

Errors of layers are taken as independent, so that they add in squares: with all 72 layers of the
micro model in fp8 the noise prediction is off by 0.0940, and the root of the summed squares is
0.0942; in int8 by 0.0346, and 0.0349.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open

from ..hosts.diffusers.quantized import chosen_layers, quantizable, tensor_core_product
from ..loaders.quantize import check_finite, quantize_rows, row_format
from ..loaders.source import Source
from ..spec.formats import BYTES_PER_SCALE
from ..verdict import first_line

GAUSSIAN_ROWS = 256

# (found, exact), uint8 [H, W, 3] each, to 0 for equal images and about 1 for unlike ones.
Distance = Callable[[np.ndarray, np.ndarray], float]


@dataclass(frozen=True)
class LayerError:
    """Says what quantizing one layer loses."""

    layer: str  # such as `transformer_blocks.0.attn.to_q`
    error: float  # relative, of its output
    # Its largest activation, in root mean squares of the same pass; None of Gaussian ones.
    outlier: float | None
    bytes: int  # that it takes more when it stays in bf16


class LayerSum:
    """Adds up a layer's error, |found - exact| / |exact| in Frobenius norms of all passes.

    The sums stay on the device, so that adding to them does not wait for a card.
    """

    def __init__(self) -> None:
        self._squares: list[torch.Tensor] = []  # float64 [2] a piece: of what is lost, of all
        self._outliers: list[torch.Tensor] = []

    def add(self, found: torch.Tensor, exact: torch.Tensor, x: torch.Tensor | None = None) -> None:
        """Adds a piece of any shape; `x` are the activations that it was made from."""
        pair = (found.float() - exact.float(), exact.float())
        self._squares.append(torch.stack([it.norm() for it in pair]).double().square())
        if x is not None:
            self._outliers.append(x.abs().amax() / x.float().square().mean().sqrt())

    @property
    def error(self) -> float:
        """0 where nothing was added or everything is 0; NaN or infinity where a piece has it."""
        lost, whole = sum(self._squares, torch.zeros(2)).tolist()
        return math.sqrt(lost / whole) if whole else math.inf if lost else 0.0

    @property
    def outlier(self) -> float | None:
        return max(map(float, self._outliers), default=None)


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns |found - exact| / |exact| in Frobenius norms."""
    total = LayerSum()
    total.add(found, exact)
    return total.error


def _multiplied(
    product: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    rotation = row_format(product.format, weight.shape[1]).rotation
    values, scale = quantize_rows(weight, product.format, rotation=rotation)
    return product.linear(x, values, scale, bias, rotation)


@contextmanager
def measured_layers(
    transformer: torch.nn.Module, precision: str, keep: Sequence[str] = ()
) -> Iterator[list[LayerError]]:
    """Inside it, every activation of every layer is multiplied in the format too, and compared.

    Yields:
        A list that holds the layers afterwards. Weights are rounded anew in each pass, which takes
        time and no memory.
    """
    handles, found = [], []
    layers = {name: transformer.get_submodule(name) for name in quantizable(transformer, keep)}
    sums = {name: LayerSum() for name in layers}
    for name, layer in layers.items():
        product = tensor_core_product(precision, layer.weight.device)

        def compare(layer, inputs, output, total=sums[name], product=product):
            out = _multiplied(product, inputs[0], layer.weight, layer.bias)
            total.add(out, output, inputs[0])

        handles.append(layer.register_forward_hook(compare))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
    for name, total in sums.items():
        size = bytes_to_keep(*layers[name].weight.shape)
        found.append(LayerError(name, total.error, total.outlier, size))


def file_errors(
    source: Source,
    precision: str,
    keep: Sequence[str] = (),
    *,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> list[LayerError]:
    """Measures the layers of a file one by one, on Gaussian activations: they have no outliers.

    Args:
        source: a transformer that is not quantized.
        device: where it is computed; one weight at a time is there.

    Raises:
        SettingError: a pattern matches no layer, or the patterns leave none.
        CheckpointError: a weight holds NaN or infinity.
    """
    where = torch.device(device)
    product = tensor_core_product(precision, where)
    generator = torch.Generator().manual_seed(0)
    names = {source.part.prefix + name: name for name in source.tensors if name.endswith(".weight")}
    layers = {stored: name.removesuffix(".weight") for stored, name in names.items()}
    chosen = chosen_layers(layers.values(), keep)
    found = []
    for header in source.shards.headers:
        with safe_open(header.path, framework="pt") as file:
            for stored in (it for it in header.tensors if layers.get(it) in chosen):
                weight = file.get_tensor(stored).to(where).bfloat16()
                check_finite(header.path, stored, weight)
                x = torch.randn(GAUSSIAN_ROWS, weight.shape[1], generator=generator)
                x = x.to(where, torch.bfloat16)
                error = relative_error(_multiplied(product, x, weight), F.linear(x, weight))
                size = bytes_to_keep(*weight.shape)
                found.append(LayerError(layers[stored], error, None, size))
                if progress is not None:
                    progress(len(found), len(chosen))
    return found


# Which layers to keep in bf16.


@dataclass(frozen=True)
class KeepList:
    """Names layers that stay in bf16."""

    layers: tuple[str, ...]
    patterns: tuple[str, ...]  # shell patterns for `--keep` that match these layers and no other
    bytes: int  # that they take more than quantized
    error: float  # summed, of all other layers


def bytes_to_keep(rows: int, columns: int) -> int:
    """Counts how much more a weight [rows, columns] takes in bf16 than in 8 bits by rows."""
    return rows * columns - rows * BYTES_PER_SCALE


def summed_error(errors: Iterable[float]) -> float:
    return math.sqrt(sum(error * error for error in errors))


def propose_keep(layers: Sequence[LayerError], target: float) -> KeepList:
    """Keeps layers until the others' summed error is at most `target`.

    Greedy: the most squared error for a byte first; then whatever is not needed any more is given
    back, the largest first. That is the smallest set of layers of one size, and close to it for
    the two sizes that there are.
    """
    kept: list[LayerError] = []
    rest = sum(layer.error**2 for layer in layers)
    for layer in sorted(layers, key=lambda layer: -(layer.error**2) / max(1, layer.bytes)):
        if rest <= target**2:
            break
        kept.append(layer)
        rest -= layer.error**2
    for layer in sorted(kept, key=lambda layer: -layer.bytes):
        if rest + layer.error**2 <= target**2:
            kept.remove(layer)
            rest += layer.error**2
    names = tuple(sorted((layer.layer for layer in kept), key=_place))
    return KeepList(
        names,
        keep_patterns(names, [layer.layer for layer in layers]),
        sum(layer.bytes for layer in kept),
        summed_error(layer.error for layer in layers if layer.layer not in names),
    )


def keep_patterns(kept: Collection[str], layers: Collection[str]) -> tuple[str, ...]:
    """Finds patterns for `--keep` that match `kept` and no other of `layers`.

    A kind of layer that is kept in every block is one pattern, and so is a whole block.
    """
    wanted = frozenset(kept)
    found: list[str] = []
    left = set(wanted)
    for form in ("*.{2}", "{0}.{1}.*"):  # a kind of layer, a block
        groups: dict[str, set[str]] = {}
        for layer in layers:
            groups.setdefault(form.format(*layer.split(".", 2)), set()).add(layer)
        for pattern, members in groups.items():
            if members <= wanted and len(members) > 1 and members & left:
                found.append(pattern)
                left -= members
    return (*found, *sorted(left, key=_place))


def _place(layer: str) -> tuple[int, str]:
    return int(layer.split(".", 2)[1]), layer


# Images.


def psnr(found: np.ndarray, exact: np.ndarray) -> float:
    """Returns the peak signal-to-noise ratio of 8-bit images, 10 log10(255^2 / MSE), in dB.

    Args:
        found, exact: uint8, of one shape.

    Returns:
        Infinity for equal images.
    """
    difference = found.astype(np.float64) - exact.astype(np.float64)
    mean = float(np.mean(difference * difference))
    return 10 * math.log10(255**2 / mean) if mean else math.inf


def load_lpips() -> tuple[Distance | None, str]:
    """Returns LPIPS (Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual
    Metric", 2018) with the AlexNet backbone and what computes it, or None and what is missing.

    The package downloads the backbone: it is asked only where that file is here already.
    """
    if not (find_spec("lpips") and find_spec("torchvision")):
        return None, "not measured: run `pip install lpips torchvision`"
    try:
        from lpips import LPIPS
        from torchvision.models import AlexNet_Weights

        name = AlexNet_Weights.IMAGENET1K_V1.url.rpartition("/")[2]
        folder = os.path.join(torch.hub.get_dir(), "checkpoints")
        if not os.path.isfile(os.path.join(folder, name)):
            return None, (
                f"not measured: put {name}, torchvision's AlexNet weights (nothing here downloads "
                f"them), into {folder}"
            )
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
