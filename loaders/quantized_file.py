"""What quantizing a transformer file would give, and every reason not to: from headers alone."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .. import __version__
from ..errors import CheckpointError, SettingError, UnavailableError
from .convert import check_complete, is_finite
from .header import TensorInfo
from .quantization import AUXILIARY
from .quantize import (
    COMFY_QUANT,
    FORMATS,
    comfy_quant_tensor,
    layers_to_quantize,
    quantize_rows,
    relative_error,
)
from .source import METADATA_KEY, Source, open_source
from .writer import DTYPES, SafetensorsLayout, TensorFile, write_safetensors

FLOATS = ("F64", "F32", "F16", "BF16")
STORED_AS = {"fp8": "F8_E4M3", "int8": "I8"}
# ComfyUI's files say with this tensor what diffusers says with `zero_cond_t` in config.json.
EDIT_2511, MARKER_2511 = "Qwen-Image-Edit-2511", "__index_timestep_zero__"
# Settings that no tensor tells, and that a single file would lose: how a head is split over time,
# height and width.
CONFIG = ("axes_dims_rope",)


@dataclass(frozen=True)
class QuantizedPlan:
    """A quantized file that could be written.

    Args:
        source: the transformer it is made from.
        precision: one of `FORMATS`.
        quantized: layers that are quantized.
        kept: layers that could be, and stay in bf16 because a pattern says so.
        layout: the file; `layout.file_bytes` is its size.
    """

    source: Source
    precision: str
    quantized: frozenset[str]
    kept: frozenset[str]
    layout: SafetensorsLayout


def plan_quantized(
    path: str | os.PathLike[str], precision: str, keep: Sequence[str] = ()
) -> QuantizedPlan:
    """Reads the headers behind `path` and plans the file that quantizing it gives.

    Attention and MLP of the blocks are quantized, less what `keep` names; every other number
    becomes bf16. Names lose a prefix such as `model.diffusion_model.`.

    Args:
        path: a file, a sharded or component folder, or a diffusers folder; of several parts, the
            transformer is taken.
        precision: one of `FORMATS`.
        keep: shell patterns of layers that stay in bf16, such as `transformer_blocks.0.*`.

    Raises:
        SettingError: the precision is unknown, or a pattern matches no layer.
        CheckpointError: there is no transformer, it is incomplete or quantized already.
    """
    if precision not in FORMATS:
        raise SettingError(f"precision {precision!r} is unknown: choose {' or '.join(FORMATS)}.")
    source = open_source(path, "transformer")
    _refuse_quantized(source, precision)
    check_complete(source)
    tensors = source.tensors
    layers = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    quantized = layers_to_quantize(layers, keep)
    if not quantized:
        raise SettingError("the keep patterns leave no layer to quantize: name fewer layers.")
    specs: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, info in tensors.items():
        layer = name.removesuffix(".weight")
        kept_dtype = _kept_dtype(source, name, info)
        if layer != name and layer in quantized:
            specs[name] = (STORED_AS[precision], info.shape)
            specs[f"{layer}.weight_scale"] = ("F32", (info.shape[0], 1))
            specs[f"{layer}.comfy_quant"] = ("U8", tuple(comfy_quant_tensor(precision).shape))
        else:
            specs[name] = (kept_dtype, info.shape)
    if source.part.family == EDIT_2511:
        specs.setdefault(MARKER_2511, ("F32", (0,)))
    layout = SafetensorsLayout(specs, _metadata(source, precision, keep))
    return QuantizedPlan(
        source, precision, quantized, layers_to_quantize(layers) - quantized, layout
    )


def _refuse_quantized(source: Source, precision: str) -> None:
    formats = source.part.quantization.formats
    if not formats:
        return
    found = ", ".join(f"{form} in {count} layers" for form, count in formats.items())
    if precision == "fp8" and all(form.startswith("fp8 e4m3") for form in formats):
        remedy = "it loads as it is, with its own values, so use it unchanged"
    else:
        remedy = "rounding twice adds the errors, so start from the bf16 file"
    raise CheckpointError(f"{source.path} is quantized already ({found}): {remedy}.")


def _kept_dtype(source: Source, name: str, info: TensorInfo) -> str:
    if AUXILIARY.search(name):
        raise CheckpointError(
            f"{source.path} holds {name!r}, which describes a quantized weight, and no quantized "
            "weights: get the original file."
        )
    if name.startswith("__") and info.dtype in DTYPES:  # a marker, not a weight
        return info.dtype
    if info.dtype not in FLOATS:
        raise CheckpointError(
            f"{source.path} holds {name!r} as {info.dtype}, and the weights to start from must be "
            f"{', '.join(FLOATS)}: start from the bf16 file."
        )
    return "BF16"


def _metadata(source: Source, precision: str, keep: Sequence[str]) -> dict[str, str]:
    metadata = {"format": "pt"}
    for header in source.shards.headers:
        metadata |= header.metadata
    metadata.pop("_quantization_metadata", None)
    entry = {
        # The name alone: files are shared, and a path tells about the machine.
        "source": _name(source),
        "precision": precision,
        "format": COMFY_QUANT[precision],
        "keep": list(keep),
        "version": __version__,
        "config": {name: source.config[name] for name in CONFIG if name in source.config},
    }
    return metadata | {METADATA_KEY: json.dumps(entry)}


def _name(source: Source) -> str:
    path = Path(os.path.abspath(source.path))  # not resolved: a download cache has links to hashes
    return path.parent.name if path.name == source.role else path.name


def check_destination(plan: QuantizedPlan, destination: Path, *, overwrite: bool = False) -> None:
    """Refuses a place where the file must not be written.

    Raises:
        SettingError: it is no .safetensors name in an existing folder, it is a file of the source,
            or it exists and `overwrite` is false.
    """
    if destination.suffix != ".safetensors":
        raise SettingError(f"{destination} must end in .safetensors: name the file to write.")
    if not destination.parent.is_dir():
        raise SettingError(f"{destination.parent} is no folder: create it first.")
    if destination.is_dir():
        raise SettingError(f"{destination} is a folder: name a file in it.")
    if not os.path.lexists(destination):
        return
    if any(destination.exists() and destination.samefile(file) for file in plan.source.files):
        raise SettingError(
            f"{destination} is the file to read: choose another name for the quantized one."
        )
    if not overwrite:
        raise SettingError(
            f"{destination} exists: choose another name, or say that it may be overwritten."
        )


# Writes a quantized transformer, one tensor at a time: from the mapped source through the card or
# the processor to the file.

READERS = {
    "int8": "ComfyUI itself and this package",
    "fp8": "this package only: ComfyUI's own fp8 has one scale for a whole weight, and this file "
    "has one for every row",
}


@dataclass(frozen=True)
class QuantizedFile:
    """What was written.

    Args:
        bytes_before: of the transformer's tensors in the source.
        bytes_after: of the file.
        kept: layers that stayed in bf16 because a pattern said so.
        worst_error, mean_error: |rounded - weight| / |weight| of the quantized layers.
        worst_layer: where the worst one is.
        readers: which programs read the file, and why no others do.
    """

    path: Path
    source: Path
    precision: str
    device: str
    bytes_before: int
    bytes_after: int
    quantized: int
    kept: tuple[str, ...]
    worst_error: float
    worst_layer: str
    mean_error: float
    seconds: float
    readers: str

    def as_dict(self) -> dict[str, Any]:
        """Returns only what `json.dumps` takes."""
        return {
            **vars(self),
            "path": str(self.path),
            "source": str(self.source),
            "kept": list(self.kept),
        }


def write_quantized(
    plan: QuantizedPlan,
    destination: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> QuantizedFile:
    """Carries out a plan. The file appears whole under its name, or not at all.

    Host memory holds a few tensors at a time; pages of the mapped source come on top, and go when
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
    destination, device = Path(destination), torch.device(device)
    check_destination(plan, destination, overwrite=overwrite)
    errors: dict[str, float] = {}
    with write_safetensors(destination, plan.layout) as file, ThreadPoolExecutor(1) as writer:
        written: Future[None] | None = None
        try:
            # One source tensor is computed while what became of the one before it is written.
            for tensors in _stream(plan, device, errors, progress):
                if written is not None:
                    written.result()
                written = writer.submit(_write, file, tensors)
        except torch.cuda.OutOfMemoryError as error:
            raise UnavailableError(
                f"{device} has no room for one weight and its copy: free its memory or choose the "
                "device cpu."
            ) from error
        if written is not None:
            written.result()
    worst = max(errors, key=errors.__getitem__)
    return QuantizedFile(
        path=destination,
        source=plan.source.path,
        precision=plan.precision,
        device=str(device),
        bytes_before=plan.source.part.bytes,
        bytes_after=plan.layout.file_bytes,
        quantized=len(plan.quantized),
        kept=tuple(sorted(plan.kept)),
        worst_error=errors[worst],
        worst_layer=worst,
        mean_error=sum(errors.values()) / len(errors),
        seconds=round(time.perf_counter() - start, 3),
        readers=READERS[plan.precision],
    )


