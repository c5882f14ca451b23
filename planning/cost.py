"""What an image costs on a rented card, and prices that somebody types in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import SettingError
from .cards import Card, find_card
from .phases import Range

SECONDS_PER_HOUR = 3600
EXAMPLE = "L40S = 0.79"  # a line of prices that somebody types in
COMMENT = "#"


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


def read_prices(text: str, cards: Mapping[str, Card]) -> dict[str, float]:
    """{card's name in the list: USD an hour} of the lines that say one; empty lines say nothing.

    Raises:
        SettingError: it is no text; or a line is no `card = price`, its card is unknown or was
            there before, or its price is negative or no number; the message begins with the line's
            number.
    """
    if not isinstance(text, str):
        raise SettingError(f"prices are {text!r} and must be a text of lines such as {EXAMPLE!r}.")
    prices: dict[str, float] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition(COMMENT)[0].strip()
        if not line:
            continue
        name, price = _split(number, line)
        try:
            card = find_card(name, cards).name
        except SettingError as error:
            raise SettingError(f"prices, line {number}: {error}") from error
        if card in prices:
            raise SettingError(
                f"prices, line {number}: {card} has a price above: keep one of them."
            )
        prices[card] = price
    return prices


def _split(number: int, line: str) -> tuple[str, float]:
    name, _, amount = line.partition("=")
    try:
        price = float(amount.strip().removeprefix("$"))
    except ValueError:
        price = math.nan
    if not name.strip() or math.isnan(price):
        raise SettingError(
            f"prices, line {number}: {line!r} is no card and its USD an hour: write {EXAMPLE!r}."
        )
    if not 0 <= price < math.inf:
        raise SettingError(
            f"prices, line {number}: a price must be at least 0 USD an hour, got {price:g}."
        )
    return name.strip(), price
