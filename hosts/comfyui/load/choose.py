"""Lists what the loader nodes offer: files and folders in ComfyUI's model folders, whose names end
with "/", and the micro model. Names never hold a machine's paths, so that a workflow opens on
another machine. Files whose header is Qwen-Image's come first, and a new node chooses the first.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

import folder_paths

from ....caches import remembered
from ....errors import CheckpointError, SettingError
from ....families.registry import (
    belongs,
    family_titled,
    is_later,
    micro_folders,
    pipeline_family,
    takes_text,
)
from ....loaders.checkpoint import read_index
from ....loaders.gguf import GGUF_SUFFIX, SPLIT
from ....loaders.header import State
from ....loaders.shards import INDEX_NAME
from ....loaders.source import (
    PIPELINE_INDEX,
    PLACES,
    Source,
    bundled_micro_folder,
    entries_of,
    open_parts,
    open_source,
    state_of,
)

MICRO = "micro (bundled)"
# {choice: name of the family}; that of the first family, which is shown last, has the short name
MICROS = {f"micro {name} (bundled)": name for name in [*micro_folders()][1:]}
MICROS[MICRO] = next(iter(micro_folders()))
AUTOMATIC = "automatic"
# Where ComfyUI keeps each part, alone or in a full checkpoint; folders of a whole model lie in
# `diffusers`.
FOLDERS = {
    "transformer": ("diffusion_models", "checkpoints"),
    "text_encoder": ("text_encoders", "checkpoints"),
    "vae": ("vae", "checkpoints"),
}
GGUF = "qwen_l40s_gguf"
# A refusal begins with the widget that is wrong. ComfyUI's page names another one of the same node,
# where the node behind it has an input of that name: `vae` of VAE Decode.
WIDGETS = {"transformer": "model", "text_encoder": "text_encoder", "vae": "vae"}
DEPTH = 2  # models/diffusers/<owner>/<name>
# ComfyUI asks for the choices several times for each prompt, and a header takes 15 ms the first
# time, or as long as a network disk takes: of many files only these are looked at.
LOOKED_AT = 12
NAMED = "qwen"
LISTED = 3  # choices in a message


def choices(role: str) -> list[str]:
    """Returns what fits the role first, then the rest, each as ComfyUI sorts files and then
    folders; the bundled micro model last.
    """
    return offered(role)["options"]


def offered(role: str) -> dict[str, Any]:
    """Returns a widget's `options` and `default`: the first that fits, else the micro model."""
    fitting, others = _ranked(role)
    micros = [name for name in MICROS if bundled_micro_folder(MICROS[name]).is_dir()]
    return {"options": [*fitting, *others, *micros], "default": next(iter(fitting), MICRO)}


def _ranked(role: str) -> tuple[list[str], list[str]]:
    """Returns choices that fit, the likeliest first, and the others; never an error."""
    files = _files(role)
    folders = _folders(role)
    looked_at = files if len(files) <= LOOKED_AT else [it for it in files if NAMED in it.lower()]
    ranks = {name: _rank_of_file(name, role) for name in looked_at[:LOOKED_AT]}
    ranks |= {name: _rank_of_folder(path, role) for name, path in folders.items()}
    fitting = sorted((it for it in ranks if ranks[it] is not None), key=ranks.__getitem__)
    return fitting, [name for name in (*files, *folders) if name not in fitting]


def _rank_of_file(name: str, role: str) -> tuple[bool, ...] | None:
    # The published Qwen-Image comes before Layered and 2.1, and its VAE before Wan's, which has
    # the same tensors.
    path = path_of(name, FOLDERS[role])
    if path is None:  # removed just now
        return None
    try:
        part = _inspected(path, role).part
    except CheckpointError:  # of another model, or not readable
        return None
    if not takes_text(part.dims.get("hidden")):
        return None
    later = is_later(part.family, part.dims)
    return False, NAMED not in name.rpartition("/")[2].lower(), later


