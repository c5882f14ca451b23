"""Runs the comfyui_*.py scripts of this folder in a real ComfyUI's own Python."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qwen_l40s.machine.packages import find_comfyui

TESTS = Path(__file__).resolve().parent
on_card = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA card"),
]
# Where scripts run that call `comfyui_boot.start_on`.
MODES = ["cpu", pytest.param("card", marks=on_card), pytest.param("dynamic", marks=on_card)]


def checks_in(script: str) -> list[str]:
    """The functions of a script that `comfyui_boot.run_checks` calls."""
    return re.findall(r"^def (check_\w+)", (TESTS / script).read_text(encoding="utf-8"), re.M)


def comfyui_folder() -> Path:
    """ComfyUI's folder; skips the test, visibly, where there is none."""
    folder = find_comfyui() or Path.home() / "ComfyUI"
    if not (folder / "comfy" / "sd.py").is_file():
        pytest.skip(f"no ComfyUI in {folder}: name one with COMFYUI_PATH")
    return folder


def comfyui_python(folder: Path) -> Path:
    """Its own .venv's Python where it has one, else this one, which then needs its packages."""
    own = folder / ".venv" / "bin" / "python"
    return own if own.exists() else Path(sys.executable)


def run_in_comfyui(script: str, *arguments: Path | str) -> str:
    """What a script prints; skips the test where ComfyUI's requirements are missing.

    Args:
        arguments: what follows ComfyUI's folder on the script's command line.
    """
    folder = comfyui_folder()
    command = [comfyui_python(folder), TESTS / script, folder, *arguments]
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    missing = re.search(
        r"ModuleNotFoundError: No module named '(?!comfy[.'])([\w.]+)'", done.stderr
    )
    if missing:
        pytest.skip(f"{command[0]} cannot run the ComfyUI in {folder}: it has no {missing[1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout
