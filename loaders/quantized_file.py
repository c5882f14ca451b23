"""Writes a transformer file in fp8 or int8: plans it from headers alone, then writes one tensor at
a time from the mapped source through the card or the CPU.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..errors import CheckpointError, SettingError, UnavailableError
from ..families.registry import marker_titled
from ..spec.formats import QUANTIZED
from .gguf import BLOCK_TYPES
from .gguf_blocks import BlockRows, map_gguf
from .header import Header, TensorInfo
from .quantization import ATTENTION_CONFIG, AUXILIARY
from .quantize import (
    VALUE_DTYPES,
    check_finite,
    layers_to_quantize,
    measured_squares,
    not_finite,
    row_format,
)
from .slabs import RoundedLayer, quantize_layers
from .source import Source, check_complete, check_unchanged, open_source
from .stored import StoredLayer
from .writer import (
    DTYPE_NAMES,
    SAFETENSORS_DTYPES,
    SafetensorsLayout,
    Specs,
    file_metadata,
    write_safetensors,
)

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
READERS = {
    "int8": "ComfyUI itself and this package",
    "fp8": (
        "this package only, because ComfyUI's fp8 has one scale for a whole weight and this file "
        "has one for each row"
    ),
}


# What every writer of a quantized file shares.


def check_precision(precision: str) -> None:
    if precision not in QUANTIZED:
        raise SettingError(f"precision {precision!r} is unknown: choose {' or '.join(QUANTIZED)}.")


def choose_layers(
    layers: Collection[str], keep: Sequence[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the layers to quantize, and those that stay in bf16 because `keep` names them."""
    chosen = layers_to_quantize(layers, keep)
    if not chosen:
        raise SettingError(
            "bf16_layers (keep_in_bf16, --keep) leaves no layer to quantize: name fewer layers."
        )
    return chosen, layers_to_quantize(layers) - chosen


def specs_of_layer(
    layer: str, shape: tuple[int, ...], precision: str, stored: StoredLayer | None = None
) -> Specs:
    """Returns {name: (dtype, shape)} of a quantized layer, as rounding gives it or as `stored`."""
    if stored is None:
        values = torch.empty(shape, dtype=VALUE_DTYPES[precision], device="meta")
        scale = torch.empty((shape[0], 1), device="meta")
        stored = StoredLayer.rounded(values, scale, row_format(precision, shape[1]))
    tensors = stored.tensors(layer)
    return {name: (DTYPE_NAMES[value.dtype], tuple(value.shape)) for name, value in tensors.items()}


def check_destination(
    destination: Path, *, overwrite: bool, sources: Collection[Path] = ()
) -> None:
    """Refuses a place where the file must not be written.

    Raises:
        SettingError: it is no .safetensors name in an existing folder, it is one of `sources`, or
            it exists and `overwrite` is false.
    """
    if destination.suffix != ".safetensors":
        raise SettingError(
            "The name must end in .safetensors: name the file to write.", destination
        )
    if not destination.parent.is_dir():
        raise SettingError("There is no such folder: create it first.", destination.parent)
    if destination.is_dir():
        raise SettingError("This is a folder: name a file in it.", destination)
    if not os.path.lexists(destination):
        return
    if any(destination.exists() and destination.samefile(file) for file in sources):
        raise SettingError(
            "This is the file to read: choose another name for the quantized file.", destination
        )
    if not overwrite:
        raise SettingError(
            "The file exists: choose another name, or turn overwrite on.", destination
        )


# A file made from a file.


@dataclass(frozen=True)
class QuantizedPlan:
    source: Source
    precision: str  # one of `QUANTIZED`
    quantized: frozenset[str]
    kept: frozenset[str]  # layers that could be, and stay in bf16 because a pattern says so
    layout: SafetensorsLayout  # the file; `layout.file_bytes` is its size