def _rank_of_folder(path: Path, role: str) -> tuple[bool, ...] | None:
    try:
        if os.path.isfile(path / PIPELINE_INDEX):
            _, pipeline = read_index(path)
            family = pipeline_family(pipeline)
            if family is None:
                return None
            return True, False, is_later(family.pipelines[pipeline], {})
        source = _inspected(path, role)
    except CheckpointError:
        return None
    return True, False, is_later(source.part.family, source.part.dims)


def resolve(name: str, role: str) -> Path:
    """Returns the path behind a choice."""
    if name in MICROS:
        return bundled_micro_folder(MICROS[name])
    path = _folders(role).get(name) if name.endswith("/") else path_of(name, FOLDERS[role])
    if path is None:
        place = "models/diffusers" if name.endswith("/") else PLACES[role][1]
        raise SettingError(
            f"{WIDGETS[role]}: {name!r} is not in {place}: put the file there and press R to "
            f"refresh, or choose {_some([*_ranked(role)[0], MICRO])}."
        )
    return path


def path_of(name: str, folders: Iterable[str]) -> Path | None:
    """Finds what has a name in ComfyUI's folders: a file, else what ComfyUI lists as one, a link to
    nothing, a pipe or a socket, of which `loaders.header.open_regular` says what it is.
    """
    if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
        return None
    roots = [root for folder in folders for root in folder_paths.get_folder_paths(folder)]
    paths = [Path(root, name) for root in roots]
    listed = (it for it in paths if os.path.lexists(it) and not os.path.isdir(it))
    return next(filter(os.path.isfile, paths), None) or next(listed, None)


def _some(names: list[str]) -> str:
    *first, last = names if len(names) <= LISTED else (*names[: LISTED - 1], names[-1])
    return f"{', '.join(first)} or {last}" if first else last


def source_of(name: str, role: str) -> Source:
    """Returns what the headers behind a choice say, read once until a file is replaced."""
    return _inspected(resolve(name, role), role)


def _inspected(path: Path, role: str) -> Source:
    state, index = state_of(path), str(path / PIPELINE_INDEX)
    whole = any(name == index for name, *_ in state)  # whose parts lie in folders of their own
    states = (role, state, state_of(path / role)) if whole else (None, state)
    try:
        found = _read(path, *states)[role]
    except CheckpointError as error:
        found = str(error)
    if isinstance(found, str):
        raise CheckpointError(f"{WIDGETS[role]}: {found.removeprefix('This is ')}")
    return found


@remembered
@functools.lru_cache(maxsize=1024)
def _read(path: Path, role: str | None, *states: State) -> Mapping[str, Source | str]:
    try:
        return open_parts(path) if role is None else {role: open_source(path, role)}
    except OSError as error:
        reason = f"This file cannot be read ({error.strerror}): check the disk."
        raise CheckpointError(reason, path) from error
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):  # of the disk: the next time it may be well
            raise
        return dict.fromkeys(PLACES, str(error))


# {(files of a model, role): the choices of its last check, and the companion that was found}
_companions: dict[tuple[State, str], tuple[list[str], Path]] = remembered({})


def find_companion(model: Source, role: str, *, look: bool = True) -> Source:
    """Returns the text encoder or VAE that belongs to a model: from the same folder or checkpoint,
    else the file whose header fits.

    Of several, one that is named after Qwen comes first (Wan 2.1's VAE has the same tensors), then
    a text encoder with its vision tower, then what is not quantized, then ComfyUI's order.

    Args:
        look: through the folder, as the check of a prompt does. Without it, as in the run of that
            prompt, what the check found is taken, unless a file has come or gone.

    Raises:
        CheckpointError: none fits; the message says what to download to where.
    """
    whole = model.path.parent if os.path.isfile(model.path.parent / PIPELINE_INDEX) else model.path
    try:
        return _inspected(whole, role)
    except CheckpointError:
        if whole != model.path:  # a diffusers folder says what is wrong with it
            raise
    key, files = (model.state, role), _files(role)
    if not look and key in _companions and _companions[key][0] == files:
        return _inspected(_companions[key][1], role)
    fitting = [
        (path, source) for path, source in _sources(role) if belongs(source.part, model.part)
    ]
    if not fitting:
        family = family_titled(model.part.family)
        raise CheckpointError(
            f"{WIDGETS[role]}: {PLACES[role][1]} has no file with "
            f"{getattr(family, role).part} for {model.path.name}: download one from "
            f"huggingface.co/{family.repository}, or choose a file by name."
        )
    path, found = min(fitting, key=lambda it: _rank(it[1]))
    _companions[key] = files, path
    return found


