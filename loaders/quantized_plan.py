"""What quantizing a transformer file would give, and every reason not to: from headers alone."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import __version__
from ..errors import CheckpointError, SettingError
from .quantization import AUXILIARY
from .quantize import COMFY_QUANT, FORMATS, comfy_quant_tensor, layers_to_quantize
from .safetensors_header import TensorInfo
from .safetensors_writer import DTYPES, SafetensorsLayout
from .source import METADATA_KEY, Source, open_source
from .transformer_tensors import check_complete

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
