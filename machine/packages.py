"""Finds the software that a run can use, packages and ComfyUI: versions, and why one is not usable.

A package is imported only where it could be used: a machine without a card loads no CUDA code.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from ..files import user_path
from ..verdict import first_line
from .card import Capability, InstalledCards, State

CUDNN_FLOOR = 91500


@dataclass(frozen=True)
class Package:
    """A distribution, the module it installs and the name in it that a run needs."""

    distribution: str  # its name for pip
    module: str
    floor: str = ""  # the oldest version, as in pyproject.toml; empty when any will do
    # A name in the module that loads the code a run really uses: diffusers and transformers import
    # lazily, and what does not fit together fails only there.
    needs: str = ""
    other: Package | None = None  # the same code under another name, where this is not installed

    @property
    def present(self) -> Package:
        if self.other is None or find_spec(self.module) is not None:
            return self
        return self if find_spec(self.other.module) is None else self.other

    @property
    def requirement(self) -> str:
        return f"{self.distribution}>={self.floor}" if self.floor else self.distribution


TORCH = Package("torch", "torch", "2.4", "version")
# What `generate` and `demo` import besides torch: the `standalone` extra of pyproject.toml.
STANDALONE = (
    Package("diffusers", "diffusers", "0.36", "QwenImagePipeline"),
    Package("transformers", "transformers", "4.56", "Qwen2_5_VLForConditionalGeneration"),
    Package("accelerate", "accelerate", "1.0"),
    Package("safetensors", "safetensors", "0.4.2"),
    Package("numpy", "numpy", "1.25"),
    Package("pillow", "PIL", "10.1"),
    Package("scipy", "scipy", "1.11"),
    Package("tqdm", "tqdm"),
    Package("psutil", "psutil"),
)
# fa3-fwd is a wheel of version 3's forward pass; flash-attn-3 is built from source.
FLASH_ATTENTION_3 = Package(
    *("fa3-fwd", "fa3_fwd_interface", "", "flash_attn_func"),
    other=Package("flash-attn-3", "flash_attn_interface", "", "flash_attn_func"),
)
ISAL = Package("isal", "isal", "1.7")
KITCHEN = Package("comfy-kitchen", "comfy_kitchen", "", "list_backends")
KITCHEN_ATTENTION = replace(KITCHEN, needs="int8_attention")


def check_package(package: Package, *, load: bool = True) -> tuple[Capability, ModuleType | None]:
    """Finds one package and, unless `load` is False, imports it; returns the module too then."""
    package = package.present
    name = package.distribution
    install = f'pip install "{package.requirement}"'
    if find_spec(package.module) is None:
        return State.NOT_USABLE.of(name, "not installed", install), None
    found = installed_version(name)
    if () < release(found) < release(package.floor):
        reason = f"{found}, needs {package.floor} or newer"
        return State.NOT_USABLE.of(name, reason, install), None
    if not load:
        return State.USABLE.of(name, f"{found}, not tested without torch"), None
    try:
        with warnings.catch_warnings():
            # Other people's deprecations say nothing of this machine.
            warnings.simplefilter("ignore")
            module = importlib.import_module(package.module)
            if package.needs:
                getattr(module, package.needs)
    except Exception as error:  # a broken package raises anything: OSError, RuntimeError ...
        reason = f"{found}, but its import fails: {first_line(error)}"
        again = f'pip install --force-reinstall --no-deps "{package.requirement}"'
        return State.NOT_USABLE.of(name, reason, again), None
    return State.USABLE.of(name, found), module


def check_torch() -> tuple[Capability, ModuleType | None]:
    capability, torch = check_package(TORCH)
    return (capability, None) if torch is None else (torch_capability(torch), torch)


def torch_capability(torch: Any) -> Capability:
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    reason = f"{torch.__version__}, {build}"
    if torch.version.cuda:
        try:
            cudnn = torch.backends.cudnn.version() or 0
        except RuntimeError as error:  # another cuDNN than torch's own is found first
            remedy = "remove the other cuDNN from LD_LIBRARY_PATH"
            return State.LIMITED.of("torch", f"{reason}; {first_line(error)}", remedy)
        reason += f", cuDNN {cudnn}"
        if release(torch.__version__)[:2] == (2, 9) and cudnn < CUDNN_FLOOR:
            # https://github.com/pytorch/pytorch/issues/166643
            reason += ": the VAE's bf16 convolutions take about 3 times the memory"
            cudnn_package = f"nvidia-cudnn-cu{release(torch.version.cuda)[0]}>=9.15"
            remedy = f'pip install "{cudnn_package}" or use another torch than 2.9'
            return State.LIMITED.of("torch", reason, remedy)
    return State.USABLE.of("torch", reason)


def check_triton(cards: InstalledCards) -> Capability:
    """Checks Triton and what it builds its launchers with: a C compiler and Python's headers."""
    if not cards.usable:
        found = (
            f"{installed_version('triton')}, but" if find_spec("triton") else "not installed, and"
        )
        return State.NOT_USABLE.of("triton", f"{found} there is no usable GPU")
    windows = sys.platform == "win32"
    name = "triton-windows" if windows else "triton"
    capability, module = check_package(Package(name, "triton"))
    if module is None:
        if windows:
            capability = replace(capability, why=replace(capability.why, remedy=triton_remedy()))
        return capability
    # Triton for Windows brings a compiler with it.
    if not windows:
        build = getattr(getattr(module, "knobs", None), "build", None)
        if not (getattr(build, "cc", None) or any(map(shutil.which, ("gcc", "clang", "cc")))):
            reason = f"{capability.why.fact}, but its launchers need a C compiler, which is missing"
            return State.NOT_USABLE.of("triton", reason, "install gcc")
        if not Path(sysconfig.get_path("include"), "Python.h").is_file():
            reason = f"{capability.why.fact}, but its launchers need Python.h, which is missing"
            remedy = "install Python's development headers (python3-dev)"
            return State.NOT_USABLE.of("triton", reason, remedy)
    return capability


