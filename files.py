"""Handles files and texts between this package and others. Files get their name when they are
whole, and are locked. JSON is parsed strictly. A terminal shows text without being steered by it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO

from .errors import SettingError, plain_write_errors

# What systems say where their file system has no hard links; Windows the last.
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}

LOCKED_BYTE = 2**31 - 2  # the last that Windows' C library locks, past the end of any file here


def user_path(text: str) -> Path:
    """Replaces `~`; for a user without a home, as in some containers, by a temporary folder."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(tempfile.gettempdir(), text.lstrip("~").lstrip("/"))


def name_file(part: Path, path: Path) -> None:
    """Moves a whole file to a name in its folder; raises FileExistsError where it is taken."""
    try:
        os.link(part, path)  # unlike a rename, it replaces nothing
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        # An empty file takes the name, then this one replaces it.
        path.open("xb").close()
        try:
            part.replace(path)
        except OSError:
            path.unlink()
            raise
    else:
        part.unlink()


def check_writable(folder: Path) -> None:
    """Writes a file and removes it, as permissions do not tell all; raises UnavailableError."""
    with plain_write_errors(folder), tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"\0")


def check_target(option: str, text: str) -> None:
    """Raises SettingError for a folder, UnavailableError where no file can be written."""
    if Path(text).is_dir():
        raise SettingError(f"{option} names a folder: name a file in it.", Path(text))
    check_writable(Path(text).parent)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all; raises UnavailableError where the disk takes none."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with plain_write_errors(path):
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def read_bytes(path: Path, most: int = 2**24, *, pipes: bool = True) -> bytes:
    """Reads a file of at most `most` bytes, or raises OSError or ValueError. Without `pipes` a pipe
    is no file: it would block for ever where others may write into the folder.
    """
    found = path.stat()
    plain = stat.S_ISREG(found.st_mode)
    if not plain and not pipes:
        raise ValueError("it is not a file")
    if found.st_size <= most:
        with path.open("rb") as file:
            data = file.read(-1 if plain else most + 1)
        if len(data) <= most:
            return data
    raise ValueError(f"it is larger than {most >> 20} MiB")


def private(path: str, flags: int) -> int:
    """Opens a file for this user alone, as `opener` of open(): it holds prompts."""
    return os.open(path, flags, 0o600)


def lock(file: BinaryIO) -> bool:
    """Locks a file until its process ends; returns whether it was free. Raises OSError."""
    try:
        try:
            import fcntl
        except ImportError:
            import msvcrt

            # From the file's position on, and nobody else reads or writes what is locked.
            file.seek(LOCKED_BYTE)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
            file.seek(0)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            return False
        raise
    return True


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        added: Any = seen.add
        repeated = next(key for key, _ in pairs if key in seen or added(key))
        raise ValueError(f"the key {repeated!r} occurs twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def parse_json(data: bytes) -> Any:
    """Parses one UTF-8 JSON value; raises ValueError for all else, and for a key given twice."""
    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        # Only an escape can smuggle in half a surrogate pair, which no terminal can print.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeError:
        raise ValueError("it is not valid UTF-8") from None
    return value


def parse_object(data: bytes) -> dict[str, Any]:
    """Parses one UTF-8 JSON object, as strictly as `parse_json`, or raises ValueError."""
    value = parse_json(data)
    if not isinstance(value, dict):
        raise ValueError(f"it is a JSON {type(value).__name__}, not an object")
    return value


def escaped(line: str) -> str:
    """Escapes each letter that is not printable; an ideographic space, too, is none to Python."""
    if line.isprintable():
        return line
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)


def printable(text: str, stream: TextIO) -> str:
    """Escapes what would steer the terminal, and what its encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    lines = map(escaped, text.split("\n"))
    return "\n".join(lines).encode(encoding, "backslashreplace").decode(encoding)


def print_text(text: str, stream: TextIO | None = None) -> None:
    """Prints to stdout, or to another stream, what a terminal can show."""
    stream = stream or sys.stdout
    stream.write(f"{printable(text, stream)}\n")
