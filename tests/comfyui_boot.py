"""Starts a real ComfyUI's modules in the comfyui_*.py scripts, and this package beside them.

A script runs as `python comfyui_<what>.py COMFYUI ARGUMENT...` in ComfyUI's own Python, and imports
nothing of either before `start`.
"""

import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COMFYUI, *ARGUMENTS = map(Path, sys.argv[1:])


def start(*flags: str) -> None:
    """Makes `comfy` and `qwen_l40s` importable.

    Args:
        flags: what ComfyUI is to read as its command line, such as `--cpu`.
    """
    sys.path.insert(0, str(COMFYUI))
    sys.argv[1:] = flags
    import comfy.options

    comfy.options.enable_args_parsing()
    import folder_paths  # noqa: F401, by which the package knows that it is in ComfyUI

    # As tests/conftest.py does: the package by its own name, from a clone of any folder name.
    spec = importlib.util.spec_from_file_location(
        "qwen_l40s", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["qwen_l40s"] = package
    spec.loader.exec_module(package)


def start_on(mode: str) -> None:
    """As `start`, on the processor ("cpu"), on a card ("card"), or on a card with dynamic VRAM
    ("dynamic"), which ComfyUI's main.py switches on before torch is imported.
    """
    if mode == "dynamic":
        import comfy_aimdo.control

        comfy_aimdo.control.init()
    start(*(["--cpu"] if mode == "cpu" else []))
    if mode == "dynamic":
        import comfy.memory_management
        import comfy.model_management
        import comfy.model_patcher

        devices = comfy.model_management.get_all_torch_devices()
        assert comfy_aimdo.control.init_devices((device.index, 0) for device in devices)
        comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
        comfy.memory_management.aimdo_enabled = True


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


def run_checks(namespace: Mapping[str, Any]) -> None:
    """Calls every function named `check_...` and prints {name: None or its traceback} as JSON."""
    results: dict[str, str | None] = {}
    checks: dict[str, Callable[[], None]] = {
        name: value for name, value in namespace.items() if name.startswith("check_")
    }
    for name, check in checks.items():
        results[name] = None
        try:
            check()
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results), flush=True)
    if "comfy_aimdo.control" in sys.modules:
        # comfy_aimdo 0.4.13 crashes as the interpreter ends after some of ComfyUI's samplers.
        os._exit(0)
