"""Prints text with names of strangers in it."""

from __future__ import annotations

import sys


def print_text(text: str) -> None:
    """Escapes what would steer the terminal, and what its encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    for line in text.split("\n"):
        shown = line if line.isprintable() else ascii(line)[1:-1]
        print(shown.encode(encoding, "backslashreplace").decode(encoding))
