"""The grid's plans and estimates are as they were stored: by the command, in fresh processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def compared(root, folder, *arguments):
    """The command of a checkout, as it runs from another folder."""
    (folder / "qwen_l40s").symlink_to(root)
    command = [sys.executable, "-m", "qwen_l40s.tools.grid", *arguments]
    seed = {"PYTHONHASHSEED": "7"}
    return subprocess.run(
        command, cwd=folder, env=os.environ | seed, capture_output=True, text=True, check=False
    )


def test_a_sample_is_as_stored(tmp_path):
    run = compared(ROOT, tmp_path, "--every", "66")
    assert (run.returncode, run.stdout) == (0, "50 cases, 0 differ\n"), run.stdout + run.stderr


@pytest.mark.slow
def test_all_are_as_stored(tmp_path):
    run = compared(ROOT, tmp_path)
    assert (run.returncode, run.stdout) == (0, "3300 cases, 0 differ\n"), run.stdout + run.stderr
