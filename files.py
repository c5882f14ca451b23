"""Files that get their name when they are whole, and take it from no other file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

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
        part.replace(path)
    else:
        part.unlink()
