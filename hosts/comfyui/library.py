"""Makes ComfyUI importable for commands, which run outside its server.

Nothing here imports it at the top, so that a command can say that it is not there.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

from ...errors import UnavailableError
from ...optimizations.hardware import first_line
from ...optimizations.software import check_comfyui, find_comfyui


def import_comfyui(*, cpu: bool, keep_on_card: bool = True) -> str:
    """Imports ComfyUI: one that is importable already, else the one that `doctor` finds.

    As a library it has no dynamic VRAM and reads no command line.

    Args:
        cpu: Whether it is to run on the processor.
        keep_on_card: Whether models are told to stay where they are (its `--highvram`), which
            changes no computation.

    Returns:
        Its version.

    Raises:
        UnavailableError: There is none, it is too old, or a package is missing that it imports.
    """
    started = "comfy.model_management" in sys.modules
    added = None
    if not started and not _importable():
        folder = find_comfyui()
        found = check_comfyui(folder)
        if not found.usable:
            raise UnavailableError(f"ComfyUI: {found.reason}; {found.remedy}")
        added = str(Path(folder).resolve())
        sys.path.insert(0, added)
    try:
        if not started:
            arguments = importlib.import_module("comfy.cli_args").args
            arguments.cpu, arguments.highvram = cpu, keep_on_card and not cpu
        importlib.import_module("comfy.sample")  # which imports all that a run needs
        compatibility = importlib.import_module(".compatibility", __package__)
        version = str(importlib.import_module("comfyui_version").__version__)
    except (ImportError, RuntimeError) as error:
        if added:
            sys.path.remove(added)
        raise UnavailableError(
            f"ComfyUI cannot be imported here ({first_line(error)}): use its own Python"
        ) from error
    if reason := compatibility.what_is_off():
        raise UnavailableError(reason)
    return version


def _importable() -> bool:
    try:
        return importlib.util.find_spec("comfy.model_management") is not None
    except ImportError:
        return False
