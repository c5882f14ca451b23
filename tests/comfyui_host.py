"""Where the real ComfyUI is that tests are held against, and the Python that runs it."""

import os
import sys
from pathlib import Path

import pytest

from qwen_l40s.machine import packages


def find_comfyui() -> Path | None:
    """The folder that COMFYUI_PATH names, else the one that the package finds."""
    named = os.environ.get("COMFYUI_PATH")
    return Path(named).expanduser() if named else packages.find_comfyui()


def comfyui_folder() -> Path:
    """ComfyUI's folder; skips the test, visibly, where there is none."""
    folder = find_comfyui() or Path.home() / "ComfyUI"
    if not (folder / "comfy" / "sd.py").is_file():
        pytest.skip(f"no ComfyUI in {folder}: name one with COMFYUI_PATH")
    return folder


def comfyui_python(folder: Path) -> Path:
    """COMFYUI_PYTHON, else its own .venv's where it has one, else this one, which then needs its
    packages.
    """
    if named := os.environ.get("COMFYUI_PYTHON"):
        return Path(named)
    own = folder / ".venv" / "bin" / "python"
    return own if own.exists() else Path(sys.executable)
