"""Reads the header of a safetensors file, never the weights, as strictly as the
reference implementation (https://github.com/huggingface/safetensors#format): what one reader
accepts and the next refuses costs a 40 GB download. Names the tensor at fault, and gives offsets.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CheckpointError
from ..files import parse_object, read_bytes

MAX_JSON_BYTES = 100_000_000  # what the safetensors format allows for its own header
State = tuple[tuple[str, int, int], ...]


def fingerprint(files: Iterable[Path]) -> State:
    """Returns (path, modification time in ns, bytes) of each file that there is.

    Whatever is remembered of files has this key, of all files that it was read from.
    """
    found = []
    for path in files:
        with suppress(OSError, ValueError):  # reading says what is wrong
            status = path.stat()
            if not stat.S_ISDIR(status.st_mode):
                found.append((str(path), status.st_mtime_ns, status.st_size))
    return tuple(found)


def read_object(path: Path, what: str) -> dict[str, Any]:
    """Reads the JSON object in the file `path`; `what` names its purpose in the error.

    Raises:
        CheckpointError: the file is missing, unreadable, larger than 100 MB or not a JSON object.
    """
    try:
        return parse_object(read_bytes(path, MAX_JSON_BYTES, pipes=False))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"{path.name}, {what}, is not readable JSON ({reason}): download it again.", path
        ) from error


# Names the files that are often passed where a safetensors file is needed, by content and, for
# pickles, by suffix.

PICKLE_SUFFIXES = frozenset({".pt", ".pth", ".ckpt", ".bin", ".pkl"})


def _pickle_error(path: Path, evidence: str) -> CheckpointError:
    return CheckpointError(
        f"This is a pickle ({evidence}), which can run any code and is never opened here: get the "
        "same weights as .safetensors.",
        path,
    )


def refuse_pickle_suffix(path: Path) -> None:
    """Raises CheckpointError for a file that is named like pickled weights, whatever is in it."""
    if path.suffix.lower() in PICKLE_SUFFIXES and os.path.isfile(path):
        raise _pickle_error(path, f"by its suffix {path.suffix}")


# What aria2, axel and lftp keep next to a file that has its name and its size before its content.
UNFINISHED = (".aria2", ".st", ".lftp-pget-status")


def refuse_unfinished(path: Path) -> None:
    """Raises CheckpointError for a file whose download has not ended."""
    places = (path, os.path.realpath(path)) if os.path.islink(path) else (path,)
    for beside in filter(os.path.isfile, (f"{it}{end}" for it in places for end in UNFINISHED)):
        raise CheckpointError(
            f"The download of this file is not finished, because {os.path.basename(beside)!r} is "
            "next to it: finish the download, or delete that file if this one is complete.",
            path,
        ) from FileExistsError(beside)  # of the disk: it may be gone when it is asked again


def refuse_foreign_content(path: Path, first: bytes) -> None:
    """Raises CheckpointError when `first`, the first bytes of the file `path`, is the start of
    another known format.
    """
    # A zip's ninth byte is its compression method and a safetensors file's is `{`: by it, a header
    # whose length happens to spell one of these marks is still read as a header.
    if first[8:9] != b"{":
        if first.startswith(b"PK\x03\x04"):
            raise _pickle_error(path, "a zip archive, as torch.save writes it")
        if first.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
            raise _pickle_error(path, "its first bytes are the pickle protocol mark")
    if first.startswith(b"GGUF"):
        raise CheckpointError(
            "This is a GGUF file with another suffix: give it a name that ends in .gguf.",
            path,
        )
    if first.startswith(b"version https://git-lfs.github.com/spec/"):
        raise CheckpointError(
            "This is a git-LFS pointer, not the weights: run `git lfs pull` in its folder.",
            path,
        )
    if (
        first.lstrip(b"\xef\xbb\xbf \t\r\n")[:9]
        .lower()
        .startswith((b"<!doctype", b"<html", b"<?xml"))
    ):
        raise CheckpointError(
            "This is a saved web page, not weights: download the file itself.",
            path,
        )


MAX_HEADER_BYTES = 100_000_000
LARGEST_NUMBER = 2**63 - 1

# Weights as they are; any other dtype is quantized or an index.
PLAIN_DTYPES = ("F32", "F16", "BF16")
DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class TensorInfo:
    """Describes one tensor; `start` and `end` are byte offsets into the data after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """Holds what the first 8 + `header_bytes` bytes of the file `path` say, safetensors or GGUF."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    header_bytes: int
    file_bytes: int
    mtime_ns: int
    gguf: bool = False

    @property
    def data_start(self) -> int:
        """Tells where offset 0 of the tensors lies in the file, in bytes."""
        return 8 + self.header_bytes


def read_header(path: str | os.PathLike[str]) -> Header:
    """Reads 8 + N bytes of a safetensors file.

    Raises:
        CheckpointError: the file is missing, unreadable, another format, truncated, or breaks a
            rule of the format.
    """
    path = Path(path)
    refuse_pickle_suffix(path)
    refuse_unfinished(path)
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        file_bytes = status.st_size
        raw = _header_json(file, path, file_bytes)
    try:
        entries = parse_object(raw)
    except ValueError as error:
        raise _broken(
            path, f"its header is not the JSON object the format asks for ({error})"
        ) from error
    metadata = _metadata(path, entries.pop("__metadata__", {}))
    tensors = {name: _tensor(path, name, entry) for name, entry in entries.items()}
    _check_coverage(path, tensors, file_bytes - 8 - len(raw))
    return Header(path, tensors, metadata, len(raw), file_bytes, status.st_mtime_ns)


def open_regular(path: Path) -> BinaryIO:
    """Opens an ordinary file for reading; a pipe or a device would block or never end.

    Raises:
        CheckpointError: there is no such file, it is something else, or it may not be read.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            return path.open("rb")
    except FileNotFoundError as error:
        link = path.is_symlink()
        remedy = "restore what this link leads to, or delete it" if link else "check the path"
        raise CheckpointError(f"There is no such file: {remedy}.", path) from error
    except PermissionError as error:
        raise CheckpointError(
            "This user has no permission to read this file: change its permissions or run as its "
            "owner.",
            path,
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"This file cannot be opened ({reason}): check the path and the disk: {str(path)!r}."
        ) from error
    if stat.S_ISDIR(mode):
        raise CheckpointError(
            "This is a folder, but a .safetensors file is needed: name the file in it.", path
        )
    raise CheckpointError(
        "This is a pipe or a device, not a file: save the checkpoint to a file first.", path
    )


