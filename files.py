"""Files that get their name when they are whole, and take it from no other file; locks on files."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

# What systems say where their file system has no hard links; Windows the last.
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


def name_file(part: Path, path: Path) -> None:
    """Moves a whole file to a name in its folder.

    Raises:
        FileExistsError: the name is taken.
    """
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


def lock(file: BinaryIO) -> bool:
    """Locks a file until its process ends, however it ends.

    Returns:
        Whether nobody else has it locked.

    Raises:
        OSError: its disk locks no files.
    """
    try:
        try:
            import fcntl
        except ImportError:
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            return False
        raise
    return True
