"""torch's switches for the length of a run, in processes of their own: they are process-wide."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import conftest, torch
from qwen_l40s.optimizations.run import flags_for_a_run
matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
"""
OLDER = """
before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
with flags_for_a_run(False, False):
    assert (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark) == before
try:
    with flags_for_a_run(True, True):
        assert matmul.allow_tf32 and cudnn.allow_tf32 and cudnn.benchmark
        raise InterruptedError
except InterruptedError:
    assert (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark) == before
"""
NEWER = """
if hasattr(matmul, "fp32_precision"):
    matmul.fp32_precision = cudnn.conv.fp32_precision = "ieee"
    with flags_for_a_run(False, False):
        assert matmul.fp32_precision == "ieee"
    with flags_for_a_run(True, False):
        assert matmul.fp32_precision == cudnn.conv.fp32_precision == "tf32"
    assert matmul.fp32_precision == cudnn.conv.fp32_precision == "ieee"
"""


@pytest.mark.parametrize("script", [OLDER, NEWER], ids=["older switches", "newer switches"])
def test_switches_are_put_back(script):
    command = [sys.executable, "-c", SCRIPT + script, str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