def _header_json(file: BinaryIO, path: Path, file_bytes: int) -> bytes:
    first = file.read(512)
    if not first:
        raise CheckpointError("This file is empty (0 bytes): download it again.", path)
    refuse_foreign_content(path, first)
    length = int.from_bytes(first[:8], "little")
    if len(first) < 9 or first[8:9] != b"{":
        raise CheckpointError(
            "This is not a safetensors file, which starts with 8 bytes of length and a JSON "
            "header: get the model as .safetensors.",
            path,
        )
    if length > MAX_HEADER_BYTES:
        raise _broken(
            path,
            f"it announces a header of {length:,} bytes, but the format allows "
            f"{MAX_HEADER_BYTES:,}",
        )
    if length > file_bytes - 8:
        raise CheckpointError(
            f"This file is truncated (its header needs {length:,} bytes, but {file_bytes - 8:,} "
            "are there): download it again.",
            path,
        )
    file.seek(8)
    return file.read(length)


def _broken(path: Path, rule: str) -> CheckpointError:
    return CheckpointError(
        f"This is not a valid safetensors file: {rule}; download or save it again.", path
    )


def _metadata(path: Path, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(entry, str) for entry in value.values()):
        raise _broken(path, "__metadata__ must map strings to strings")
    return value


def _is_number(value: Any) -> bool:
    return (
        type(value) is int and 0 <= value <= LARGEST_NUMBER
    )  # JSON's true is an int to isinstance


def _tensor(path: Path, name: str, entry: Any) -> TensorInfo:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _broken(path, f"tensor {name!r} needs the fields dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"The dtype {dtype!r} of tensor {name!r} is unknown: save the checkpoint in one of "
            f"{', '.join(sorted(DTYPE_BITS))}.",
            path,
        )
    if not isinstance(shape, list) or not all(map(_is_number, shape)):
        raise _broken(path, f"the shape of tensor {name!r} must be a list of whole numbers from 0")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_number, offsets)):
        raise _broken(path, f"the data_offsets of tensor {name!r} must be two whole numbers from 0")
    info = TensorInfo(dtype, tuple(shape), *offsets)
    if info.nbytes * 8 != info.elements * DTYPE_BITS[dtype]:
        raise _broken(
            path,
            f"tensor {name!r} of {dtype} {shape} does not have the size of its data_offsets "
            f"{offsets}",
        )
    return info


def _check_coverage(path: Path, tensors: Mapping[str, TensorInfo], data_bytes: int) -> None:
    position = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != position:
            fault = (
                "overlaps the tensor before it"
                if info.start < position
                else "leaves a gap before it"
            )
            raise _broken(
                path,
                f"tensor {name!r} {fault} (it starts at byte {info.start:,}, not {position:,})",
            )
        position = info.end
    if position > data_bytes:
        raise CheckpointError(
            f"This file is truncated (its header describes {position:,} bytes of weights, but "
            f"{data_bytes:,} are there): download it again.",
            path,
        )
    if position < data_bytes:
        raise _broken(path, f"{data_bytes - position:,} bytes follow the last tensor, but none may")
