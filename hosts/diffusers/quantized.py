"""Builds a diffusers transformer whose block layers hold fp8 or int8 weights, and multiplies them.

The layers are replaced one by one in the model that is there, so that its bf16 weights go as the
quantized ones come: both never stand in memory together.

On a CPU `choose_gemm` expands the weights and leaves the activations alone. A Gaussian layer of
3072 x 3072 is then off by 0.026 in fp8 and not by 0.037, in int8 by 0.0085 and not by 0.0120. So
what judges fidelity rounds both operands on any device, as tensor cores need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import SettingError, UnavailableError
from ...loaders.quantize import quantize_rows, row_format
from ...loaders.quantized_file import check_precision, choose_layers
from ...optimizations import reference
from ...optimizations.linear import Gemm, choose_gemm
from ...optimizations.patches import put
from ...spec.formats import RowFormat


@dataclass(frozen=True)
class PlainProduct:
    """Multiplies as `Gemm`, in plain torch: 8-bit operands, with a scale for each row of both."""

    format: str

    def __str__(self) -> str:
        return f"{self.format} in plain torch, with a scale for each row of weights and activations"

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        rotation: int = 0,
    ) -> torch.Tensor:
        """Multiplies (..., K), which it rounds, with (N, K) to (..., N)."""
        n, k = weight.shape
        form = RowFormat(self.format, rotation)
        rows, row_scale = reference.row_quantize(x.reshape(-1, k), form)
        out = reference.scaled_gemm(rows, weight, row_scale, scale, bias, x.dtype)
        return out.view(*x.shape[:-1], n)


def plain_product(format: str, device: torch.device) -> Gemm | PlainProduct:
    """Returns what multiplies with rows of scales for both operands, without a card's kernels."""
    if format == "int8" and device.type == "cpu":
        try:  # exact sums too, in a third of the reference's time
            gemm = choose_gemm(format, device, backend="int_mm")
            return replace(gemm, reason="the numbers of tensor cores, on the CPU")
        except UnavailableError:  # a torch without it
            pass
    reference.largest_of(format)
    return PlainProduct(format)


def tensor_core_product(format: str, device: torch.device) -> Gemm | PlainProduct:
    """Returns what runs on a card, or gives its numbers in plain torch where nothing does."""
    gemm = choose_gemm(format, device)
    return plain_product(format, device) if gemm.weight_only else gemm


class QuantizedLinear(torch.nn.Module):
    """Computes a linear layer of 8-bit values and a scale for each output row.

    Attributes:
        weight: (N, K), float8_e4m3fn or int8.
        weight_scale: (N, 1), fp32.
        form: how the rows are quantized that it multiplies.
        bias: (N,) in the dtype of the layer that it was, or None.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor

    def __init__(self, layer: torch.nn.Linear, product: Gemm | PlainProduct) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.form = row_format(product.format, layer.in_features)
        weight, rotation = layer.weight.detach(), self.form.rotation
        values, scale = quantize_rows(weight, product.format, rotation=rotation)
        self.register_buffer("weight", values)
        self.register_buffer("weight_scale", scale)
        self.bias = layer.bias
        self.product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes (..., K) to (..., N) in x's dtype."""
        return self.product.linear(x, self.weight, self.weight_scale, self.bias, self.form.rotation)

    def _apply(self, fn: Callable, recurse: bool = True) -> QuantizedLinear:
        # `.to(dtype)` of a whole model means its other tensors: cast, the values would be numbers
        # of another format. They still move with it.
        tensors_of_layer = {"weight": self.weight, "weight_scale": self.weight_scale}
        super()._apply(fn, recurse)
        for name, tensor in tensors_of_layer.items():
            moved = getattr(self, name)
            if moved.dtype != tensor.dtype:
                setattr(self, name, tensor.to(moved.device))
        return self


def chosen_layers(names: Iterable[str], keep: Sequence[str] = ()) -> list[str]:
    """Returns which of these layers are quantized, in their order."""
    names = list(names)
    chosen, _ = choose_layers(names, keep)
    return [name for name in names if name in chosen]


def quantizable(transformer: torch.nn.Module, keep: Sequence[str] = ()) -> list[str]:
    """Returns the names of the layers that are quantized, in the model's order.

    Args:
        keep: shell patterns of layers that stay as they are, such as `*.img_mlp.net.2`.

    Raises:
        SettingError: a pattern matches no layer, the patterns leave none, or a layer is not a plain
            linear layer.
    """
    modules = dict(transformer.named_modules())
    layers = chosen_layers(modules, keep)
    for name in layers:
        if not isinstance(modules[name], torch.nn.Linear):
            raise SettingError(
                f"{name} is a {type(modules[name]).__name__}, but only linear layers with plain "
                "weights can be quantized: load the bf16 folder again, with LoRAs merged."
            )
    return layers


def quantize_transformer(
    transformer: torch.nn.Module, precision: str, keep: Sequence[str] = ()
) -> list[str]:
    """Quantizes attention and MLP of the blocks in place, on the device where they are.

    A card's tensor cores multiply, or the same numbers in plain torch: the activations are rounded
    too.

    Raises:
        SettingError: the precision is unknown, or as in `quantizable`; nothing has changed then.
    """
    check_precision(precision)
    layers = quantizable(transformer, keep)
    for name in layers:
        layer: Any = transformer.get_submodule(name)
        product = tensor_core_product(precision, layer.weight.device)
        replace_layer(transformer, name, QuantizedLinear(layer, product))
    return layers


def replace_layer(model: torch.nn.Module, name: str, layer: torch.nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    put(model.get_submodule(owner), **{leaf: layer})
