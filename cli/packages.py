"""Says what to install before an import fails."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from ..errors import UnavailableError

ROOT = Path(__file__).resolve().parent.parent
# What pip calls what is imported under another name.
PIP_NAMES = {"PIL": "pillow"}


def require_packages(
    what: str, names: Iterable[str], *, extra: str = "standalone", instead: str = ""
) -> None:
    """Checks that packages can be imported, without importing them.

    Args:
        what: needs them, as the sentence begins.
        names: of what is imported.
        extra: of this package, which brings them.
        instead: of installing, what else would do.

    Raises:
        UnavailableError: some are missing.
    """
    missing = [PIP_NAMES.get(name, name) for name in names if find_spec(name) is None]
    if missing:
        raise UnavailableError(
            f"{what} needs {', '.join(missing)}, not installed here: run "
            f'`pip install ".[{extra}]"` in {ROOT}{instead}.'
        )
