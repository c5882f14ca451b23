"""Makes the package importable as `qwen_l40s` from a clone of any folder name, installed or not.

unit/ needs no ComfyUI; server/ and page/ talk to one; host/ runs inside one and has its own
conftest.py. What several of them share lies in this folder.
"""

import importlib.util
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

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
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "unit")]
pytest_plugins = ["tiny_model"]

import own_warnings

from qwen_l40s.machine import settings as user_settings

# What the user has measured on this machine, and cards of their own, decide no test.
user_settings.use_settings(user_settings.Settings(cache=str(ROOT / ".pytest_cache" / "qwen-l40s")))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the folder for the pictures of the page that page/test_browser.py can take."""
    parser.addoption("--screenshots", type=Path, help="folder for test_browser.py's screenshots")


def pytest_configure(config: pytest.Config) -> None:
    """Who ends a run that takes too long sends SIGTERM: servers and browsers stop as on Ctrl-C."""
    own_warnings.fail_tests(config)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        import hypothesis
    except ImportError:
        return
    # Speed says nothing on a busy machine. `make test-all` takes the profile "thorough".
    quiet = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
    hypothesis.settings.register_profile("normal", **quiet)
    hypothesis.settings.register_profile("thorough", max_examples=200, **quiet)
    if hypothesis.settings.get_current_profile_name() != "thorough":
        hypothesis.settings.load_profile("normal")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test draws the same numbers whichever ran before it in this process."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def has_card() -> bool:
    """Whether torch sees a CUDA card."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def pytest_report_header() -> list[str]:
    """One line each: which ComfyUI server/ and page/ use, and whether there is a card."""
    from comfyui_host import find_comfyui

    from qwen_l40s.machine.packages import check_comfyui

    found = check_comfyui(find_comfyui())
    lines = [f"ComfyUI: {found.why.fact}"]
    if not found.usable:
        lines = [
            f"ComfyUI: {found.why.fact}; tests against it are skipped: name one with COMFYUI_PATH"
        ]
    if not has_card():
        lines.append("CUDA: torch sees no card; tests marked cuda are left out")
    return lines


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what could only be skipped, and keeps the tests of one server in one process."""
    left_out = [] if has_card() else [item for item in items if item.get_closest_marker("cuda")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("cuda")]
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            folder = item.path.parent.name
            item.add_marker(pytest.mark.xdist_group(item.path.stem if folder == "unit" else folder))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    """Where a test computes: on the processor, and once more on a card."""
    return pytest.importorskip("torch").device(request.param)


@pytest.fixture
def set_settings():
    """Sets some of the user's settings, for one test."""
    before = user_settings.settings()
    yield lambda **given: user_settings.use_settings(replace(before, **given))
    user_settings.use_settings(before)


@pytest.fixture(scope="module")
def one_thread():
    """Torch's threads wait for one another: on a busy machine small work takes 20 times as long."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
