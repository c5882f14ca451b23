"""Identifies a checkpoint from its headers: milliseconds for 40 GB, and nothing is loaded. A
component's config.json is compared with its tensors, so that a folder put together from two models
fails here and not while sampling.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

from ..errors import CheckpointError
from ..families.identify import Slice, identify, split_parts
from ..families.protocol import Identity, Tensors
from ..families.registry import family_titled, pipeline_family, title_by_pipeline
from ..files import parse_object
from .header import Header, TensorInfo, open_regular, read_object
from .quantization import (
    ATTENTION_CONFIG,
    MAX_COMFY_QUANT_BYTES,
    Infos,
    Quantization,
    count_parameters,
    find_quantization,
    parse_attention,
)
from .shards import NUMBERED, Shards, read_shards

# {role: {key in config.json: name in Identity.dims, or "blocks"}}; families have a transformer's.
SAME = {
    "vae": {"base_dim": "dim", "z_dim": "latent_channels", "input_channels": "image_channels"},
    "text_encoder": {
        "hidden_size": "hidden",
        "intermediate_size": "intermediate",
        "vocab_size": "vocabulary",
        "num_hidden_layers": "blocks",
    },
}
NAMED = ("2512", "2511", "2509", "layered", "edit", "turbo")  # of variants, in names of files
Parsed = TypeVar("Parsed")


def _contradictions(identity: Identity, config: Mapping[str, Any], tensors: Tensors) -> list[str]:
    if not config:
        return []
    nested = config.get("text_config")
    values = {**config, **(nested if isinstance(nested, dict) else {})}
    dims = {**identity.dims, "blocks": identity.blocks}
    family = family_titled(identity.family) if identity.role == "transformer" else None
    keys = family.config if family else SAME.get(identity.role, {})
    found: dict[str, object] = {key: dims.get(name) for key, name in keys.items()}
    for key, fact in (family.config_facts(tensors) if family else {}).items():
        found[key] = fact
        if isinstance(fact, bool):  # a switch that is not there is off
            values[key] = bool(config.get(key))
    return [
        f"config.json gives {key} as {values[key]!r}, but the tensors give {actual}: use "
        "config.json and weights from one source."
        for key, actual in found.items()
        if actual is not None and key in values and values[key] != actual
    ]


# Ends of the class names of components without weights
WEIGHTLESS = ("Scheduler", "Tokenizer", "TokenizerFast", "Processor", "FeatureExtractor")


@dataclass(frozen=True, kw_only=True)
class CheckpointPart(Identity):
    """Describes one model in a checkpoint: a whole file, one prefix of a full checkpoint, or one
    folder of a diffusers folder. Its folder is under ComfyUI's `models/` or in a diffusers folder.
    """

    # the component folder, or "diffusion model", "vae", "text encoder", "weights" in a file
    name: str
    hint: str | None
    parameters: int
    tensors: int
    bytes: int
    dtypes: Mapping[str, Mapping[str, int]]  # {dtype: {"tensors": count, "bytes": bytes}}
    quantization: Quantization
    prefix: str = ""  # what stands before its tensors' names in the file
    # {what the file asks ComfyUI for: number of blocks}; empty when it says nothing
    attention: Mapping[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, **vars(self), "quantization": self.quantization.as_dict()}


@dataclass(frozen=True)
class Checkpoint:
    """Holds what `inspect_checkpoint` found; `kind` is "file", "sharded" or "diffusers folder"."""

    path: Path
    kind: str
    pipeline: str | None
    parts: tuple[CheckpointPart, ...]
    file_bytes: int

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def cannot_run(self) -> tuple[str, ...]:
        return tuple(
            f"{part.name}: {sentence}" for part in self.parts for sentence in part.cannot_run
        )

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(f"{part.name}: {sentence}" for part in self.parts for sentence in part.errors)

    def as_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "kind": self.kind,
            "pipeline": self.pipeline,
            "parameters": self.parameters,
            "file_bytes": self.file_bytes,
            "cannot_run": list(self.cannot_run),
            "errors": list(self.errors),
            "parts": [part.as_dict() for part in self.parts],
        }


def inspect_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Reads the headers of a safetensors file, a sharded set, a component folder or a diffusers
    folder.

    Of the weights it reads only `.comfy_quant` and `.comfy_attention.config` tensors, which are
    short JSON texts that name a quantization format and an attention.

    Raises:
        CheckpointError: the path cannot be read as any of these; the message names the file, the
            rule and the remedy.
    """
    path = Path(path)
    if os.path.isfile(path / "model_index.json"):
        return _diffusers_folder(path)
    return inspect_shards(read_shards(path))


