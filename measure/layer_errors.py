"""What quantizing each layer loses: at its own output, and in the model's prediction.

Errors at a layer's own output are measured while the model really samples, on every activation
that passes; of a single file, which no host runs here, on Gaussian activations. What a layer's
error does to the prediction is measured by quantizing that layer alone.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open

from ..errors import CheckpointError
from ..hosts.diffusers.quantized import (
    QuantizedLinear,
    chosen_layers,
    plain_product,
    quantizable,
    replace_layer,
    tensor_core_product,
)
from ..loaders.convert import is_finite
from ..loaders.quantize import quantize_rows, relative_error, row_format
from ..loaders.source import Source
from ..machine.device import available_bytes
from .fidelity import ErrorSum
from .keep import bytes_to_keep

GAUSSIAN_ROWS = 256
PROBES = 3  # forward passes in which a layer's effect is measured: the first, middle and last


@dataclass(frozen=True)
class LayerError:
    """What quantizing one layer loses.

    Attributes:
        layer: its name.
        error: relative error of its output.
        weight_error: relative error of its weight alone.
        bytes: what the layer takes more when it stays in bf16.
        effect: relative error of the noise prediction when this layer alone is quantized; None
            where that was not measured.
    """

    layer: str
    error: float
    weight_error: float
    bytes: int
    effect: float | None = None


@dataclass(frozen=True)
class Probe:
    """A forward pass to repeat.

    Attributes:
        arguments: of the transformer, by name.
        weight: by how much of the prediction the sampler moved the latents.
    """

    arguments: dict[str, Any]
    weight: float


@contextmanager
def measured_layers(
    transformer: torch.nn.Module, precision: str, keep: Sequence[str] = ()
) -> Iterator[dict[str, ErrorSum]]:
    """Inside it, every activation of every layer is multiplied in the format too, and compared.

    Yields:
        {layer: error of its output}, growing with every forward pass. Weights are rounded anew in
        each, which takes time and no memory.
    """
    sums = {name: ErrorSum() for name in quantizable(transformer, keep)}
    handles = []
    for name, total in sums.items():
        layer = transformer.get_submodule(name)
        product = tensor_core_product(precision, layer.weight.device)

        def compare(layer, inputs, output, total=total, product=product):
            rotation = row_format(precision, layer.in_features).rotation
            values, scale = quantize_rows(layer.weight, precision, rotation=rotation)
            total.add(product.linear(inputs[0], values, scale, layer.bias, rotation), output)

        handles.append(layer.register_forward_hook(compare))
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recorded_probes(transformer: torch.nn.Module) -> Iterator[list[Probe]]:
    """Inside it one run is sampled; the list then holds `PROBES` of its steps, evenly spread.

    With guidance, which calls the transformer twice in a step, it is the call with the prompt.
    """
    calls: list[dict[str, Any]] = []
    probes: list[Probe] = []

    def record(module, args, kwargs):
        time = float(kwargs["timestep"].flatten()[0])
        if not calls or float(calls[-1]["timestep"].flatten()[0]) != time:
            calls.append(dict(kwargs))

    handle = transformer.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield probes
    finally:
        handle.remove()
    times = [float(call["timestep"].flatten()[0]) for call in calls] + [0.0]
    spread = (round(i * (len(calls) - 1) / max(1, PROBES - 1)) for i in range(PROBES))
    for i in sorted(set(spread)) if calls else ():
        probes.append(Probe(calls[i], times[i] - times[i + 1]))


def effects(
    transformer: torch.nn.Module,
    probes: Sequence[Probe],
    precision: str,
    keep: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, float], float] | None:
    """What each layer alone, and all together, do to the noise prediction.

    In fp32, on a copy: in bf16 a layer that is changed by one rounding already moves the prediction
    of the micro model by up to 3 %, which hides what most layers do.

    Returns:
        {layer: relative error of the prediction} and that of all layers quantized; None when an
        fp32 copy takes more than half of the memory that is free.
    """
    device = next(transformer.parameters()).device
    size = 4 * sum(parameter.numel() for parameter in transformer.parameters())
    if size > available_bytes(str(device)) / 2:
        return None
    model = copy.deepcopy(transformer).float()
    layers = quantizable(model, keep)
    product = plain_product(precision, device)
    runs = [{name: _wide(value) for name, value in probe.arguments.items()} for probe in probes]

    @torch.inference_mode()
    def predict() -> list[torch.Tensor]:
        return [model(**run)[0] for run in runs]

    def error(found: list[torch.Tensor]) -> float:
        total = ErrorSum()
        for prediction, plain, probe in zip(found, exact, probes, strict=True):
            total.add(prediction, plain, probe.weight)
        return total.error

    exact = predict()
    alone = {}
    plain_layers = {name: model.get_submodule(name) for name in layers}
    for done, (name, layer) in enumerate(plain_layers.items(), start=1):
        replace_layer(model, name, QuantizedLinear(layer, product))
        alone[name] = error(predict())
        replace_layer(model, name, layer)
        if progress is not None:
            progress(done, len(layers))
    for name, layer in plain_layers.items():
        replace_layer(model, name, QuantizedLinear(layer, product))
    return alone, error(predict())


def sampled_errors(
    transformer: torch.nn.Module,
    sums: dict[str, ErrorSum],
    precision: str,
    alone: dict[str, float] | None,
) -> list[LayerError]:
    """Joins what `measured_layers` and `effects` found of a transformer in bf16."""
    found = []
    for name, total in sums.items():
        weight = transformer.get_submodule(name).weight.detach()
        rotation = row_format(precision, weight.shape[1]).rotation
        rounded = quantize_rows(weight, precision, rotation=rotation)
        rounding = relative_error(weight, *rounded, rotation)
        effect = None if alone is None else alone[name]
        size = bytes_to_keep(*weight.shape)
        found.append(LayerError(name, total.error, rounding, size, effect))
    return found


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
    found = {}
    counter = itertools.count(1)
    for header in source.shards.headers:
        with safe_open(header.path, framework="pt") as file:
            for stored in header.tensors:
                layer = layers.get(stored)
                if layer not in chosen:
                    continue
                weight = file.get_tensor(stored).to(where).bfloat16()
                if not is_finite(weight):
                    raise CheckpointError(
                        f"This file holds NaN or infinity in the tensor {stored!r}: download it "
                        "again.",
                        header.path,
                    )
                x = torch.randn(GAUSSIAN_ROWS, weight.shape[1], generator=generator)
                x = x.to(where, torch.bfloat16)
                rotation = row_format(precision, weight.shape[1]).rotation
                values, scale = quantize_rows(weight, precision, rotation=rotation)
                total = ErrorSum()
                total.add(product.linear(x, values, scale, rotation=rotation), F.linear(x, weight))
                rounding = relative_error(weight, values, scale, rotation)
                size = bytes_to_keep(*weight.shape)
                found[layer] = LayerError(layer, total.error, rounding, size)
                if progress is not None:
                    progress(next(counter), len(chosen))
    return list(found.values())


def _wide(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.float() if floating else value
