"""The folder in which this package keeps what it measured and what the user tells it of cards."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """QWEN_L40S_CACHE, else qwen-l40s in the user's cache folder; need not exist."""
    named = os.environ.get("QWEN_L40S_CACHE")
    if named:
        return Path(os.path.expanduser(named))
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base, "qwen-l40s")
