"""Which files of the package a piece of work runs through, in all threads and after its imports."""

import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import qwen_l40s

PACKAGE = Path(qwen_l40s.__file__).resolve().parent


@contextmanager
def traced():
    """Gives a set that gets each file of the package in which a function begins to run."""
    codes, found = set(), set()

    def look(frame, event, _):
        if event == "call":
            codes.add(frame.f_code)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    for code in codes:
        path = Path(code.co_filename)
        if path.suffix == ".py" and code.co_name != "<module>" and PACKAGE in path.parents:
            part = path.relative_to(PACKAGE)
            if part.parts[0] != "tests" and not part.parts[0].startswith("."):
                found.add(str(part))
