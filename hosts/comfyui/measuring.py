"""The one guard around what only measures: nothing that fails there is a failure of the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])

_told: set[str] = set()


@contextmanager
def harmless() -> Iterator[None]:
    """Ends with what fails inside, which is logged once for each kind of failure."""
    try:
        yield
    except Exception as error:
        kind = f"{type(error).__name__}: {error}"
        if kind not in _told:
            _told.add(kind)
            logger.warning(
                "Qwen-Image L40S: a run could not be measured or reported, and goes on: %s.",
                kind,
                exc_info=True,
            )


def only_measures(method: Method) -> Method:
    """A method that never fails, of an object with an attribute `off`.

    Where it would have, it sets `off`: what was measured so far is incomplete. While that is set
    nothing runs, and the method returns None.
    """

    @wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.off:
            return None
        done = False
        with harmless():
            result = method(self, *args, **kwargs)
            done = True
        if done:
            return result
        self.off = True
        return None

    return guarded  # type: ignore[return-value]
