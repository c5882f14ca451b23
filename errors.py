"""The errors that callers catch.

    QwenL40SError
    +-- CheckpointError   (also ValueError)    a file or folder is not what it must be
    +-- SettingError      (also ValueError)    an argument breaks its rule
    +-- UnavailableError  (also RuntimeError)  the machine lacks a package, a card, memory or disk
        +-- DoesNotFitError                    the card is too small, even where weights move

Every message has the fact, the rule and the remedy, at most a sentence each, and ends with the path
where there is one. The command line prints it and exits with code 2.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = __name__.removesuffix(".errors")
LONGEST_PATH = 259  # characters, of Windows without its long paths


class QwenL40SError(Exception):
    """Base of every error this package raises on purpose.

    Example:
        try:
            pipeline = load_pipeline("models/Qwen-Image")
        except qwen_l40s.QwenL40SError as error:
            print(error)

    Args:
        sentence: what is wrong, the rule and the remedy; or an error, whose path stays the last.
        path: where.
    """

    def __init__(self, sentence: object, path: Path | None = None) -> None:
        self.path = getattr(sentence, "path", None)
        where = "" if path is None or self.path else f" ({path})."
        self.path = self.path or path
        super().__init__(f"{str(sentence).removesuffix('.')}{where}" if where else sentence)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles what `__init__` has made, whatever arguments that of a subclass takes."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class CheckpointError(QwenL40SError, ValueError):
    """A file or folder cannot be read as the checkpoint it has to be."""


class SettingError(QwenL40SError, ValueError):
    """An argument is outside its rule, such as a size that is not divisible by 16."""


class UnavailableError(QwenL40SError, RuntimeError):
    """The machine lacks what the request needs: a package, a card, memory or disk space."""


class DoesNotFitError(UnavailableError):
    """The card's memory is too small for a run, even where weights move to it and off it."""


def restart_for(error: BaseException | None) -> UnavailableError | None:
    """Returns what to raise for a name that a module of this package lacks: its files have changed
    since the process imported others of them. None for any other error.
    """
    if not isinstance(error, (ImportError, AttributeError)):
        return None
    owner = error.obj if isinstance(error, AttributeError) else None
    lacks = owner.__name__ if isinstance(owner, ModuleType) else error.name
    if not f"{lacks}.".startswith(f"{PACKAGE}."):
        return None
    return UnavailableError(
        "The files of Qwen-Image Accelerator changed after ComfyUI started: restart ComfyUI."
    )


@contextmanager
def plain_write_errors(path: Path) -> Iterator[None]:
    """Turns what the system says of writing `path` into an UnavailableError."""
    try:
        yield
    except OSError as error:
        remedy = "create the folder, free disk space, or choose another folder"
        if sys.platform == "win32":
            if len(str(path.absolute())) > LONGEST_PATH:
                remedy = f"choose a path of at most {LONGEST_PATH} characters, the limit of Windows"
            elif isinstance(error, PermissionError):
                remedy = f"close the program that has the file open, or {remedy}"
        raise UnavailableError(f"cannot write ({error.strerror}): {remedy}.", path) from error
