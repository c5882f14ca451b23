"""Writes a safetensors file of which only one tensor at a time is in memory.

Names, dtypes and shapes are known before the first tensor is, so the header is written first and
every tensor then goes to its place. The file appears under its name when it is whole, and else not
at all.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

import torch

from ..errors import UnavailableError, plain_write_errors
from ..spec.formats import format_gib
from .header import DTYPE_BITS, TensorInfo

ALIGNMENT = 8
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
Specs = Mapping[str, tuple[str, tuple[int, ...]]]


class SafetensorsLayout:
    """Tells where everything lies in a file that is still to be written.

    Args:
        specs: {name: (dtype as safetensors names it, shape)}
        metadata: what the header says besides.
    """

    def __init__(self, specs: Specs, metadata: Mapping[str, str]) -> None:
        # Readers map the file and need every tensor at a multiple of its item size.
        order = sorted(specs, key=lambda name: -DTYPE_BITS[specs[name][0]])
        tensors: dict[str, TensorInfo] = {}
        position = 0
        for name in order:
            dtype, shape = specs[name]
            end = position + math.prod(shape) * DTYPE_BITS[dtype] // 8
            tensors[name] = TensorInfo(dtype, shape, position, end)
            position = end
        entries = {
            name: {
                "dtype": info.dtype,
                "shape": list(info.shape),
                "data_offsets": [info.start, info.end],
            }
            for name, info in tensors.items()
        }
        text = json.dumps({"__metadata__": dict(metadata), **entries}).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        self.tensors: Mapping[str, TensorInfo] = tensors
        self.header = len(text).to_bytes(8, "little") + text
        self.file_bytes = len(self.header) + position


class TensorFile:
    """Takes the tensors of a file that is being written, in any order."""

    def __init__(self, file: BinaryIO, path: Path, layout: SafetensorsLayout) -> None:
        self._file, self._path, self._layout = file, path, layout
        self._missing = set(layout.tensors)
        with plain_write_errors(path):
            file.write(layout.header)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes one tensor, which lies on the CPU and has the dtype and shape of the layout.

        Raises:
            UnavailableError: the disk does not take it.
        """
        info = self._layout.tensors[name]
        if (tensor.dtype, tuple(tensor.shape)) != (SAFETENSORS_DTYPES[info.dtype], info.shape):
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, planned: {info}")
        self._missing.remove(name)
        if tensor.numel():
            with plain_write_errors(self._path):
                self._file.seek(len(self._layout.header) + info.start)
                self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def write_all(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes tensors by name, as `write` does one."""
        for name, tensor in tensors.items():
            self.write(name, tensor)

    def finish(self) -> None:
        """Sees to it that every byte is on the disk."""
        if self._missing:
            raise ValueError(f"{min(self._missing)} was never written")
        with plain_write_errors(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())


@contextmanager
def write_safetensors(path: Path, layout: SafetensorsLayout) -> Iterator[TensorFile]:
    """Opens a file next to `path` to write to, and gives it that name when the block ends well.

    After an error in the block, also Ctrl-C, the file is gone and what `path` named is as it was.

    Raises:
        UnavailableError: the folder is not writable, or its disk has too little space.
    """
    _check_space(path.parent, layout.file_bytes)
    # A name of its own for every run, so that no run removes the file of another.
    part = path.with_name(f".{path.name}.{uuid4().hex[:8]}.part")
    with plain_write_errors(path):
        file = part.open("xb")
    try:
        tensors = TensorFile(file, path, layout)
        yield tensors
        tensors.finish()
        with plain_write_errors(path):
            file.close()
            part.replace(path)
    finally:
        with suppress(OSError):  # what a full disk did not take is thrown away
            file.close()
        part.unlink(missing_ok=True)


def _check_space(folder: Path, needed: int) -> None:
    with plain_write_errors(folder):
        free = shutil.disk_usage(folder).free
    if free < needed:
        raise UnavailableError(
            f"The disk has {format_gib(free)} free and the file takes {format_gib(needed)}: "
            "free disk space or choose another disk."
        )