def inspect_shards(shards: Shards) -> Checkpoint:
    """Does the same as `inspect_checkpoint` with headers that are read already."""
    path = shards.path
    config = _config_of(path if shards.index is None else shards.index.parent)
    parts = tuple(_part(part, shards, config) for part in split_parts(shards.tensors))
    return Checkpoint(
        path, "file" if shards.index is None else "sharded", None, parts, shards.file_bytes
    )


def _diffusers_folder(path: Path) -> Checkpoint:
    index, pipeline = read_index(path)
    parts: list[CheckpointPart] = []
    file_bytes = 0
    for name in _components(path, index):
        shards = read_shards(path / name)
        tensors = shards.tensors
        found = Slice(name, "", tensors, identify(tensors))
        part = _part(found, shards, _config_of(path / name))
        parts.append(replace(part, folder=f"diffusers folder: {name}/"))
        file_bytes += shards.file_bytes
    parts = [named_by_pipeline(part, pipeline) for part in parts]
    return Checkpoint(
        path, "diffusers folder", pipeline, tuple(_with_matching_widths(parts)), file_bytes
    )


def read_index(folder: Path) -> tuple[dict[str, Any], str]:
    """Returns what model_index.json says, and the pipeline's class name in it."""
    index = read_object(folder / "model_index.json", "the index of a diffusers folder")
    pipeline = index.get("_class_name")
    if not isinstance(pipeline, str):
        raise CheckpointError(
            "model_index.json does not name its pipeline in _class_name, as a diffusers folder "
            "must: download the index from the model's publisher.",
            folder / "model_index.json",
        )
    return index, pipeline


def sample_sigmas(index: Mapping[str, Any], path: Path) -> list[float]:
    """Returns the sigmas that a Turbo is trained for, from 1 down; the last step ends at 0, which
    is not listed. Empty for any other folder.
    """
    family = pipeline_family(str(index.get("_class_name")))
    found = index.get(family.sigmas) if family else None
    if family is None or found is None:
        return []
    numbers = isinstance(found, list) and all(type(sigma) in (int, float) for sigma in found)
    if numbers and found and all(a > b for a, b in pairwise((*found, 0))) and found[0] <= 1:
        return [float(sigma) for sigma in found]
    raise CheckpointError(
        f"The {family.sigmas} are not numbers that fall from at most 1 and stay above 0: download "
        "the file again.",
        path,
    )


def _components(path: Path, index: Mapping[str, Any]) -> list[str]:
    """Returns the components that have weights, after checking that every component is there."""
    weighted = []
    for name, value in index.items():
        # [library, class]; other lists are settings, such as a Turbo's sigmas.
        named = isinstance(value, list) and value and isinstance(value[0], str)
        if name.startswith("_") or not named:
            continue
        plain = name == PurePosixPath(name).name == PureWindowsPath(name).name
        if not plain or name == "..":
            raise CheckpointError(
                f"model_index.json names the component {name!r}, which is outside the folder: "
                "download the index from the model's publisher.",
                path / "model_index.json",
            )
        if not os.path.isdir(path / name):
            raise CheckpointError(
                f"The folder {name}/ in model_index.json is missing, but a diffusers folder needs "
                "every component: finish the download.",
                path / name,
            )
        if not str(value[-1]).endswith(WEIGHTLESS):
            weighted.append(name)
    return weighted


def _config_of(folder: Path) -> dict[str, Any]:
    config = folder / "config.json"
    return (
        read_object(config, "the settings of the weights next to it")
        if os.path.isfile(config)
        else {}
    )


