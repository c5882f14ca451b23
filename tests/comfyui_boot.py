"""A real ComfyUI's modules in this process, and this package beside them: for tests/host."""

import atexit
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# ComfyUI's base folder: models, input and output are in it.
BASE = Path(tempfile.mkdtemp(prefix="qwen-l40s-host-"))
atexit.register(shutil.rmtree, BASE, ignore_errors=True)
MODE = "cpu"


def import_package() -> None:
    """Makes the package importable as `qwen_l40s` from a clone of any folder name."""
    if "qwen_l40s" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "qwen_l40s", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["qwen_l40s"] = package
    spec.loader.exec_module(package)


def start(comfyui: Path, mode: str = "cpu") -> None:
    """Makes `comfy` and `qwen_l40s` importable.

    Args:
        mode: on the processor ("cpu"), on a card ("card"), or on a card with dynamic VRAM
            ("dynamic"), which ComfyUI's main.py switches on before torch is imported.
    """
    global MODE
    MODE = mode
    sys.path.insert(0, str(comfyui))
    if mode == "dynamic":
        import comfy_aimdo.control

        comfy_aimdo.control.init()
    arguments = sys.argv[1:]
    sys.argv[1:] = ["--base-directory", str(BASE), *(["--cpu"] if mode == "cpu" else [])]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.cli_args

    if mode == "dynamic":
        import cuda_malloc  # noqa: F401, by which torch takes the allocator that main.py chooses
    import folder_paths  # noqa: F401, by which the package knows that it is in ComfyUI

    sys.argv[1:] = arguments
    import torch

    torch.set_num_threads(1)
    if mode == "dynamic":
        import comfy.memory_management
        import comfy.model_management
        import comfy.model_patcher

        devices = comfy.model_management.get_all_torch_devices()
        assert comfy_aimdo.control.init_devices((device.index, 0) for device in devices)
        comfy_aimdo.control.set_log_info()  # as main.py; what it logs of a free hides torch's error
        comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
        comfy.memory_management.aimdo_enabled = True
    import_package()
    from qwen_l40s.machine.settings import Settings, use_settings

    use_settings(Settings(cache=str(BASE / "cache")))


def folder(name: str) -> Path:
    """An empty folder for the files of one test module."""
    path = BASE / "of_tests" / name
    path.mkdir(parents=True)
    return path


def refused(error: type[Exception], *words: str, run: Callable[[], Any]) -> None:
    """Checks that `run` raises one sentence with these words."""
    try:
        run()
    except error as caught:
        text = str(caught)
        assert all(word in text for word in words), text
        assert text.endswith(".") and "\n" not in text, text
    else:
        raise AssertionError(f"nothing was wrong, although {words} is")
