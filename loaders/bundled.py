"""Where the model that comes with the package lies."""

from __future__ import annotations

from pathlib import Path


def bundled_micro_folder() -> Path:
    """The micro Qwen-Image, a diffusers folder."""
    return Path(__file__).resolve().parents[1] / "models" / "micro"
