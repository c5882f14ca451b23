"""Prints text with names of strangers in it."""

from __future__ import annotations

import sys
from typing import TextIO

from ..client.printable import printable


def print_text(text: str, stream: TextIO | None = None) -> None:
    """Prints to stdout, or to another stream, what a terminal can show."""
    stream = stream or sys.stdout
    print(printable(text, stream), file=stream)
