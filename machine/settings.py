"""Reads the user's settings: one JSON file, once; `doctor` shows which.

    {"version": 1, "cache": "~/measured", "attention": "fast", "gemm_fp8": "triton"}

Nothing comes from the environment: the registry's scan refuses a pack that reads that.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from ..caches import cached
from ..errors import SettingError
from ..files import read_bytes, user_path

logger = logging.getLogger(__name__)

NAME, VERSION = "qwen-l40s.json", 1


@dataclass(frozen=True)
class Settings:
    """Holds what a user sets once for a machine; empty is the default."""

    cache: str = ""  # for measurements; a relative path lies beside the file
    attention: str = ""
    gemm_fp8: str = ""
    gemm_int8: str = ""


_source: Path | Settings | None = None


def default_file() -> Path:
    """Finds the file, which need not exist: that of `python -X qwen_l40s=FILE`, else of ComfyUI's
    user folder, in this process or around this pack, else of the user's configuration folder.
    """
    if named := sys._xoptions.get("qwen_l40s"):
        return user_path(str(named))
    if "folder_paths" in sys.modules:
        return Path(sys.modules["folder_paths"].get_user_directory(), NAME)
    nodes = Path(os.path.abspath(__file__)).parents[2]  # a link belongs where it lies
    if nodes.name == "custom_nodes":
        return nodes.parent / "user" / NAME
    folder = "AppData/Roaming" if sys.platform == "win32" else ".config"
    return user_path(f"~/{folder}/{NAME}")


def settings_file() -> Path:
    return _source if isinstance(_source, Path) else default_file()


def use_settings(source: Path | Settings | None) -> None:
    """Takes settings from another file, or these; None is the default file."""
    global _source
    _source = source
    settings.cache_clear()  # type: ignore[attr-defined]


@cached
def settings() -> Settings:
    """Gives the settings. A file that cannot be used is logged once, and counts as empty."""
    if isinstance(_source, Settings):
        return _source
    try:
        return read_settings(settings_file())
    except SettingError as error:
        logger.warning("%s Until then, every setting has its default.", error)
        return Settings()


def read_settings(path: Path) -> Settings:
    """Reads a file, or nothing where it is missing; raises SettingError for a wrong one."""
    names = [field.name for field in fields(Settings)]
    remedy = f"write the version and any of {', '.join(names)}, or delete the file"
    try:
        found = json.loads(read_bytes(path, pipes=False))
    except FileNotFoundError:
        return Settings()
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SettingError(
            f"the settings are not readable JSON ({reason}): {remedy}", path
        ) from None
    if not isinstance(found, dict) or not isinstance(found.get("version"), int):
        raise SettingError(f'the settings must be one JSON object with "version": {remedy}', path)
    if found["version"] > VERSION:
        raise SettingError(
            f"the settings have version {found['version']}, but this package reads {VERSION}: "
            "update the package, or delete the file",
            path,
        )
    given = {name: text for name, text in found.items() if name != "version"}
    wrong = [name for name, text in given.items() if name not in names or not isinstance(text, str)]
    if wrong:
        raise SettingError(f"the settings have no text named {wrong[0]!r}: {remedy}", path)
    return Settings(**given)