@dataclass(frozen=True)
class QuantizedFile:
    path: Path
    source: Path
    precision: str
    device: str
    bytes_before: int  # of the transformer's tensors in the source
    bytes_after: int  # of the file
    quantized: int
    kept: tuple[str, ...]  # layers that stayed in bf16 because a pattern said so
    # worst_error, mean_error: |rounded - weight| / |weight| of the quantized layers
    worst_error: float
    worst_layer: str  # where the worst one is
    mean_error: float
    seconds: float
    readers: str  # which programs read the file, and why no others do

    def as_dict(self) -> dict[str, Any]:
        paths = {"path": str(self.path), "source": str(self.source)}
        return {**vars(self), **paths, "kept": list(self.kept)}


def plan_quantized(
    path: str | os.PathLike[str], precision: str, keep: Sequence[str] = ()
) -> QuantizedPlan:
    """Reads the headers behind `path` and plans the file that quantizing it gives.

    Attention and MLP of the blocks are quantized, less what `keep` names; every other weight
    becomes bf16. Names lose a prefix such as `model.diffusion_model.`.

    Raises:
        SettingError: the precision is unknown, or a pattern matches no layer.
        CheckpointError: there is no transformer, it is incomplete or quantized already.
    """
    check_precision(precision)
    source = open_source(path, "transformer")
    _refuse_quantized(source, precision)
    check_complete(source)
    tensors = source.tensors
    layers = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    quantized, kept = choose_layers(layers, keep)
    specs: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, info in tensors.items():
        kept_dtype = _kept_dtype(source, name, info)
        layer = _quantized_layer(name, quantized)
        specs |= (
            specs_of_layer(layer, info.shape, precision)
            if layer
            else {name: (kept_dtype, info.shape)}
        )
    if marker := marker_titled(source.part.family):
        specs.setdefault(marker, ("F32", (0,)))
    metadata: dict[str, str] = {}
    for header in source.shards.headers:
        metadata |= header.metadata
    metadata.pop("_quantization_metadata", None)
    # The name alone: files are shared, and a path tells about the machine.
    metadata |= file_metadata(precision, keep, source.config, source=_name(source))
    return QuantizedPlan(source, precision, quantized, kept, SafetensorsLayout(specs, metadata))


