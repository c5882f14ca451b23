"""Runs the tests of this folder inside a real ComfyUI: its modules, in its own Python.

`pytest tests/host` in this project's environment starts pytest once more in ComfyUI's Python.
ComfyUI is imported once in a process, before the first test module is.
"""

import gc
import os
import pkgutil
import resource
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
INSIDE = "QWEN_L40S_TESTS_INSIDE"  # environment: the folder of the ComfyUI whose Python this is
MODES = ("cpu", "card", "dynamic")
STATUS = pytest.StashKey[int]()

# `python -m pytest` puts the root on sys.path, where our `cli`, `nodes` and `tools` would shadow
# ComfyUI's modules.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
sys.path.append(str(HERE.parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "where ComfyUI computes: the processor, a card, or a card with dynamic VRAM"
    parser.addoption("--mode", choices=MODES, default="cpu", help=about)


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Starts the same command in ComfyUI's Python; says in one line where that cannot be."""
    if INSIDE in os.environ:
        return None
    import comfyui_boot

    comfyui_boot.import_package()
    from comfyui_host import comfyui_python, find_comfyui

    from qwen_l40s.machine.packages import check_comfyui

    folder = find_comfyui()
    found = check_comfyui(folder)
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture:
        capture.suspend_global_capture(in_=True)
    if not found.usable:
        print(f"tests/host: not run: ComfyUI: {found.why.fact}; set COMFYUI_PATH to its folder")
        return 0
    python = comfyui_python(folder)
    environment = {
        **os.environ,
        INSIDE: str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(HERE / "packages"), os.environ.get("PYTHONPATH")))
        ),
        "QWEN_L40S_PACKAGES": sysconfig.get_path("purelib"),
    }
    code = "import comfy.options, comfy_kitchen, pytest"
    probe = subprocess.run(
        [python, "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )
    if probe.returncode:
        reason = (probe.stderr.strip().splitlines() or ["it stops"])[-1]
        print(f"tests/host: not run: {python} cannot run the ComfyUI in {folder}: {reason}")
        return 0
    command = [python, "-m", "pytest", *config.invocation_params.args]
    folder = config.invocation_params.dir
    return subprocess.call(list(map(str, command)), cwd=folder, env=environment)


def pytest_configure(config: pytest.Config) -> None:
    """Imports ComfyUI; the process that only hands tests to others does not."""
    distributes = getattr(config.option, "numprocesses", None) and not hasattr(
        config, "workerinput"
    )
    if INSIDE in os.environ and not distributes:
        import comfyui_boot
        import own_warnings

        own_warnings.fail_tests(config)
        comfyui_boot.start(Path(os.environ[INSIDE]), config.getoption("--mode"))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if "comfyui_boot" in sys.modules:
        shutil.rmtree(sys.modules["comfyui_boot"].BASE, ignore_errors=True)
    if INSIDE in os.environ and config.getoption("--mode") == "dynamic":
        # comfy_aimdo 0.4.13 crashes as the interpreter ends after some of ComfyUI's samplers.
        sys.stdout.flush()
        os._exit(config.stash.get(STATUS, 1))


def pytest_ignore_collect() -> bool | None:
    """Nothing here can be imported outside ComfyUI, as where `pytest tests` finds this folder."""
    return None if INSIDE in os.environ else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps what this mode has tests of; `-m cuda` finds all that runs on a card."""
    if INSIDE not in os.environ:
        return
    on_card = config.getoption("--mode") != "cpu"
    kept, rest = [], []
    for item in items:
        if on_card and item.get_closest_marker("each_device"):
            item.add_marker(pytest.mark.cuda)
        needed = [name for marker in item.iter_markers("host_has") for name in marker.args]
        fits = (item.get_closest_marker("cuda") is not None) == on_card and all(map(has, needed))
        (kept if fits else rest).append(item)
        item.add_marker(pytest.mark.xdist_group(item.path.stem))
    if rest:
        config.hook.pytest_deselected(items=rest)
        items[:] = kept


def has(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.fixture
def inference_mode():
    """As ComfyUI runs every prompt."""
    import torch

    with torch.inference_mode():
        yield


@pytest.fixture
def file_limit():
    """Sets the most bytes of a file: a write beyond it fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def exact_convolutions():
    """Without TF32, which rounds fp32 to ten bits on a card, and to others for another batch."""
    import torch

    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(scope="module", autouse=True)
def no_models_left():
    """What a file has loaded is gone before the next one begins."""
    yield
    import comfy.model_management

    comfy.model_management.unload_all_models()
    gc.collect()
    # Of a model that a test file caches: ComfyUI keeps its place where a clone of a clone is gone.
    comfy.model_management.current_loaded_models.clear()


@pytest.fixture
def played_graphs(monkeypatch):
    """Plays a CUDA graph of all blocks where one might be replayed; lists the steps of those."""
    import torch

    from qwen_l40s.optimizations.blocks.products import streams_of
    from qwen_l40s.optimizations.passes import ForwardPass

    steps = []

    def replay(self, given, intercepted):
        text, image, step, entry = given
        refused = self._why_one_by_one(intercepted or bool(self._host.additions))
        if refused or self._prepared.check.wanted(step) or self._host.no_graphs():
            return False
        hash(self._key(given))
        x = torch.cat([it.reshape(-1, it.shape[-1]) for it in (text, image)])
        self._executor.run_all(self._host.blocks, x, step, entry, None, self._host.prefixes)
        self._finish(given, streams_of(x, step.tokens), None)
        steps.append(step)
        return True

    monkeypatch.setattr(ForwardPass, "_replay", replay)
    return steps


@pytest.fixture
def set_settings():
    """Sets some of the user's settings, for one test."""
    from qwen_l40s.machine import settings as user_settings

    before = user_settings.settings()
    yield lambda **given: user_settings.use_settings(replace(before, **given))
    user_settings.use_settings(before)
