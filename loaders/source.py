"""Finds the one part of a model that was asked for, in a file, a full checkpoint, or a sharded,
component or diffusers folder, and refuses everything else by its name. Only headers are read here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from ..families.identify import told
from ..families.registry import family_titled, micro_folders, shape_from_header
from ..files import parse_object
from ..spec.formats import METADATA_KEY
from ..spec.transformer import TransformerShape
from .checkpoint import (
    Checkpoint,
    CheckpointPart,
    inspect_shards,
    named_by_pipeline,
    read_index,
)
from .gguf import split_parts
from .header import State, TensorInfo, fingerprint, read_object
from .quantization import unpacked_shape
from .shards import NUMBERED, STEMS, Shards, read_shards

if TYPE_CHECKING:
    import torch

MICRO = next(iter(micro_folders()))  # of the first family
MICRO_SIDE = 256  # the only size that the micro model was trained at
MICRO_STEPS = 20  # that it is judged at
MICRO_ADVICE = f"micro is trained at {MICRO_SIDE}x{MICRO_SIDE}: generate at that size"
# What tells it from other sizes of Qwen-Image: blocks and text width, and the width of its VAE.
MICRO_TRANSFORMER, MICRO_VAE = (6, 512), 8


def bundled_micro_folder(name: str = MICRO) -> Path:
    """Returns the micro model of a family, a diffusers folder; that of 2.1 need not be there."""
    return Path(__file__).resolve().parents[1] / "models" / micro_folders()[name]


# What Qwen-Image puts before every prompt, and cuts off again after encoding.

# The start of `QwenImagePipeline.prompt_template_encode` and its
# `prompt_template_encode_start_idx`; a test compares them.
TEMPLATE_PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
    "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n"
)
TEMPLATE_PREFIX_TOKENS = 34
# Files that hold a whole tokenizer of the Qwen2 kind.
TOKENIZER_LAYOUTS = (("tokenizer.json",), ("vocab.json", "merges.txt"))


def tokenizer_folders(weights: Path) -> tuple[Path, ...]:
    """Returns where the tokenizer of a text encoder may lie, the likeliest first."""
    folder = weights.parent
    return folder.parent / "tokenizer", folder.parent / "processor", folder


def holds_tokenizer(folder: Path) -> bool:
    """Tells whether a folder has a tokenizer's files; without them an empty one would load."""
    return any(all((folder / name).is_file() for name in names) for names in TOKENIZER_LAYOUTS)


def check_prefix(folder: Path, tokens: int) -> None:
    """Raises CheckpointError when a tokenizer makes another number of tokens of the prefix than
    the 34 that are cut off.
    """
    if tokens != TEMPLATE_PREFIX_TOKENS:
        raise CheckpointError(
            f"The tokenizer encodes Qwen-Image's chat template in {tokens} tokens instead of "
            f"{TEMPLATE_PREFIX_TOKENS}: use the tokenizer folder of Qwen-Image.",
            folder,
        )


# What people call a part, and where ComfyUI keeps it.
PLACES = {
    "transformer": ("the Qwen-Image transformer", "models/diffusion_models"),
    "text_encoder": ("the Qwen2.5-VL text encoder", "models/text_encoders"),
    "vae": ("the Qwen-Image VAE", "models/vae"),
}
PIPELINE_INDEX = "model_index.json"


