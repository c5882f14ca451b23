"""Waits for a condition instead of a time."""

import time
from collections.abc import Callable
from typing import Any

SECONDS = 600  # a guard against what hangs: a busy machine may take minutes for a step


def until(true: Callable[[], Any], seconds: float = SECONDS) -> None:
    """Returns once `true` says so; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