def _stream(
    plan: QuantizedPlan,
    device: torch.device,
    errors: dict[str, float],
    progress: Callable[[int, int], None] | None,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yields what each tensor of the source becomes, on the CPU, and fills {layer: rounding error}.

    `progress` counts what was handed out before: it is called once the next tensor is asked for.
    """
    prefix, done, total = plan.source.part.prefix, 0, plan.source.part.bytes
    missing = set(plan.layout.tensors)
    for header in plan.source.shards.headers:
        with safe_open(header.path, framework="pt") as file:
            for name, info in sorted(header.tensors.items(), key=lambda item: item[1].start):
                if not name.startswith(prefix):
                    continue
                outputs = _outputs(plan, name.removeprefix(prefix), file.get_tensor(name), device)
                if outputs is None:
                    raise CheckpointError(
                        f"{header.path} holds NaN or infinity in the tensor {name!r}: download the "
                        "file again."
                    )
                tensors, error = outputs
                if error is not None:
                    errors[name.removeprefix(prefix).removesuffix(".weight")] = error
                yield tensors
                missing -= tensors.keys()
                done += info.nbytes
                if progress is not None:
                    progress(done, total)
    if MARKER_2511 in missing:
        yield {MARKER_2511: torch.empty(0)}


def _write(file: TensorFile, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        file.write(name, tensor)


def _outputs(
    plan: QuantizedPlan, name: str, tensor: torch.Tensor, device: torch.device
) -> tuple[dict[str, torch.Tensor], float | None] | None:
    """Returns what one tensor becomes and its rounding error; None when it is not finite."""
    layer = name.removesuffix(".weight")
    if layer == name or layer not in plan.quantized:
        kept = tensor.to(DTYPES[plan.layout.tensors[name].dtype])
        return ({name: kept}, None) if is_finite(kept) else None
    weight = tensor.to(device)
    values, scale = quantize_rows(weight, plan.precision)
    if not scale.isfinite().all():
        return None
    error = relative_error(weight, values, scale)
    tensors = {
        name: values.cpu(),
        f"{layer}.weight_scale": scale.cpu(),
        f"{layer}.comfy_quant": comfy_quant_tensor(plan.precision),
    }
    return tensors, error
