"""Remembers values for a process, and forgets all of them in one call, for tests and for whoever
exchanges a package in a process that runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

_Remembers = TypeVar("_Remembers")
_clears: list[Callable[[], object]] = []


def cached(function: _Remembers) -> _Remembers:
    """Remembers what a function returns for each of its arguments, as functools.cache does."""
    remembering: Any = functools.cache(function)  # type: ignore[arg-type]
    return remembered(remembering)


def remembered(thing: _Remembers) -> _Remembers:
    """Has `forget` empty a collection or a cached function."""
    held: Any = thing
    _clears.append(getattr(held, "cache_clear", None) or held.clear)
    return thing


def forget() -> None:
    """Empties everything that this process remembers."""
    for clear in _clears:
        clear()
