"""Finds the files of one set of weights, safetensors or GGUF: a file, all parts of a split or
sharded set, or what a folder holds.

An index (`*.safetensors.index.json`) maps each tensor to a file near it. A name stays in its folder
if it has no separator, wherever it resolves to: the files of a Hugging Face cache are symbolic
links out of their folder, and are fine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from ..errors import CheckpointError
from .gguf import GGUF_SUFFIX, read_gguf_set
from .header import PICKLE_SUFFIXES, Header, TensorInfo, read_header, read_object

# `...index.fp16.json` for a variant
INDEX_NAME = re.compile(r"\.safetensors\.index(\.[\w-]+)?\.json$")
NUMBERED = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")
STEMS = ("diffusion_pytorch_model", "model")


@dataclass(frozen=True)
class Shards:
    """Holds the headers of one set of weights; `index` is the index file of a sharded set."""

    path: Path
    index: Path | None
    headers: tuple[Header, ...]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: info for header in self.headers for name, info in header.tensors.items()}

    @property
    def file_bytes(self) -> int:
        return sum(header.file_bytes for header in self.headers)

    def header_of(self, tensor: str) -> Header:
        return next(header for header in self.headers if tensor in header.tensors)


def read_shards(path: str | os.PathLike[str]) -> Shards:
    """Reads the headers behind a file, a shard index, or a folder that holds one of the two.

    Raises:
        CheckpointError: nothing or more than one thing to read, an index that is not one or that
            points outside its folder, a missing shard, an index and shards that disagree, or a file
            that `read_header` refuses.
    """
    path = Path(path)
    chosen = _in_folder(path) if os.path.isdir(path) else path
    if chosen.suffix.lower() == GGUF_SUFFIX:
        return Shards(path, None, read_gguf_set(chosen))
    if not INDEX_NAME.search(chosen.name):
        return Shards(path, None, (read_header(chosen),))
    weight_map = _weight_map(chosen)
    headers = {name: _read_shard(chosen, name) for name in sorted(set(weight_map.values()))}
    _check_agreement(chosen, weight_map, headers)
    return Shards(path, chosen, tuple(headers.values()))


def _in_folder(folder: Path) -> Path:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except PermissionError as error:
        raise CheckpointError(
            "This user has no permission to list this folder: change its permissions or run as its "
            "owner.",
            folder,
        ) from error
    indexes = [name for name in names if INDEX_NAME.search(name)]
    files = [name for name in names if name.endswith(".safetensors")]
    usual = [
        f"{stem}{end}" for stem in STEMS for end in (".safetensors.index.json", ".safetensors")
    ]
    for name in usual:
        if name in indexes or name in files:
            return folder / name
    alone = indexes if indexes else files
    if len(alone) == 1 and not (alone is files and NUMBERED.search(files[0])):
        return folder / alone[0]
    raise CheckpointError(f"This folder holds {_why_not(names, indexes, files)}", folder)


def _why_not(names: list[str], indexes: list[str], files: list[str]) -> str:
    if indexes:
        return f"{len(indexes)} shard indexes ({', '.join(indexes)}): name the one to read."
    if any(NUMBERED.search(name) for name in files):
        return (
            "numbered shards but no index, which lists where each tensor is: download the "
            "*.safetensors.index.json of this model into it."
        )
    if files:
        return f"{len(files)} safetensors files and no index: name the one to read."
    if any(PurePosixPath(name).suffix in PICKLE_SUFFIXES for name in names):
        return (
            "pickled weights only, which are never opened here: get the safetensors version "
            "of the model."
        )
    return (
        "neither a .safetensors file nor a *.safetensors.index.json nor a model_index.json: "
        "name a folder or file with weights."
    )


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_object(index, "a shard index").get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise CheckpointError(
            "This is not a shard index, whose weight_map names a file for every tensor: download "
            "it again.",
            index,
        )
    for name in set(weight_map.values()):
        if not name.endswith(".safetensors"):
            raise CheckpointError(
                f"The index names the shard {name!r}, but only .safetensors files can be read: "
                "get the safetensors version of the model.",
                index,
            )
        if not name == PurePosixPath(name).name == PureWindowsPath(name).name or "\0" in name:
            raise CheckpointError(
                f"The index names the shard {name!r}, which is outside its folder: download the "
                "index from the model's publisher.",
                index,
            )
    return weight_map


def _read_shard(index: Path, name: str) -> Header:
    shard = index.parent / name
    if not shard.exists():
        raise CheckpointError(
            f"A shard in {index.name} is missing, but all shards must be next to the index: "
            "finish the download.",
            shard,
        )
    return read_header(shard)


def _check_agreement(
    index: Path, weight_map: Mapping[str, str], headers: Mapping[str, Header]
) -> None:
    lost = sorted(name for name, shard in weight_map.items() if name not in headers[shard].tensors)
    if lost:
        raise CheckpointError(
            f"The shard lacks the tensor {lost[0]!r} that {index.name} lists in it ({len(lost)} "
            "such in all): download index and shards again, from one source.",
            index.parent / weight_map[lost[0]],
        )
    for shard, header in headers.items():
        unlisted = sorted(name for name in header.tensors if weight_map.get(name) != shard)
        if unlisted:
            raise CheckpointError(
                f"The shard has the tensor {unlisted[0]!r}, which {index.name} does not list "
                f"there ({len(unlisted)} such in all): download index and shards again, from one "
                "source.",
                index.parent / shard,
            )