def _part(part: Slice[TensorInfo], shards: Shards, config: Mapping[str, Any]) -> CheckpointPart:
    tensors, identity = part.tensors, part.identity
    if family := family_titled(identity.family):
        identity = family.from_config(identity, config)
    quantization = find_quantization(
        tensors,
        _metadata_layers(shards, part.prefix),
        lambda tensor: _read_text(shards, part.prefix + tensor, parse_object),
    )
    attention = Counter(
        _read_text(shards, part.prefix + name, parse_attention)
        for name in tensors
        if name.endswith(ATTENTION_CONFIG)
    )
    found = vars(identity) | {
        "cannot_run": identity.cannot_run or tuple(quantization.cannot_run(identity.role)),
        "errors": (*identity.errors, *_contradictions(identity, config, tensors)),
    }
    return CheckpointPart(
        **found,
        name=part.name,
        hint=_hint(shards),
        parameters=count_parameters(tensors, quantization),
        tensors=len(tensors),
        bytes=sum(info.nbytes for info in tensors.values()),
        dtypes=_dtypes(tensors),
        quantization=quantization,
        prefix=part.prefix,
        attention={name: count for name, count in attention.items() if name},
    )


def named_by_pipeline(part: CheckpointPart, pipeline: str) -> CheckpointPart:
    """Names a transformer whose tensors leave its member open by the pipeline's class."""
    title = title_by_pipeline(part.family, pipeline)
    if title is None:
        return part
    return replace(part, family=title, variant=f"by the pipeline class {pipeline}")


def _with_matching_widths(parts: list[CheckpointPart]) -> list[CheckpointPart]:
    encoders = [part for part in parts if part.role == "text_encoder" and "hidden" in part.dims]
    checked = []
    for part in parts:
        for encoder in encoders:
            width, hidden = part.dims.get("joint_dim"), encoder.dims["hidden"]
            if part.role == "transformer" and width != hidden:
                sentence = (
                    f"the transformer takes text {width} wide, but {encoder.name} gives {hidden}: "
                    "use both from one model."
                )
                part = replace(part, errors=(*part.errors, sentence))
        checked.append(part)
    return checked


def _hint(shards: Shards) -> str | None:
    # What the name says is worded so that nobody takes it for evidence.
    stem, hints = shards.path.name.partition(".safetensors")[0].lower(), []
    if words := " ".join(word for word in NAMED if word in stem):
        hints.append(f"the file name says {words}, which the file does not confirm")
    if shards.index is None and NUMBERED.search(shards.headers[0].path.name):
        hints.append(
            "one shard of several, so the counts are partial: name the folder or the index to "
            "count all"
        )
    return "; ".join(hints) or None


def _dtypes(tensors: Infos) -> dict[str, dict[str, int]]:
    dtypes: dict[str, dict[str, int]] = {}
    for info in tensors.values():
        entry = dtypes.setdefault(info.dtype, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += info.nbytes
    return dtypes


def _metadata_layers(shards: Shards, prefix: str) -> dict[str, dict[str, Any]]:
    """Returns {layer without prefix: settings} from ComfyUI's `_quantization_metadata`."""
    found: dict[str, dict[str, Any]] = {}
    for header in shards.headers:
        if "_quantization_metadata" in header.metadata:
            found |= _declared_layers(header)
    return {
        name.removeprefix(prefix): entry for name, entry in found.items() if name.startswith(prefix)
    }


def _declared_layers(header: Header) -> dict[str, dict[str, Any]]:
    try:
        layers = parse_object(header.metadata["_quantization_metadata"].encode()).get("layers")
        if not isinstance(layers, dict) or not all(
            isinstance(entry, dict) for entry in layers.values()
        ):
            raise ValueError("layers must map every layer to an object")
    except ValueError as error:
        raise CheckpointError(
            f"The _quantization_metadata is broken ({error}): save or download the file again.",
            header.path,
        ) from error
    return layers


def _read_text(shards: Shards, tensor: str, parse: Callable[[bytes], Parsed]) -> Parsed:
    header = shards.header_of(tensor)
    info = header.tensors[tensor]
    try:
        if info.dtype != "U8" or info.nbytes > MAX_COMFY_QUANT_BYTES:
            raise ValueError(f"it is {info.nbytes:,} bytes of {info.dtype}")
        with open_regular(header.path) as file:
            file.seek(header.data_start + info.start)
            return parse(file.read(info.nbytes))
    except ValueError as error:
        raise CheckpointError(
            f"The tensor {tensor!r} is broken ({error}). It must hold at most "
            f"{MAX_COMFY_QUANT_BYTES} bytes of U8 with a JSON text: save or download the file "
            "again.",
            header.path,
        ) from error
