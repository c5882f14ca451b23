"""The ComfyUI of this machine: where its code lies, its version, and the folders of its models.

Everything is read as text: importing ComfyUI would start its device management.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from .card import Capability, State
from .packages import release

COMFYUI_FLOOR = (0, 33, 0)
# What the tests ran on, in words; above the second nothing is known.
TESTED = "0.33.0, and 0.33.0 with 0.40's model code"
NEWEST_TESTED = (0, 40)
VERSION_FILE = "comfyui_version.py"
EXTRA_PATHS = "extra_model_paths.yaml"
# Folders below `models` by the name that ComfyUI gives to each kind; the second is an older name.
KINDS = {
    "diffusion_models": ("diffusion_models", "unet"),
    "text_encoders": ("text_encoders", "clip"),
    "vae": ("vae",),
    "checkpoints": ("checkpoints",),
    "diffusers": ("diffusers",),
}


def find_comfyui() -> Path | None:
    """Finds the folder of ComfyUI's code: COMFYUI_PATH, else the first that holds its version among
    those around this package, the current folder, sys.path, those around Python, and ~/ComfyUI.
    """
    named = os.environ.get("COMFYUI_PATH")
    if named:
        return Path(named).expanduser()
    return next((folder for folder in _candidates() if (folder / VERSION_FILE).is_file()), None)


def _candidates() -> Iterator[Path]:
    # With --base-directory custom_nodes is not in ComfyUI's folder, but Python mostly is.
    yield from _package().parents
    yield from (Path.cwd(), *Path.cwd().parents)
    yield from map(Path, sys.path)
    around = Path(sys.prefix).parent  # of ComfyUI/.venv, and of python_embeded next to ComfyUI
    yield from (around, around / "ComfyUI", Path.home() / "ComfyUI")


def _package() -> Path:
    # A link in custom_nodes belongs to the ComfyUI that it lies in.
    folder = Path(os.path.abspath(__file__)).parent.parent
    here = Path(os.environ.get("PWD", folder))  # the shell's, where os.getcwd() follows the link
    linked = here.parent.name == "custom_nodes" and here.is_dir() and here.samefile(folder)
    return here if linked else folder


def check_comfyui(folder: Path | None) -> Capability:
    """Checks whether the code in `folder` is a ComfyUI that is new enough."""
    remedy = "set COMFYUI_PATH to ComfyUI's folder"
    if folder is None:
        return Capability("ComfyUI", State.NOT_USABLE, "not found", remedy)
    try:
        text = (folder / VERSION_FILE).read_text(encoding="utf-8")
    except OSError as error:
        reason = f"no readable {VERSION_FILE} ({error.strerror}) in {folder}"
        return Capability("ComfyUI", State.NOT_USABLE, reason, remedy)
    match = re.search(r'^__version__\s*=\s*["\']([^"\']+)', text, re.MULTILINE)
    found = match.group(1) if match else "of unknown version"
    if release(found) < COMFYUI_FLOOR:
        reason = f"{found}, needs {'.'.join(map(str, COMFYUI_FLOOR))} or newer, in {folder}"
        return Capability("ComfyUI", State.NOT_USABLE, reason, "update ComfyUI")
    newer = f", newer than tested ({TESTED})" if is_newer_than_tested(found) else ""
    return Capability("ComfyUI", State.USABLE, f"{found} in {folder}{newer}")


def is_newer_than_tested(version: str) -> bool:
    return release(version)[:2] > NEWEST_TESTED


def models_folder(code: Path | None) -> Path | None:
    """Finds where this ComfyUI keeps models: below its --base-directory, which holds this package
    too, else below its code.
    """
    nodes = _package().parent
    if nodes.name == "custom_nodes" and nodes not in extra_folders(code).get("custom_nodes", ()):
        return nodes.parent / "models"
    return None if code is None else code / "models"


def model_folders(models: Path, code: Path | None = None) -> dict[str, list[Path]]:
    """Lists {kind: its folders}, those of ComfyUI's extra_model_paths.yaml included.

    Args:
        models: the models folder.
        code: ComfyUI's, where its extra_model_paths.yaml lies.
    """
    found = {kind: [models / name for name in names] for kind, names in KINDS.items()}
    extra = extra_folders(code)
    for kind, names in KINDS.items():
        found[kind] += [path for name in names for path in extra.get(name, ())]
    return found


def extra_folders(code: Path | None) -> dict[str, list[Path]]:
    """Reads {name: folders} of extra_model_paths.yaml as ComfyUI does; empty where there is none,
    or where it cannot be read.
    """
    if code is None or find_spec("yaml") is None:
        return {}
    import yaml

    try:
        sections = yaml.safe_load((code / EXTRA_PATHS).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    found: dict[str, list[Path]] = {}
    for section in sections.values() if isinstance(sections, dict) else ():
        if not isinstance(section, dict):
            continue
        base = os.path.expandvars(os.path.expanduser(str(section.pop("base_path", ""))))
        for name, text in section.items():
            lines = text.splitlines() if isinstance(text, str) else ()
            paths = (Path(os.path.normpath(code / base / line)) for line in lines if line)
            found.setdefault(name, []).extend(paths)
    return found
