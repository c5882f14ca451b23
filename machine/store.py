"""Keeps the cache folder: what this package measured, and the user's own list of cards."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..caches import remembered
from ..errors import SettingError, UnavailableError
from ..files import read_bytes, user_path, write_whole
from ..planning.card_list import read_cards
from ..planning.cards import Card, is_named
from ..planning.phases import figure
from ..planning.rates import LAUNCHES, Launches, Rates
from ..spec.formats import MULTIPLIED
from .settings import settings, settings_file

logger = logging.getLogger(__name__)

CARDS, CALIBRATION, ATTENTION = "cards.json", "calibration.json", "attention.json"
VERSION = 1
FIGURES = ("attention", "bandwidth", "convolution", "encoder", "pcie")
LAUNCH_SECONDS, GRAPH = "launch_seconds", "graph"
_logged: set[Path] = remembered(set())


def cache_folder() -> Path:
    """Finds the folder that the settings name, else ~/.cache/qwen-l40s; need not exist. A relative
    one lies beside the settings, wherever ComfyUI or the command was started.
    """
    return settings_file().parent / user_path(settings().cache or "~/.cache/qwen-l40s")


def own_cards_path() -> Path:
    return cache_folder() / CARDS


def known_cards(path: Path | None = None) -> dict[str, Card]:
    """Reads the cards of `read_cards` by name, by default with the list in the cache folder."""
    if path is None and os.path.lexists(own_cards_path()):
        path = own_cards_path()
        if path.is_fifo():  # of a neighbour, which would block for ever
            raise SettingError("the list of GPUs is a pipe: delete it, or write a JSON file", path)
    return read_cards(path and Path(path))[1]


# What `qwen-l40s bench --calibrate` measured of the user's own cards.


@dataclass(frozen=True)
class Calibration:
    card: str
    driver: str
    torch: str
    date: str
    rates: Rates

    def as_dict(self) -> dict[str, Any]:
        """Gives the measurement for JSON; `parse` reads it."""
        figures = {name: figure(getattr(self.rates, name)) for name in FIGURES}
        gemm = {name: figure(rate) for name, rate in self.rates.gemm.items()}
        about = {name: getattr(self, name) for name in ("card", "driver", "torch", "date")}
        return {**about, "rates": {"gemm": gemm, **figures, **_launch_seconds(self.rates.launches)}}


def load_calibration(card: Card) -> Rates | None:
    """Finds the newest measurement of a card, or None; a damaged file is logged once."""
    entries = read_calibrations(cache_folder())
    found = [entry for entry in entries if is_named(card, entry.card)]
    return max(found, key=lambda entry: entry.date).rates if found else None


def read_calibrations(folder: Path) -> list[Calibration]:
    """Reads all measurements in a folder's file; those that are damaged are left out."""
    path = folder / CALIBRATION
    entries = _measured(path)
    known = [parse(entry) for entry in entries] if isinstance(entries, list) else []
    if None in known or (entries is not None and not isinstance(entries, list)):
        _log(path, "an entry is damaged")
    return [entry for entry in known if entry is not None]


def with_calibration(folder: Path, new: Calibration) -> str:
    """Writes the folder's file anew, with a measurement instead of an older one of its kind."""
    others = [
        entry
        for entry in read_calibrations(folder)
        if (entry.card, entry.driver, entry.torch) != (new.card, new.driver, new.torch)
    ]
    entries = [entry.as_dict() for entry in (*others, new)]
    return json.dumps({"version": VERSION, "measured": entries}, indent=1) + "\n"


