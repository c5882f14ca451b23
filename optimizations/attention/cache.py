"""What was measured, kept from one run to the next: one small JSON file for all cards.

A file that is damaged or cannot be read counts as empty, one that cannot be written stays as it
is; either is logged once and measured again. Writing replaces the whole file in one step, so that
no reader sees half of it. Of two processes that write at the same moment one may undo the other's
entry, which is then measured again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...planning.calibration import cache_folder

logger = logging.getLogger(__name__)

VERSION = 1
_told: set[tuple[Path, str]] = set()


@dataclass(frozen=True)
class Measurement:
    """How long each backend took.

    Attributes:
        tokens: Of one item.
        ms: Milliseconds by backend, the fastest first.
    """

    tokens: int
    ms: dict[str, float]

    @property
    def fastest(self) -> str:
        return next(iter(self.ms))


@dataclass(frozen=True)
class Cache:
    """The file with measurements.

    Attributes:
        path: Need not exist, nor its folder.
    """

    path: Path

    def get(self, key: str) -> Measurement | None:
        """What was measured under a key; None when nothing that can be used."""
        entry = self._entries().get(key)
        with contextlib.suppress(TypeError, KeyError, ValueError, AttributeError):
            ms = {str(name): float(value) for name, value in entry["ms"].items()}
            if ms and all(math.isfinite(value) and value > 0 for value in ms.values()):
                return Measurement(int(entry["tokens"]), dict(sorted(ms.items(), key=_ms)))
        return None

    def put(self, key: str, measurement: Measurement) -> None:
        """Adds or replaces one measurement."""
        ms = {name: float(f"{value:.4g}") for name, value in measurement.ms.items()}
        entries = {**self._entries(), key: {"tokens": measurement.tokens, "ms": ms}}
        text = json.dumps({"version": VERSION, "measured": entries}, indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
            try:
                with open(handle, "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(temporary, self.path)
            except OSError:
                os.unlink(temporary)
                raise
        except OSError as error:
            self._tell("cannot be written", error)

    def _entries(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self._tell("cannot be read", error)
            return {}
        if not isinstance(found, dict) or found.get("version") != VERSION:
            return {}
        entries = found.get("measured")
        return entries if isinstance(entries, dict) else {}

    def _tell(self, what: str, error: Exception) -> None:
        if (self.path, what) not in _told:
            _told.add((self.path, what))
            reason = getattr(error, "strerror", None) or error
            logger.warning("%s %s (%s): attention is measured again", self.path, what, reason)


def default_cache() -> Cache:
    """attention.json in the package's cache folder."""
    return Cache(cache_folder() / "attention.json")


def _ms(entry: tuple[str, float]) -> float:
    return entry[1]
