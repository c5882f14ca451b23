"""Warnings fail a test where this project's code is what must change, and nowhere else."""

import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNKNOWN_ESCAPE = r'"\d"'  # a SyntaxWarning, a DeprecationWarning before Python 3.12


def warn(module, warning):
    warnings.warn_explicit(warning, None, "file.py", 1, module=module)


@pytest.mark.parametrize("file", ["/site-packages/torchao/ops.py", ROOT / ".venv/lib/torchao.py"])
def test_another_package_is_not_byte_compiled(file):
    with warnings.catch_warnings(record=True) as told:
        compile(UNKNOWN_ESCAPE, str(file), "exec")
    assert "invalid escape" in str(told[0].message)


@pytest.mark.parametrize("file", ["nodes/sampler.py", "tests/tiny_model.py"])
def test_a_file_of_ours_is_not_byte_compiled(file):
    with pytest.raises(SyntaxError, match="invalid escape"):
        compile(UNKNOWN_ESCAPE, str(ROOT / file), "exec")


@pytest.mark.parametrize(
    "module", ["torchao", "torch.functional", "tests_of_others", "tiny_models"]
)
def test_another_package_uses_what_is_old(module):
    with warnings.catch_warnings(record=True) as told:
        warn(module, DeprecationWarning("old"))
    assert len(told) == 1


@pytest.mark.parametrize("module", ["qwen_l40s.nodes", "tests.unit.test_x", "test_x", "tiny_model"])
def test_a_module_of_ours_uses_what_is_old(module):
    with pytest.raises(DeprecationWarning):
        warn(module, DeprecationWarning("old"))


@pytest.mark.parametrize(
    "category",
    [pytest.PytestUnhandledThreadExceptionWarning, pytest.PytestUnraisableExceptionWarning],
)
def test_an_exception_that_nothing_catches(category):
    with pytest.raises(category):
        warn("_pytest.runner", category("in a thread"))