def parse(entry: Any) -> Calibration | None:
    """Reads one measurement of the file's form; None where a part is missing or senseless."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("rates"), Mapping):
        return None
    about: dict[str, Any] = {name: entry.get(name) for name in ("card", "driver", "torch", "date")}
    rates = entry["rates"]
    gemm = rates.get("gemm")
    if not all(isinstance(text, str) for text in about.values()) or not isinstance(gemm, Mapping):
        return None
    figures = [rates.get(name) for name in FIGURES]
    if not all(map(_is_rate, (*figures, *gemm.values()))) or "bf16" not in gemm:
        return None
    if not gemm.keys() <= set(MULTIPLIED):
        return None
    launches = _launches(rates.get(LAUNCH_SECONDS, {}))
    if launches is None:
        return None
    known: dict[str, Any] = dict(zip(FIGURES, figures, strict=True))
    rates = Rates(dict(gemm), **known, launches=launches)
    return Calibration(**about, rates=rates)


def _launch_seconds(launches: Launches) -> dict[str, dict[str, float]]:
    # Seconds of a block by precision and of a graph, of those that were measured.
    known = {**LAUNCHES.block, GRAPH: LAUNCHES.graph}
    found = {**launches.block, GRAPH: launches.graph}
    measured = {name: figure(found[name]) for name in found if found[name] != known[name]}
    return {LAUNCH_SECONDS: measured} if measured else {}


def _launches(measured: Any) -> Launches | None:
    """Takes `LAUNCHES` for what was not measured; None where it makes no sense."""
    if not isinstance(measured, Mapping) or not measured.keys() <= {*MULTIPLIED, GRAPH}:
        return None
    if not all(map(_is_rate, measured.values())):
        return None
    block = {**LAUNCHES.block, **measured}
    return replace(LAUNCHES, graph=block.pop(GRAPH, LAUNCHES.graph), block=block)


def _is_rate(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0


# How long attention backends took on this machine's cards, one entry for each kind of request.
#
# Of two processes that write at the same moment one may undo the other's entry, which is then
# measured again.


@dataclass(frozen=True)
class AttentionTimings:
    """Milliseconds by backend, the fastest first, for so many tokens of one item."""

    tokens: int
    ms: dict[str, float]

    @property
    def fastest(self) -> str:
        return next(iter(self.ms))


def load_attention(key: str) -> AttentionTimings | None:
    """Reads what was measured under a key; None where nothing can be used."""
    entries = _measured(cache_folder() / ATTENTION)
    with contextlib.suppress(TypeError, KeyError, ValueError, AttributeError, OverflowError):
        entry = entries[key]
        ms = {str(name): float(value) for name, value in entry["ms"].items()}
        if ms and all(map(_is_rate, ms.values())):
            return AttentionTimings(
                int(entry["tokens"]), dict(sorted(ms.items(), key=itemgetter(1)))
            )
    return None


def save_attention(key: str, timings: AttentionTimings) -> None:
    ms = {name: figure(value) for name, value in timings.ms.items()}
    _save(cache_folder() / ATTENTION, key, {"tokens": timings.tokens, "ms": ms})


def _save(path: Path, key: str, entry: Mapping[str, Any]) -> None:
    # In one step: no reader sees half a file. One that cannot be written stays.
    entries = _measured(path)
    entries = {**(entries if isinstance(entries, dict) else {}), key: entry}
    text = json.dumps({"version": VERSION, "measured": entries}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except (OSError, UnavailableError) as error:
        _log(path, str(error))


def _measured(path: Path) -> Any:
    try:
        found = json.loads(read_bytes(path, pipes=False))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        _log(path, getattr(error, "strerror", None) or str(error))
        return None
    if not isinstance(found, dict) or found.get("version") != VERSION:
        _log(path, f"its version is not {VERSION}")
        return None
    return found.get("measured")


# What makes a file that cannot be used anew.
REMEDIES = {
    CALIBRATION: "`qwen-l40s bench --calibrate`",
    ATTENTION: "attention is measured again",
}


def _log(path: Path, reason: str) -> None:
    if path not in _logged:
        _logged.add(path)
        logger.warning("%s cannot be used (%s): %s", path, reason, REMEDIES[path.name])