@dataclass(frozen=True)
class Source:
    path: Path  # what was chosen, or the component folder inside it
    role: str  # transformer, text_encoder or vae
    # what its header says; `part.prefix` stands before its tensors' names in the files
    part: CheckpointPart
    shards: Shards
    # the config.json of a component folder, or what a file of this package's own says instead;
    # empty when there is neither
    config: Mapping[str, Any]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Returns {name less the part's prefix: what the header says of it}."""
        prefix = self.part.prefix
        return {
            name.removeprefix(prefix): info
            for name, info in self.shards.tensors.items()
            if name.startswith(prefix)
        }

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(header.path for header in self.shards.headers)

    @property
    def state(self) -> State:
        """Returns the `fingerprint` that `files` had when their headers were read."""
        headers = self.shards.headers
        return tuple((str(it.path), it.mtime_ns, it.file_bytes) for it in headers)

    def state_now(self) -> State:
        """Returns the `fingerprint` of all that the part is read from, a tokenizer with it."""
        state = state_of(self.path)
        if self.role == "text_encoder":
            for folder in tokenizer_folders(self.files[0]):
                state += _state_of_folder(folder, (".json", ".txt"))
        return state


def entries_of(folder: Path) -> list[os.DirEntry[str]]:
    """Lists a folder; empty where it cannot be."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (OSError, ValueError):
        return []


def state_of(path: Path) -> State:
    """Returns the `fingerprint` of all that `open_source` reads of a file or of a part's folder:
    weights with every part of a set, indexes and settings.
    """
    state = fingerprint(takewhile(os.path.lexists, split_parts(path)))
    if not state:
        index = fingerprint([path.parent / PIPELINE_INDEX])
        return index + _state_of_folder(path, (".safetensors", ".json"))
    return state + fingerprint([path.with_name("config.json")] if path.stem in STEMS else [])


def _state_of_folder(folder: Path, ends: tuple[str, ...]) -> State:
    names = sorted(it.name for it in entries_of(folder) if it.name.endswith(ends))
    return fingerprint(folder / name for name in names)


def open_source(path: str | os.PathLike[str] | Source, role: str) -> Source:
    """Reads the headers behind `path` and returns its part of that role; a `Source` as it is.

    Raises:
        CheckpointError: there is no such part, it contradicts itself, or this package cannot run
            it; the message says what the file is instead and what to choose.
    """
    if isinstance(path, Source):
        return path
    path = Path(path)
    if not os.path.isfile(path / PIPELINE_INDEX):
        return _part_of(path, role, *_read(path))
    _, pipeline = read_index(path)
    if not os.path.isdir(path / role):
        raise CheckpointError(
            f"The folder {role}/ with {PLACES[role][0]} is missing: finish the download.",
            path,
        )
    source = _part_of(path / role, role, *_read(path / role))
    return replace(source, part=named_by_pipeline(source.part, pipeline))


def open_parts(path: Path) -> dict[str, Source | str]:
    """Reads the headers behind a file or a component folder once, for every role.

    Returns:
        {role: its part, or why it has none that runs}
    """
    shards, checkpoint = _read(path)
    found: dict[str, Source | str] = {}
    for role in PLACES:
        try:
            found[role] = _part_of(path, role, shards, checkpoint)
        except CheckpointError as error:
            found[role] = str(error)
    return found


def _read(path: Path) -> tuple[Shards, Checkpoint]:
    if NUMBERED.search(path.name):
        raise CheckpointError(
            "This is one shard of several: choose the folder, or the index that lists all shards.",
            path,
        )
    shards = read_shards(path)
    return shards, inspect_shards(shards)


def _part_of(path: Path, role: str, shards: Shards, checkpoint: Checkpoint) -> Source:
    parts = [part for part in checkpoint.parts if part.role == role]
    if len(parts) != 1:
        raise CheckpointError(_wrong(role, checkpoint.parts, len(parts)), path)
    (part,) = parts
    for fault in (*part.errors, *part.cannot_run):
        raise CheckpointError(fault, path)
    settings = _settings(path, shards)
    if family := family_titled(part.family):
        part = family.from_config(part, settings)
    return Source(path, role, part, shards, settings)


def _settings(path: Path, shards: Shards) -> dict[str, Any]:
    # That of a component folder, else what this package wrote into its own file: next to a file of
    # any other name a config.json may be another model's.
    weights = shards.index or shards.headers[0].path
    in_folder = path.is_dir() or shards.index is not None or weights.stem in STEMS
    config = weights.parent / "config.json"
    if in_folder and os.path.isfile(config):
        return read_object(config, "the settings of the weights")
    written = shards.headers[0].metadata.get(METADATA_KEY)
    if written is None:
        return {}
    try:
        settings = parse_object(written.encode()).get("config", {})
        if not isinstance(settings, dict):
            raise ValueError("config must be an object")
    except ValueError as error:
        raise CheckpointError(
            f"The {METADATA_KEY} metadata is broken ({error}): write the file again.", path
        ) from error
    return settings


def _wrong(role: str, parts: tuple[CheckpointPart, ...], count: int) -> str:
    wanted, place = PLACES[role]
    if count:
        return f"This file has {count} parts that could be {wanted}: choose a file with one."
    found = parts[0]
    if not found.folder or place.endswith(found.folder):
        return f"{_fact(found)}: choose {wanted}."
    return f"{_fact(found)}, not {wanted}: move it to models/{found.folder}."


def _fact(part: CheckpointPart) -> str:
    name = told(part.family)
    if name.startswith("looks like"):
        return f"This {name}, not Qwen-Image"
    if part.role == "other":
        return f"{name[0].upper()}{name[1:]}"
    if part.role == "transformer" and not part.cannot_run:
        return f"This is a Qwen-Image transformer ({name})"
    article = "" if name.startswith(("a ", "mmproj")) else "a "
    return f"This is {article}{name}"


def joined_bytes(source: Source) -> int:
    """Counts layers that the file has apart, which ComfyUI's model has in one."""
    family = family_titled(source.part.family)
    joined = family.joined if family else {}
    apart = tuple(f".{layer}.weight" for layers in joined.values() for layer in layers)
    return sum(info.nbytes for name, info in source.tensors.items() if name.endswith(apart))


def check_unchanged(source: Source) -> None:
    """Raises CheckpointError where the weights' files are others than when their headers were
    read.
    """
    if fingerprint(source.files) == source.state:
        return
    raise CheckpointError(
        "This file changed while it was read, but all weights must be from one version: load it "
        "again once it is complete.",
        source.path,
    )


# Compares what a file holds with what a host's class needs, because hosts only log the difference
# and then compute with whatever their memory contained before.


def native_names(source: Source, to_native: Callable[[str], str]) -> dict[str, str]:
    """Returns {name in ComfyUI: name in the file, less its prefix}."""
    names: dict[str, str] = {}
    for name in source.tensors:
        native = to_native(name)
        if native in names:
            raise CheckpointError(
                f"This file has {native!r} twice, as {names[native]!r} and as {name!r}: download "
                "it from the model's publisher.",
                source.path,
            )
        names[native] = name
    return names


def left_out(names: Collection[str], what: str) -> tuple[str, ...]:
    """Names the tensors, if any, that are left out as ComfyUI's loader leaves them out."""
    first, count = next(iter(names), ""), len(names)
    told = f"{first!r}" if count == 1 else f"{count} tensors such as {first!r}"
    return (f"{told} left out, because {what} does not have it",) if names else ()


def check_names(
    path: Path,
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    what: str,
) -> None:
    """Compares {name: shape} of a file with that of a class.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or of another shape.
    """
    if missing := sorted(expected.keys() - found.keys()):
        raise CheckpointError(
            f"This file lacks the tensor {missing[0]!r} ({len(missing)} in all) of {what}: "
            "download it again.",
            path,
        )
    if unexpected := sorted(found.keys() - expected.keys()):
        raise CheckpointError(
            f"This file has the tensor {unexpected[0]!r} ({len(unexpected)} in all), which {what} "
            "does not have: download the file from the model's publisher.",
            path,
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise CheckpointError(
                f"The tensor {name!r} has the shape {found[name]}, but {what} has {shape}: "
                "download the file from the model's publisher.",
                path,
            )


def shapes_of(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def check_complete(source: Source) -> TransformerShape:
    """Compares a transformer's header with what its sizes ask for, and returns the sizes.

    Raises:
        CheckpointError: a tensor is missing or has another shape; hosts only log that, and would
            run on random memory.
    """
    part = source.part
    try:
        shape = shape_from_header(part.family, part.dims, part.blocks)
    except CheckpointError as error:
        raise CheckpointError(error, source.path) from error
    found = {
        name: unpacked_shape(part.quantization, name, info) for name, info in source.tensors.items()
    }
    expected = shape.tensors()
    # What else a file holds, such as scales and markers, is for others to judge.
    known = {name: sizes for name, sizes in found.items() if name in expected}
    check_names(source.path, known, expected, f"a transformer with {shape.blocks} blocks")
    return shape
