"""Fixed cases of the fuzzer are all read or refused; what is neither is told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits time and memory by Linux")


def fuzz(folder, *arguments, before=""):
    """The command of a clone, as it runs from another folder."""
    (folder / "qwen_l40s").symlink_to(ROOT)
    start = f"from qwen_l40s.tools.fuzz import __main__ as it, targets\n{before}\nit.main()"
    return subprocess.run(
        [sys.executable, "-c", start, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_fixed_cases_of_every_target_are_read_or_refused(tmp_path):
    run = fuzz(tmp_path, "--cases", "250", "--seed", "7")
    assert run.returncode == 0, run.stdout + run.stderr
    *targets, total = run.stdout.splitlines()
    assert len(targets) == 28 and total == "3,500 cases, 0 found"


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        ("raise KeyError('x')", "KeyError"),
        pytest.param("while True: pass", "TooSlowError", marks=pytest.mark.slow),
        pytest.param("[bytes(2**30)]", "MemoryError", marks=pytest.mark.slow),
    ],
)
def test_what_is_wrong_is_told_once_and_can_be_repeated(tmp_path, breaks, said):
    """An error of Python's, what never ends, and what takes too much memory."""
    before = (
        f"def read(path):\n    if path.stat().st_size % 7 == 0:\n        {breaks}\n"
        "it.TARGETS['prices'] = it.TARGETS['prices']._replace(read=read); it.SECONDS = 0.1"
    )
    run = fuzz(tmp_path, "--only=prices", "--cases", "30", "--seed", "7", before=before)
    _, told, again, summary, total = run.stdout.splitlines()
    assert told.startswith("prices: seed 7, case ") and said in told, told
    assert (run.returncode, total) == (1, "30 cases, 1 found") and "1 found" in summary
    (tmp_path / "qwen_l40s").unlink()
    words = again.removeprefix("  again: ").replace("'", "").split()
    alone = fuzz(tmp_path, *words, before=before)
    assert alone.returncode == 1 and said in alone.stderr
