"""The kept file: what a load has quantized, beside the original, for the next load.

A thread writes it while the first images are made. ComfyUI lists models by the ends of names that
it knows, which `SUFFIX` is none of.
"""

from __future__ import annotations

import atexit
import glob
import hashlib
import json
import logging
import os
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from ...errors import CheckpointError, QwenL40SError, UnavailableError, plain_write_errors
from ...files import lock
from ...loaders.quantized_file import DTYPE_NAMES, file_metadata
from ...loaders.source import Source, fingerprint, open_source
from ...loaders.writer import SafetensorsLayout, write_safetensors
from ...spec.formats import METADATA_KEY, format_gib

logger = logging.getLogger(__name__)

SUFFIX = ".kept"
MADE_FROM = f"{METADATA_KEY}_made_from"  # in the file's header
FORMAT = 1  # another one, where rounding or what a file holds changes
ROOM = 1.1  # of a file's bytes: 30 GB for 25.4 GiB, of which a tenth stays free


class KeptFile:
    """Where the kept file of a transformer is, or would be."""

    def __init__(self, source: Source, precision: str, keep: Sequence[str], wanted: bool) -> None:
        """Reads what the original is now; `wanted` says whether there shall be such a file."""
        self._source, self._precision, self._keep = source, precision, list(keep)
        self.damaged = False  # what `open` gives, as its reader found: `write` replaces it
        original = source.shards.index or source.files[0]
        self.path = original.with_name(f"{original.name}.{precision}{SUFFIX}")
        self._made_from = self._now() if wanted else ""

    def open(self) -> Source | None:
        """The file's headers; None where there is none of this original and these settings."""
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
        if not self._made_from:
            return "keep_quantized would write what was quantized to a file for the next load."
        if others := {it.dtype for it in tensors.values()} - DTYPE_NAMES.keys():
            return f"keep_quantized: no file is kept: a tensor is {others.pop()}."
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
                    sizes = f"{format_gib(free)} are free and {format_gib(needed)} needed"
                    raise UnavailableError(f"{sizes}: free disk space.", self.path.parent)
            except UnavailableError as error:
                return f"keep_quantized: no file is kept: {error}"
            work = layout, dict(tensors), held.pop_all()
        thread = threading.Thread(target=self._write, args=work, name="keep_quantized", daemon=True)
        thread.start()
        atexit.register(thread.join, 5)  # seconds, in which it removes its part
        name = f"{self.path.name} ({format_gib(layout.file_bytes)})"
        return f"keep_quantized: {name} is being written for the next load."

    def _lock(self, held: ExitStack) -> int:
        """Keeps other loads from writing, removes what killed ones left, returns the free bytes."""
        if self.path.is_dir():
            raise UnavailableError("a folder has this name: rename it.", self.path)
        path = self.path.with_name(f".{self.path.name}.lock")
        if not lock(held.enter_context(path.open("ab"))):
            raise UnavailableError("another load is writing one.")
        held.callback(_remove, path)
        if self.open() and not self.damaged:
            raise UnavailableError("another load has just written one.")
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
                    raise CheckpointError("the original has changed meanwhile.")
        except (OSError, QwenL40SError) as error:
            logger.warning("keep_quantized: %s is not kept: %s", self.path.name, error)

    def _now(self) -> str:
        # The original's sizes, times and headers, and the settings.
        states = [state[1:] for state in fingerprint(self._source.files)]
        headers = []
        for header in self._source.shards.headers:
            with header.path.open("rb") as file:
                headers.append(hashlib.sha256(file.read(header.data_start)).hexdigest())
        settings = {"precision": self._precision, "keep": self._keep}
        return json.dumps({"format": FORMAT, "files": states, "headers": headers, **settings})


def _remove(path: Path) -> None:
    with suppress(OSError):  # Windows removes no open file: an empty one stays
        path.unlink()
