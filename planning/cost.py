"""What an image costs on a rented card, and which figures such a question may contain."""

from __future__ import annotations

import math
from typing import Any

from ..errors import SettingError
from .phases import Range

SECONDS_PER_HOUR = 3600


def usd_per_image(usd_per_hour: float, seconds_per_image: float) -> float:
    """US dollars for an image on a card that paints all the time.

    Args:
        usd_per_hour: for one card; 0 where it is one's own.
        seconds_per_image: with everything that repeats for each image.

    Raises:
        SettingError: the price is negative or no number, or the time is not above 0.
    """
    check_price(usd_per_hour)
    check_positive("seconds per image", seconds_per_image)
    return usd_per_hour * seconds_per_image / SECONDS_PER_HOUR


def usd_range(usd_per_hour: float, seconds_per_image: Range) -> Range:
    """The same for a range of times."""
    low, high = seconds_per_image
    return Range(usd_per_image(usd_per_hour, low), usd_per_image(usd_per_hour, high))


def check_price(usd_per_hour: Any) -> None:
    """Refuses what is no price.

    Raises:
        SettingError: it is negative, infinite or no number.
    """
    if not _is_finite(usd_per_hour) or usd_per_hour < 0:
        raise SettingError(
            f"usd_per_hour is {usd_per_hour!r}: give the US dollars of an hour of one card, 0 or "
            "more."
        )


def check_positive(name: str, value: Any) -> None:
    """Refuses what is no amount.

    Raises:
        SettingError: it is zero, negative, infinite or no number.
    """
    if not _is_finite(value) or value <= 0:
        raise SettingError(f"{name} is {value!r}: give a finite number above 0.")


def _is_finite(value: Any) -> bool:
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    # A whole number has no largest; one that no float holds is no price, time or load.
    return numeric and abs(value) < 1e300 and math.isfinite(value)
