"""Reads the headers of a GGUF file or a split set, never the weights, at least as strictly as
llama.cpp and gguf-py (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Names the tensor
at fault.

The `gguf` wheel is not used: it accepts overlapping tensors, keeps an object of each word of a
vocabulary, loops 2^60 times where a count says so, and brings PyYAML and requests into ComfyUI.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..errors import CheckpointError
from .header import Header, TensorInfo, open_regular, refuse_unfinished

GGUF_SUFFIX = ".gguf"
MAGIC = b"GGUF"
SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)


class BlockType(NamedTuple):
    """Says that `elements` of a row follow one another in `bytes`."""

    elements: int
    bytes: int


# The types of published Qwen-Image files.
BLOCK_TYPES = {
    "F32": BlockType(1, 4),
    "F16": BlockType(1, 2),
    "BF16": BlockType(1, 2),
    "Q4_0": BlockType(32, 18),
    "Q4_1": BlockType(32, 20),
    "Q5_0": BlockType(32, 22),
    "Q5_1": BlockType(32, 24),
    "Q8_0": BlockType(32, 34),
    "Q2_K": BlockType(256, 84),
    "Q3_K": BlockType(256, 110),
    "Q4_K": BlockType(256, 144),
    "Q5_K": BlockType(256, 176),
    "Q6_K": BlockType(256, 210),
}
# As of enum ggml_type.
TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1"}
TYPES |= {10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 30: "BF16"}
TYPES |= {16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S"}
TYPES |= {22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
TYPES |= {29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"}
# As of enum gguf_metadata_value_type: how `struct` reads a number of each.
NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
# What general.architecture says of transformers that may be Qwen-Image.
ARCHITECTURES = ("qwen_image", "qwen_image21")
UINT32, STRING, ARRAY = 4, 8, 9
SMALLEST_TENSOR = 24  # bytes of a tensor's entry, without name and dimensions
LONGEST_KEY = 65_535  # bytes, as the format has it
MOST_TEXTS = 2**20  # in a file's lists: they take 0.5 s of a CPU
KEPT_TEXT = 1024  # bytes of a text worth keeping
KEPT = ("general.architecture", "general.alignment", "split.no", "split.count")


def read_gguf(path: str | os.PathLike[str]) -> Header:
    """Reads the metadata and the tensors' entries of one file.

    Returns:
        A header whose tensors have a name of `BLOCK_TYPES` as dtype, and PyTorch's order of
        dimensions; `metadata` holds the entries in `KEPT`, as text.

    Raises:
        CheckpointError: the file is missing, unreadable, truncated, holds a type that is not read,
            or breaks a rule of the format.
    """
    path = Path(path)
    refuse_unfinished(path)
    with open_regular(path) as file:
        return _Reader(path, file).header()


def split_parts(path: Path) -> Iterator[Path]:
    """Gives the parts of a split set by the name of one of them; another file alone."""
    if named := SPLIT.search(path.name):
        before, after = path.name[: named.start(1)], path.name[named.end(1) :]
        for number in range(int(named[2])):
            yield path.with_name(f"{before}{number + 1:05}{after}")
    else:
        yield path


def read_gguf_set(path: Path) -> tuple[Header, ...]:
    """Reads the headers of a file, and of all parts where it is one of a split set."""
    first = read_gguf(path)
    count = first.metadata.get("split.count", "1")
    named = SPLIT.search(path.name)
    if count in ("0", "1") and named is None:
        return (first,)
    if named is None or str(int(named[2])) != count:
        raise CheckpointError(
            f"This is one of {count} parts of a split GGUF file, which are found by their names: "
            "rename it to the name of the download, NAME-00001-of-00002.gguf.",
            path,
        )
    headers = []
    for number, part in enumerate(split_parts(path)):
        if not part.exists():
            raise CheckpointError(
                f"{part.name}, one of {count} parts of a split GGUF file, is missing: put all "
                "parts into one folder.",
                path,
            )
        header = first if part == path else read_gguf(part)
        if (header.metadata.get("split.no"), header.metadata.get("split.count")) != (
            str(number),
            count,
        ):
            raise CheckpointError(
                f"The file name says part {number + 1} of {count}, but its content differs: "
                "download it again.",
                part,
            )
        headers.append(header)
    names = [name for header in headers for name in header.tensors]
    if len(set(names)) < len(names):
        raise CheckpointError(
            "Two parts of this split GGUF file have the same tensor: download all parts again, "
            "from one source.",
            path,
        )
    return tuple(headers)


class _Reader:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        status = os.fstat(file.fileno())
        self.position, self.size, self.texts = 0, status.st_size, 0
        self.mtime_ns = status.st_mtime_ns

    def header(self) -> Header:
        if self._take(4) != MAGIC:
            raise self._broken("it does not begin with GGUF")
        (version,) = self._numbers("I")
        if version & 0xFFFF == 0:
            raise CheckpointError(
                "This GGUF file is big endian, but only little endian files can be read: download "
                "the usual file.",
                self.path,
            )
        if version not in (2, 3):
            raise CheckpointError(
                f"This is version {version} of GGUF, but only 2 and 3 can be read: download a "
                "newer file.",
                self.path,
            )
        tensor_count, entry_count = self._numbers("QQ")
        metadata = self._metadata(entry_count)
        tensors = dict(self._tensors(tensor_count))
        alignment = int(metadata.get("general.alignment", 32))
        if alignment == 0 or alignment & (alignment - 1):
            raise self._broken(f"the alignment of {alignment} bytes is not a power of two")
        if not tensors:
            raise CheckpointError(
                "This GGUF file holds no tensors, only a vocabulary or other metadata: download "
                "the model itself.",
                self.path,
            )
        start = -(-self.position // alignment) * alignment
        self._check_places(tensors, start, alignment)
        self._check_architecture(metadata.get("general.architecture", ARCHITECTURES[0]))
        return Header(self.path, tensors, metadata, start - 8, self.size, self.mtime_ns, gguf=True)

    def _metadata(self, count: int) -> dict[str, str]:
        keys, kept = set(), {}
        for _ in range(self._counted(count, 12, "entries of metadata")):
            key = self._text("a key of its metadata", LONGEST_KEY)
            if key in keys:
                raise self._broken(f"its metadata holds {key!r} twice")
            keys.add(key)
            (kind,) = self._numbers("I")
            value = self._value(kind, key)
            if key in KEPT:
                if value is None or (key == "general.alignment" and kind != UINT32):
                    raise self._broken(f"the metadata {key} has the wrong type")
                kept[key] = value
        return kept

    def _value(self, kind: int, key: str) -> str | None:
        """Returns a number or a short text; None for what is passed over."""
        if kind in NUMBERS:
            return str(*self._numbers(NUMBERS[kind]))
        if kind == STRING:
            (length,) = self._numbers("Q")
            if length > KEPT_TEXT or key not in KEPT:
                self._skip(length)
                return None
            return self._take(length).decode("utf-8", "replace")
        if kind != ARRAY:
            raise self._broken(f"the metadata {key!r} has the unknown type {kind}")
        inner, length = self._numbers("IQ")
        if inner in NUMBERS:
            self._skip(length * struct.calcsize(NUMBERS[inner]))
        elif inner == STRING:
            self.texts += self._counted(length, 8, f"texts of {key}")
            if self.texts > MOST_TEXTS:
                raise self._broken(f"the lists have {self.texts:,} texts, more than any model")
            for _ in range(length):
                self._skip(*self._numbers("Q"))
        else:
            raise self._broken(
                f"the metadata {key!r} is a list of type {inner}, which no model has"
            )
        return None

    def _tensors(self, count: int) -> Iterator[tuple[str, TensorInfo]]:
        names = set()
        for _ in range(self._counted(count, SMALLEST_TENSOR, "tensors")):
            name = self._text("the name of a tensor", LONGEST_KEY)
            if name in names:
                raise self._broken(f"it holds the tensor {name!r} twice")
            names.add(name)
            (dimensions,) = self._numbers("I")
            if dimensions > 4:
                raise self._broken(f"the tensor {name!r} has {dimensions} dimensions")
            shape = self._numbers("Q" * dimensions)[::-1]
            kind, offset = self._numbers("IQ")
            yield name, self._tensor(name, shape, kind, offset)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        dtype = TYPES.get(kind, f"{kind}")
        block = BLOCK_TYPES.get(dtype)
        if block is None:
            raise CheckpointError(
                f"The tensor {name!r} is of the GGUF type {dtype}, which cannot be read. Download "
                f"a file of one of the types {', '.join(BLOCK_TYPES)}.",
                self.path,
            )
        elements = math.prod(shape)
        if not elements:
            raise self._broken(f"the tensor {name!r} has the shape {list(shape)}")
        if block.elements > 1 and (not shape or shape[-1] % block.elements):
            raise self._broken(
                f"the tensor {name!r} of {dtype} has rows of {shape[-1] if shape else 1}, which "
                f"is not a multiple of {block.elements}"
            )
        return TensorInfo(dtype, shape, offset, offset + elements // block.elements * block.bytes)

    def _check_places(self, tensors: dict[str, TensorInfo], start: int, alignment: int) -> None:
        expected = 0
        for name, info in tensors.items():
            if info.start != expected:
                raise self._broken(
                    f"the tensor {name!r} starts at byte {info.start:,} of the weights, but the "
                    f"tensor before it ends at {expected:,}"
                )
            if start + info.end > self.size:
                raise CheckpointError(
                    f"This file is truncated (the tensor {name!r} ends at byte "
                    f"{start + info.end:,}, but the file at {self.size:,}): download it again.",
                    self.path,
                )
            expected = -(-info.end // alignment) * alignment

    def _check_architecture(self, name: str) -> None:
        if name in ARCHITECTURES:
            return
        raise CheckpointError(
            f"This is a GGUF file of {name!r}, not of a Qwen-Image transformer. Use safetensors "
            "for a text encoder or vision tower (mmproj): docs/models.md lists the files.",
            self.path,
        )

    def _counted(self, count: int, least: int, what: str) -> int:
        """Returns a count of things of at least so many bytes each, which the file has room for."""
        if count > (self.size - self.position) // least:
            raise self._broken(
                f"it announces {count:,} {what}, more than fit into {self.size:,} bytes"
            )
        return count

    def _text(self, what: str, most: int) -> str:
        (length,) = self._numbers("Q")
        if length > most:
            raise self._broken(f"{what} is {length:,} bytes long")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._broken(f"{what} is not UTF-8") from error

    def _numbers(self, form: str) -> tuple[int, ...]:
        form = "<" + form
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _take(self, length: int) -> bytes:
        self._go_on(length)
        return self.file.read(length)

    def _skip(self, length: int) -> None:
        self._go_on(length)
        self.file.seek(self.position)

    def _go_on(self, length: int) -> None:
        if length > self.size - self.position:
            raise CheckpointError(
                f"This file is truncated (its header continues after byte {self.size:,}, where "
                "the file ends): download it again.",
                self.path,
            )
        self.position += length

    def _broken(self, rule: str) -> CheckpointError:
        return CheckpointError(
            f"This is not a valid GGUF file: {rule}; download it again.", self.path
        )
