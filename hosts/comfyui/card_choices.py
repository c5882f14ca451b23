"""What the estimator's nodes offer for a card; nothing of ComfyUI is imported for it."""

from __future__ import annotations

from ...planning.calibration import NAME, cache_folder
from ...planning.cards import known_cards

THIS_CARD = "this card"


def card_choices() -> list[str]:
    """The machine's own first, then those of the list."""
    return [THIS_CARD, *known_cards()]


def measured_at() -> int:
    """Changes when `qwen-l40s bench --calibrate` has measured a card; 0 where it never has."""
    try:
        return (cache_folder() / NAME).stat().st_mtime_ns
    except OSError:
        return 0
