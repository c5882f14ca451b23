"""Says why something of this package does not run, and what runs instead. What builds of torch,
compilers, drivers and packages can is declared nowhere: it is tried once.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from .caches import remembered
from .errors import QwenL40SError, SettingError, UnavailableError, restart_for

logger = logging.getLogger(__name__)
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Verdict:
    """One reason why something of this package, or that it could use, does not run."""

    fact: str
    rule: str = ""  # what it breaks; empty where the fact says it
    remedy: str = ""
    final: bool = False  # for this model on this card: nothing is tried again

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
    """Says why something does not run, by a `trial` that says what is wrong; None where it does. An
    answer stays for the process, but for out of memory.
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
    """Looks at what others have made or changed; gives `otherwise` where its form is unknown here,
    so that a check lets the run go on. Raises QwenL40SError of the look.
    """
    try:
        return look(*given)
    except QwenL40SError:
        raise
    except (AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
        logger.debug("Qwen-Image Accelerator: not read: %s", error)
        return otherwise


def first_line(error: object) -> str:
    """Takes an error's or warning's first line, of Triton's compiler the last; else its class."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if type(error).__name__ == "CompilationError" else lines[0]


def check_asked(
    what: str,
    asked: str,
    names: Collection[str],
    refuse: Callable[[str], Verdict | None],
    place: object,
    words: tuple[str, ...] = (),
) -> None:
    """Raises SettingError for a name that is neither among names nor words, and UnavailableError,
    with what runs at that place and why others do not, for one that `refuse` refuses.
    """
    if asked not in names:
        known = " or ".join((*words, *names))
        raise SettingError(f"there is no {what.removeprefix('the ')} {asked!r}: use {known}")
    if reason := refuse(asked):
        others = {name: refuse(name) for name in names if name != asked}
        usable = [*words[:1], *(name for name, no in others.items() if not no)]
        clauses = [f"{what} {asked} cannot run on {place}: {reason}", f"use {' or '.join(usable)}"]
        clauses += [f"not {name}: {no}" for name, no in others.items() if no]
        raise UnavailableError("; ".join(clauses))
