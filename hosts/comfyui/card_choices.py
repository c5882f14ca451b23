"""What the estimator's nodes offer for a card; nothing of ComfyUI is imported for it."""

from __future__ import annotations

from pathlib import Path

from ...errors import SettingError
from ...planning.cache import cache_folder
from ...planning.calibration import NAME
from ...planning.cards import BUNDLED, known_cards, own_list

THIS_CARD = "this card"


def card_choices() -> list[str]:
    """The machine's own first, then those of the list; of the bundled one where the user's own is
    damaged, which is told when a node runs.
    """
    try:
        return [THIS_CARD, *known_cards()]
    except SettingError:
        return [THIS_CARD, *known_cards(BUNDLED)]


def told_at() -> tuple[int, int]:
    """Changes with what `qwen-l40s bench --calibrate` measured and with the user's own list."""
    return _changed(cache_folder() / NAME), _changed(own_list())


def _changed(path: Path) -> int:
    """Nanoseconds; 0 where there is no file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