def triton_remedy() -> str:
    """Writes the line that installs Triton on Windows into this Python, whoever made it."""
    python = Path(sys.executable)
    portable = python.parent.name == "python_embeded"
    shown = r"python_embeded\python.exe" if portable else f'"{python}"'
    # The desktop application's environment is made by uv, which puts no pip into it.
    pip = "-m pip install" if find_spec("pip") else "-m uv pip install"
    return f"{shown} {pip} -U triton-windows, then restart ComfyUI"


def check_isal() -> Capability:
    found, module = check_package(ISAL)
    if module is not None:
        return found
    reason = f"{found.why.fact}: zlib writes PNG files, which takes about three times as long"
    return State.LIMITED.of(found.name, reason, found.why.remedy)


def check_kitchen(torch: ModuleType | None) -> Capability:
    """Checks comfy-kitchen, ComfyUI's kernels, and which of its backends run here."""
    name = KITCHEN.distribution
    if torch is None:
        return State.NOT_USABLE.of(name, "it needs torch")
    capability, kitchen = check_package(KITCHEN)
    if kitchen is None:
        remedy = "optional: ComfyUI's requirements.txt installs it"
        return State.NOT_USABLE.of(name, capability.why.fact, remedy)
    # ROCm is not what this package is for.
    backends = {key: entry for key, entry in kitchen.list_backends().items() if key != "hip"}
    if torch.version.cuda and release(torch.version.cuda) < (13,):
        # What ComfyUI itself does (comfy/quant_ops.py).
        older = f"ComfyUI turns it off under CUDA 13, and torch is built for {torch.version.cuda}"
        backends["cuda"] = {"available": False, "unavailable_reason": older}
    runs = [key for key, entry in backends.items() if entry["available"]]
    not_here = [
        f"{key} not: {entry['unavailable_reason']}"
        for key, entry in backends.items()
        if not entry["available"]
    ]
    reason = f"{capability.why.fact}, backends {', '.join(runs) or 'none'}; {'; '.join(not_here)}"
    if "cuda" in runs:
        return State.USABLE.of(name, reason)
    remedy = (
        "for its CUDA kernels, use a GPU with driver 580 or newer and a torch built for CUDA 13"
    )
    return State.LIMITED.of(name, reason, remedy)


