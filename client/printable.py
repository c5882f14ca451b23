"""Text of strangers as a terminal can show it."""

from __future__ import annotations

from typing import TextIO


def printable(text: str, stream: TextIO) -> str:
    """Escapes what would steer the terminal, and what its encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    lines = [line if line.isprintable() else ascii(line)[1:-1] for line in text.split("\n")]
    return "\n".join(lines).encode(encoding, "backslashreplace").decode(encoding)
