"""Prices that somebody types in: a card and its US dollars an hour on each line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ..errors import SettingError
from .cards import Card, find_card

EXAMPLE = "L40S = 0.79"
COMMENT = "#"


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
    for number, line in _lines(text):
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


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        said = line.partition(COMMENT)[0].strip()
        if said:
            yield number, said


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
