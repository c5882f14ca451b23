"""Whether something runs here, found out by running it once: what builds of torch, compilers,
drivers and packages can is declared nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from ..caches import remembered
from ..machine.card import first_line

FULL = "no memory is free for a trial"
_answers: dict[Hashable, str] = remembered({})


def try_once(what: Hashable, trial: Callable[[], str]) -> str:
    """Says why something does not run, in one clause; empty where it does.

    An answer stays for the process. Out of memory is none: another time the card has room.

    Args:
        what: Whose answer it is.
        trial: Runs it, and says what is wrong with the result.
    """
    if what not in _answers:
        try:
            found = trial()
        except torch.OutOfMemoryError:
            return FULL
        except Exception as error:  # packages, drivers, Triton and C compilers raise anything
            found = f"a trial failed: {first_line(error)}"
        if not found:  # stays, though a trial in another thread may fail
            _answers[what] = found
        return _answers.setdefault(what, found)
    return _answers[what]
