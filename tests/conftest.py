"""Makes the package importable as `qwen_l40s` from a clone of any folder name, installed or not."""

import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What the user has measured on this machine, and cards of their own, decide no test.
os.environ["QWEN_L40S_CACHE"] = str(ROOT / ".pytest_cache" / "qwen-l40s")

# `python -m pytest` puts the root on sys.path, where our `cli` and `tools` would shadow other
# people's modules.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

if importlib.util.find_spec("qwen_l40s") is None:
    spec = importlib.util.spec_from_file_location(
        "qwen_l40s", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["qwen_l40s"] = module
    spec.loader.exec_module(module)

# The fixtures of tests/tiny_model.py: toy and real-width Qwen-Image folders.
sys.path.append(str(ROOT / "tests"))
pytest_plugins = ["tiny_model"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the folder for the pictures of the page that test_browser.py can take."""
    parser.addoption("--screenshots", type=Path, help="folder for test_browser.py's screenshots")


def pytest_configure() -> None:
    """Who ends a run that takes too long sends SIGTERM: servers and browsers stop as on Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_report_header() -> str:
    """One line above the tests: which ComfyUI they are compared with, or that there is none."""
    from qwen_l40s.machine.packages import check_comfyui, find_comfyui

    found = check_comfyui(find_comfyui())
    if found.usable:
        return f"ComfyUI: {found.reason}"
    return f"ComfyUI: {found.reason}; tests against it are skipped: {found.remedy}"


@pytest.fixture(scope="module")
def one_thread():
    """Torch's threads wait for one another: on a busy machine small work takes 20 times as long."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