def write_quantized(
    plan: QuantizedPlan,
    destination: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> QuantizedFile:
    """Carries out a plan. The file appears whole under its name, or not at all.

    System RAM holds a few tensors at a time; pages of the mapped source come on top, and go when
    the system needs them.

    Args:
        device: where weights are rounded, such as `cpu` or `cuda:0`; the file is the same.
        progress: called with the bytes of the source that are done and their sum; an exception in
            it ends the work.

    Raises:
        SettingError: the destination must not be written.
        CheckpointError: a tensor holds NaN or infinity.
        UnavailableError: the disk or the card has too little room.
    """
    start = time.perf_counter()
    source, destination, device = plan.source, Path(destination), torch.device(device)
    check_destination(destination, overwrite=overwrite, sources=source.files)
    done = 0
    errors: dict[str, float] = {}
    with write_safetensors(destination, plan.layout) as file:

        def take(count: int, tensors: dict[str, torch.Tensor]) -> None:
            nonlocal done
            check_unchanged(source)
            file.write_all(tensors)
            done += count
            progress(done, source.part.bytes)

        try:
            for header in source.shards.headers:
                errors |= _quantize_file(plan, header, device, take)
        except torch.cuda.OutOfMemoryError as error:
            raise UnavailableError(
                f"{device} has no room for one weight and its copy: free its memory, or choose "
                "the device cpu."
            ) from error
        marker = marker_titled(source.part.family)
        if marker and marker not in source.tensors:
            file.write(marker, torch.empty(0))
    worst = max(errors, key=errors.__getitem__)
    return QuantizedFile(
        path=destination,
        source=source.path,
        precision=plan.precision,
        device=str(device),
        bytes_before=source.part.bytes,
        bytes_after=plan.layout.file_bytes,
        quantized=len(plan.quantized),
        kept=tuple(sorted(plan.kept)),
        worst_error=errors[worst],
        worst_layer=worst,
        mean_error=sum(errors.values()) / len(errors),
        seconds=round(time.perf_counter() - start, 3),
        readers=READERS[plan.precision],
    )


def _quantize_file(
    plan: QuantizedPlan,
    header: Header,
    device: torch.device,
    take: Callable[[int, dict[str, torch.Tensor]], None],
) -> dict[str, float]:
    """Hands out (bytes in the source, what becomes of them) for each tensor of one file of the
    source, and returns {layer: rounding error}.
    """
    prefix = plan.source.part.prefix
    bytes_of: dict[str, int] = {}  # of layers to quantize, in the order of the file
    errors: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        if header.gguf:
            get = map_gguf(header).__getitem__
        else:
            get = stack.enter_context(safe_open(header.path, framework="pt")).get_tensor
        for stored, info in sorted(header.tensors.items(), key=lambda item: item[1].start):
            if not stored.startswith(prefix):
                continue
            name = stored.removeprefix(prefix)
            if layer := _quantized_layer(name, plan.quantized):
                bytes_of[layer] = info.nbytes
                continue
            kept = get(stored)
            kept = kept.dequantized(device) if isinstance(kept, BlockRows) else kept
            kept = kept.to(SAFETENSORS_DTYPES[plan.layout.tensors[name].dtype])
            check_finite(header.path, stored, kept)
            take(info.nbytes, {name: kept})

        def weight_of(layer: str) -> torch.Tensor | BlockRows:
            return get(f"{prefix}{layer}.weight")

        def take_rounded(rounded: RoundedLayer) -> None:
            layer, values, scale, form, errors[rounded.layer] = rounded
            take(bytes_of[layer], StoredLayer.rounded(values, scale, form).tensors(layer))

        def refuse(name: str) -> CheckpointError:
            return not_finite(header.path, prefix + name)

        quantize_layers(
            bytes_of,
            weight_of,
            plan.precision,
            device,
            take_rounded,
            refuse,
            squares=measured_squares,
        )
    return errors


def _quantized_layer(name: str, quantized: Collection[str]) -> str | None:
    layer = name.removesuffix(".weight")
    return layer if layer != name and layer in quantized else None


def _refuse_quantized(source: Source, precision: str) -> None:
    formats = source.part.quantization.formats
    if not formats or source.part.quantization.gguf:
        return
    found = ", ".join(f"{form} in {count} layers" for form, count in formats.items())
    if precision == "fp8" and all(form.startswith("fp8 e4m3") for form in formats):
        remedy = "it loads as it is, with its own values, so use it unchanged"
    else:
        remedy = "rounding twice adds the errors, so start from the bf16 file"
    raise CheckpointError(f"This file is quantized already ({found}): {remedy}.", source.path)


def _kept_dtype(source: Source, name: str, info: TensorInfo) -> str:
    if AUXILIARY.search(name):
        raise CheckpointError(
            f"This file has {name!r}, which describes a quantized weight, but no quantized "
            "weights: get the original file.",
            source.path,
        )
    # A marker or a text, not a weight.
    if name.endswith(ATTENTION_CONFIG) or (
        name.startswith("__") and info.dtype in SAFETENSORS_DTYPES
    ):
        return info.dtype
    if info.dtype not in FLOAT_DTYPES and info.dtype not in BLOCK_TYPES:
        raise CheckpointError(
            f"This file has {name!r} as {info.dtype}, but the weights must be "
            f"{', '.join(FLOAT_DTYPES)}: start from the bf16 file.",
            source.path,
        )
    return "BF16"


def _name(source: Source) -> str:
    path = Path(os.path.abspath(source.path))  # not resolved: a download cache has links to hashes
    return path.parent.name if path.name == source.role else path.name