def installed_version(distribution: str) -> str:
    """Asks for the installed version, which a module that no distribution owns has not."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "of unknown version"


def release(text: str) -> tuple[int, ...]:
    """Reads (2, 13, 0) of "2.13.0+cpu"; () of anything that does not start with a number."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match.group().split("."))) if match else ()


# The ComfyUI of this machine: where its code lies, its version, and the folders of its models.
# Everything is read as text: importing ComfyUI would start its device management.

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
    """Finds the folder of ComfyUI's code: the first that holds its version among those around this
    package, the current folder, sys.path, those around Python, and ~/ComfyUI.
    """
    return next((folder for folder in _candidates() if (folder / VERSION_FILE).is_file()), None)


def _candidates() -> Iterator[Path]:
    # With --base-directory custom_nodes is not in ComfyUI's folder, but Python mostly is.
    yield from _package().parents
    yield from (Path.cwd(), *Path.cwd().parents)
    yield from map(Path, sys.path)
    around = Path(sys.prefix).parent  # of ComfyUI/.venv, and of python_embeded next to ComfyUI
    yield from (around, around / "ComfyUI", user_path("~/ComfyUI"))


def _package() -> Path:
    # A link in custom_nodes belongs to the ComfyUI that it lies in: not resolved.
    return Path(os.path.abspath(__file__)).parent.parent


def check_folder() -> tuple[Capability, ...]:
    """Checks the name of this package's folder in custom_nodes; says nothing of a good one."""
    package = _package()
    # ComfyUI serves nothing to its page from a folder whose name is quoted in an address.
    if package.parent.name != "custom_nodes" or re.fullmatch(r"[A-Za-z0-9_-]+", package.name):
        return ()
    fact = f"{package.name}: the page may not find its templates, help and reports"
    remedy = "rename the folder with letters a to z, digits, - and _; restart ComfyUI"
    return (State.LIMITED.of("folder", fact, remedy),)


def check_comfyui(folder: Path | None) -> Capability:
    remedy = "name its folder: `qwen-l40s doctor --comfyui DIR`"
    if folder is None:
        return State.NOT_USABLE.of("ComfyUI", "not found", remedy)
    try:
        text = (folder / VERSION_FILE).read_text(encoding="utf-8")
    except OSError as error:
        reason = f"no readable {VERSION_FILE} ({error.strerror}) in {folder}"
        return State.NOT_USABLE.of("ComfyUI", reason, remedy)
    match = re.search(r'^__version__\s*=\s*["\']([^"\']+)', text, re.MULTILINE)
    found = match.group(1) if match else "of unknown version"
    if release(found) < COMFYUI_FLOOR:
        reason = f"{found}, needs {'.'.join(map(str, COMFYUI_FLOOR))} or newer, in {folder}"
        return State.NOT_USABLE.of("ComfyUI", reason, "update ComfyUI")
    newer = f", newer than tested ({TESTED})" if is_newer_than_tested(found) else ""
    return State.USABLE.of("ComfyUI", f"{found} in {folder}{newer}")


def is_newer_than_tested(version: str) -> bool:
    return release(version)[:2] > NEWEST_TESTED


def models_folder(code: Path | None) -> Path | None:
    """Finds ComfyUI's models: below its --base-directory around this package, or its code."""
    nodes = _package().parent
    if nodes.name == "custom_nodes" and nodes not in extra_folders(code).get("custom_nodes", ()):
        return nodes.parent / "models"
    return None if code is None else code / "models"


def model_folders(models: Path, code: Path | None = None) -> dict[str, list[Path]]:
    """Lists {kind: its folders} below `models` and of the extra_model_paths.yaml in `code`."""
    found = {kind: [models / name for name in names] for kind, names in KINDS.items()}
    extra = extra_folders(code)
    for kind, names in KINDS.items():
        found[kind] += [path for name in names for path in extra.get(name, ())]
    return found


def extra_folders(code: Path | None) -> dict[str, list[Path]]:
    """Reads {name: folders} of extra_model_paths.yaml as ComfyUI does; empty without one."""
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
