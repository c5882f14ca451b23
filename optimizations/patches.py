"""Makes and undoes changes to objects of ComfyUI, torch and diffusers that no hook of theirs makes.

Each call says why. `tests/host/test_patches.py` compares the hosts before and after a run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

ABSENT = object()  # the value of a name that is not there


def put(owner: Any, **values: Any) -> None:
    """Sets attributes that the owner keeps."""
    for name, value in values.items():
        setattr(owner, name, value)


def swap(own: MutableMapping[str, Any], name: str, value: Any) -> Any:
    """Puts a value into a namespace, or takes out what is ABSENT; returns what was there."""
    before = own.pop(name, ABSENT)
    if value is not ABSENT:
        own[name] = value
    return before


@contextmanager
def patched(values: Iterable[tuple[MutableMapping[str, Any], str, Any]]) -> Iterator[None]:
    """Puts values into namespaces, one after the other, and at the end, last first, what was there.
    A value that another extension has wrapped stays, and learns by its `leave` that the patch is
    over.

    Args:
        values: (namespace, name, value).
    """
    done = []
    try:
        for item in values:  # of each block in a pass: 1 us
            own, name, value = item
            done.append((item, own.get(name, ABSENT)))
            own[name] = value
        yield
    finally:
        for (own, name, value), before in reversed(done):
            if leave := getattr(value, "leave", None):
                leave()
            if own.get(name) is not value:
                continue
            if before is ABSENT:
                del own[name]
            else:
                own[name] = before


# {(id of an owner, name): how many have it switched, what it was before}, of what lasts.
_switched: dict[tuple[int, str], tuple[int, Any]] = {}
_switching = threading.Lock()


@contextmanager
def switched(switches: Iterable[tuple[object, str, Any]]) -> Iterator[None]:
    """Sets attributes, and at the end what they were; of threads that do so at a time the last.

    Args:
        switches: (owner, name, value).
    """
    done = []
    try:
        for owner, name, value in switches:
            with _switching:
                count, before = _switched.get((id(owner), name)) or (0, getattr(owner, name))
                setattr(owner, name, value)
                _switched[id(owner), name] = count + 1, before
            done.append((owner, name))
        yield
    finally:
        for owner, name in done:
            with _switching:
                count, before = _switched.pop((id(owner), name))
                if count > 1:
                    _switched[id(owner), name] = count - 1, before
                else:
                    setattr(owner, name, before)
