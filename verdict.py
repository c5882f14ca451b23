"""Says why something of this package does not run, and what runs instead of it.

What builds of torch, compilers, drivers and packages can is declared nowhere: it is tried once.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from .caches import remembered
from .errors import QwenL40SError, restart_for

logger = logging.getLogger(__name__)
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Verdict:
    """One reason why something of this package, or that it could use, does not run.

    Attributes:
        fact: One clause.
        rule: What it breaks; empty where the fact says it.
        remedy: What would change it; empty where nothing is known.
        final: Whether it stays so for this model on this card, so that nothing is tried again.
    """

    fact: str
    rule: str = ""
    remedy: str = ""
    final: bool = False

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.fact, self.rule, self.remedy)))

    def log(self, instead: str) -> None:
        """Logs it, and what runs `instead`."""
        logger.warning("Qwen-Image Accelerator: %s: %s.", self, instead)


# What a run says of a part of it.
SENTENCES = {
    "blocks": "blocks: {instead}, {count} of {total}: {verdict}",
    "cards": "GPUs: one in {count} forward passes: {verdict}",
    "graphs": "CUDA graphs: none in {count} forward passes: {verdict}",
}


class Verdicts:
    """Collects what did not run in a run, and why: by a key of `SENTENCES`, with how often."""

    def __init__(self) -> None:
        self._found: defaultdict[str, Counter[Verdict]] = defaultdict(Counter)

    def add(self, part: str, verdict: Verdict, count: int = 1) -> None:
        self._found[part][verdict] += count

    def of(self, part: str) -> Counter[Verdict]:
        """Gives those of one part, with how often each was added."""
        return self._found[part]

    def lines(self, part: str, **words: object) -> list[str]:
        return [
            SENTENCES[part].format(verdict=verdict, count=count, **words)
            for verdict, count in self.of(part).most_common()
        ]


FULL = Verdict("too little memory is free for a trial")
_answers: dict[Hashable, Verdict | None] = remembered({})
_assumed = ContextVar("assumed", default=False)


@contextmanager
def assumed() -> Iterator[None]:
    """Has this thread take for granted, inside, what nobody has tried: nothing runs on a card."""
    token = _assumed.set(True)
    try:
        yield
    finally:
        _assumed.reset(token)


def is_assumed() -> bool:
    """Tells whether this thread takes for granted what nobody has tried, which is no answer."""
    return _assumed.get()


def try_once(what: Hashable, trial: Callable[[], str]) -> Verdict | None:
    """Says why something does not run; None where it does.

    An answer stays for the process. Out of memory is none: another time the card has room.

    Args:
        what: Whose answer it is.
        trial: Runs it, and says what is wrong with the result, in one clause.
    """
    import torch  # a verdict needs none

    if _assumed.get():
        return _answers.get(what)
    if what not in _answers:
        try:
            found = trial()
        except torch.OutOfMemoryError:
            return FULL
        except Exception as error:  # packages, drivers, Triton and C compilers raise anything
            found = f"a trial failed: {first_line(restart_for(error) or error)}"
        answer = Verdict(found, final=True) if found else None
        if answer is None:  # stays, though a trial in another thread may fail
            _answers[what] = None
        return _answers.setdefault(what, answer)
    return _answers[what]


def read_or(otherwise: Any, look: Callable[..., _Found], *given: Any) -> _Found:
    """Looks at what others have made or changed; gives `otherwise` where its form is unknown here.

    A check before a run that cannot read what it wants lets the run go on.

    Raises:
        QwenL40SError: what the look itself says.
    """
    try:
        return look(*given)
    except QwenL40SError:
        raise
    except (AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
        logger.debug("Qwen-Image Accelerator: not read: %s", error)
        return otherwise


def first_line(error: object) -> str:
    """Takes the first line of an exception's or warning's text; its class where that is empty.

    Of Triton's compiler the last one: its first lines are a place and the kernel's source.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if type(error).__name__ == "CompilationError" else lines[0]
