"""Writes a safetensors file of which only one tensor at a time is in memory: the header first, then
every tensor to its place. The file appears under its name when it is whole, and else not at all.
"""

from __future__ import annotations

import atexit
import glob
import hashlib
import json
import logging
import math
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import torch

from ..errors import CheckpointError, QwenL40SError, UnavailableError, plain_write_errors
from ..files import lock
from ..spec.formats import FORMATS, METADATA_KEY, format_gib
from ..version import __version__
from .header import DTYPE_BITS, TensorInfo, fingerprint
from .source import Source, open_source

logger = logging.getLogger(__name__)

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
DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
# Settings that no tensor tells, and that a single file would lose: how a head is split over time,
# height and width.
CONFIG = ("axes_dims_rope",)
Specs = Mapping[str, tuple[str, tuple[int, ...]]]


class SafetensorsLayout:
    """Tells where everything lies in a file that is still to be written."""

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
        for name, tensor in tensors.items():
            self.write(name, tensor)

    def finish(self) -> None:
        if self._missing:
            raise ValueError(f"{min(self._missing)} was not written")
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
            f"The file takes {format_gib(needed)}, but the disk has {format_gib(free)} free: free "
            "disk space, or choose another disk."
        )


def settings_kept(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: config[name] for name in CONFIG if name in config}


def file_metadata(
    precision: str, keep: Sequence[str], config: Mapping[str, Any], **more: str
) -> dict[str, str]:
    """Returns what the header of a quantized file says of it."""
    entry = {
        **more,
        "precision": precision,
        "format": FORMATS[precision].marker,
        "keep": list(keep),
        "version": __version__,
        "config": settings_kept(config),
    }
    return {"format": "pt", METADATA_KEY: json.dumps(entry)}


# The cached quantized file holds what a load has quantized, for the next load. A thread writes it
# next to the original while the first images are generated. ComfyUI lists models by the ends of
# names that it knows, and `SUFFIX` is none of these.

SUFFIX = ".kept"
MADE_FROM = f"{METADATA_KEY}_made_from"  # in the file's header
FORMAT = 1  # another one, where rounding or what a file holds changes
ROOM = 1.1  # of a file's bytes: 30 GB for 25.4 GiB, of which a tenth stays free


class KeptFile:
    """Where the cached quantized file of a transformer is, or would be."""

    def __init__(self, source: Source, precision: str, keep: Sequence[str]) -> None:
        self._source, self._precision, self._keep = source, precision, list(keep)
        self.damaged = False  # what `open` gives, as its reader found: `write` replaces it
        original = source.shards.index or source.files[0]
        self.path = original.with_name(f"{original.name}.{precision}{SUFFIX}")
        self._made_from = self._now()

    def open(self) -> Source | None:
        """Returns the file's headers; None where it is not of this original and settings."""
        with suppress(CheckpointError):
            found = open_source(self.path, "transformer")
            if found.shards.headers[0].metadata.get(MADE_FROM) == self._made_from:
                return found
        return None

    def write(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Begins to write the file, and returns what the report says of it.

        Args:
            tensors: what was loaded. Nothing may change them in place.
        """
        if others := {it.dtype for it in tensors.values()} - DTYPE_NAMES.keys():
            return f"cache_quantized_file: no file is saved, because a tensor is {others.pop()}."
        specs = {name: (DTYPE_NAMES[it.dtype], tuple(it.shape)) for name, it in tensors.items()}
        about = file_metadata(self._precision, self._keep, self._source.config)
        about[MADE_FROM] = self._made_from
        layout = SafetensorsLayout(dict(sorted(specs.items())), about)
        needed = int(ROOM * layout.file_bytes)
        with ExitStack() as held:
            try:
                with plain_write_errors(self.path.parent):
                    free = self._lock(held)
                if free < needed:
                    sizes = f"{format_gib(needed)} are needed and {format_gib(free)} are free"
                    raise UnavailableError(f"{sizes}: free disk space.", self.path.parent)
            except UnavailableError as error:
                return f"cache_quantized_file: no file is saved: {error}"
            work = layout, dict(tensors), held.pop_all()
        thread = threading.Thread(target=self._write, args=work, name="keep_quantized", daemon=True)
        thread.start()
        atexit.register(thread.join, 5)  # seconds, in which it removes its part
        name = f"{self.path.name} ({format_gib(layout.file_bytes)})"
        return f"cache_quantized_file: {name} is being saved for the next load."

    def _lock(self, held: ExitStack) -> int:
        """Keeps other loads from writing, removes what killed ones left, returns the free bytes."""
        if self.path.is_dir():
            raise UnavailableError("a folder has this name: rename it.", self.path)
        path = self.path.with_name(f".{self.path.name}.lock")
        if not lock(held.enter_context(path.open("ab"))):
            raise UnavailableError("another load is already saving this file.")
        held.callback(_remove, path)
        if self.open() and not self.damaged:
            raise UnavailableError("another load has just saved this file.")
        for part in path.parent.glob(f".{glob.escape(self.path.name)}.*.part"):
            part.unlink()
        return shutil.disk_usage(path.parent).free

    def _write(
        self, layout: SafetensorsLayout, tensors: dict[str, torch.Tensor], held: ExitStack
    ) -> None:
        try:
            with held, write_safetensors(self.path, layout) as file:
                if sys.platform == "linux":  # where a thread has a priority of its own
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
                for name in layout.tensors:
                    if not threading.main_thread().is_alive():
                        raise UnavailableError("ComfyUI ends.")
                    file.write(name, tensors.pop(name))
                if self._now() != self._made_from:
                    raise CheckpointError("the original file changed in the meantime.")
        except (OSError, QwenL40SError) as error:
            logger.warning("cache_quantized_file: %s is not saved: %s", self.path.name, error)

    def _now(self) -> str:
        # The original's sizes, times and headers, and the settings.
        states = [state[1:] for state in fingerprint(self._source.files)]
        headers = []
        for header in self._source.shards.headers:
            with header.path.open("rb") as file:
                headers.append(hashlib.sha256(file.read(header.data_start)).hexdigest())
        config = settings_kept(self._source.config)
        settings = {"precision": self._precision, "keep": self._keep, "config": config}
        return json.dumps({"format": FORMAT, "files": states, "headers": headers, **settings})


def _remove(path: Path) -> None:
    with suppress(OSError):  # Windows removes no open file: an empty one stays
        path.unlink()