def check_text_width(model: Source, text_encoder: Source) -> None:
    """Raises CheckpointError when the two are of different models: sampling would fail late."""
    takes, gives = model.part.dims.get("joint_dim"), text_encoder.part.dims.get("hidden")
    if takes != gives:
        raise CheckpointError(
            f"text_encoder: the model takes text {takes} wide, but the text encoder gives "
            f"{gives}: choose the model's text encoder.",
            text_encoder.path,
        )


def _rank(source: Source) -> tuple[bool, bool, bool]:
    # Of a component folder the name above it counts; a path's beginning says nothing of the model.
    name = f"{source.path.parent.name}/{source.path.name}".lower()
    blind = source.role == "text_encoder" and "vision_dim" not in source.part.dims
    return "qwen" not in name, blind, bool(source.part.quantization.layers)


def _sources(role: str) -> Iterator[tuple[Path, Source]]:
    fitting, others = _ranked(role)
    folders = _folders(role)
    for name in (*fitting, *others):
        path = folders.get(name) or path_of(name, FOLDERS[role])
        with suppress(CheckpointError):  # another model's file, or not readable
            if path is not None:
                yield path, _inspected(path, role)


def _files(role: str) -> list[str]:
    names = [name for folder in FOLDERS[role] for name in folder_paths.get_filename_list(folder)]
    return names if role != "transformer" else [*names, *_gguf_files()]


def _gguf_files() -> list[str]:
    # ComfyUI's own lists leave the suffix out; a name of ours for the same folders is kept as
    # theirs are, and looked through again only when a folder has changed.
    for root in folder_paths.get_folder_paths(FOLDERS["transformer"][0]):
        folder_paths.add_model_folder_path(GGUF, root)
    names = [it for it in folder_paths.get_filename_list(GGUF) if it.lower().endswith(GGUF_SUFFIX)]
    splits = [(name, SPLIT.search(name)) for name in names]
    return [name for name, split in splits if split is None or int(split[1]) == 1]


def _folders(role: str) -> dict[str, Path]:
    found: dict[str, Path] = {}
    names = filter(folder_paths.folder_names_and_paths.__contains__, ("diffusers", *FOLDERS[role]))
    for root in (Path(it) for name in names for it in folder_paths.get_folder_paths(name)):
        for path in _subfolders(root, DEPTH):
            place = _snapshot(path)
            # os.path says no where a folder may not be read, or a link goes round in circles.
            index = os.path.isfile(place / PIPELINE_INDEX)
            if index or any(INDEX_NAME.search(entry.name) for entry in entries_of(place)):
                found.setdefault(path.relative_to(root).as_posix(), place)
    return {f"{name}/": found[name] for name in sorted(found)}


def _snapshot(folder: Path) -> Path:
    """Returns where a folder has its files: one of Hugging Face's cache, in its newest snapshot."""
    found: list[tuple[int, str]] = []
    with suppress(OSError), os.scandir(folder / "snapshots") as entries:
        found = [(it.stat().st_mtime_ns, it.path) for it in entries if _is_folder(it)]
    return Path(max(found)[1]) if found else folder


def _subfolders(root: Path, depth: int) -> Iterator[Path]:
    for folder in (Path(entry.path) for entry in entries_of(root) if _is_folder(entry)):
        yield folder
        # Parts of a diffusers folder are no choices of their own.
        if depth > 1 and not os.path.isfile(folder / PIPELINE_INDEX):
            yield from _subfolders(folder, depth - 1)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):  # a link that goes round in circles
        return entry.is_dir()
    return False
