"""A card that no list has: what the driver tells of it, and the card of the list most like it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from .cards import Card, card_named, with_memory, words_of
from .memory import CardFacts


@dataclass(frozen=True)
class UnlistedCard(Card):
    """Name, memory and capability as the driver tells them; peaks, bandwidths and L2 are 0.

    Attributes:
        nearest: name of the listed card whose times are likely nearest.
    """

    nearest: str


def card_by_driver(facts: CardFacts, cards: Mapping[str, Card]) -> Card:
    """The listed card of a driver's name with the memory that it shows, or an `UnlistedCard`.

    Only a whole name counts: "NVIDIA A40" is a part of an A100 40GB's.

    Raises:
        SettingError: the memory is less than 1 MiB.
    """
    listed = card_named(facts.name, cards)
    if listed is not None:
        return with_memory(listed, facts.total_bytes)
    card = UnlistedCard(
        name=facts.name,
        also=(),
        architecture="",
        capability=facts.capability,
        memory_bytes=0,
        bandwidth=0,
        l2_bytes=0,
        dense_flops={},
        pcie_bytes_per_second=0,
        tdp_watts=0,
        prices=(),
        source="the driver",
        nearest=nearest_card(facts, cards).name,
    )
    return with_memory(card, facts.total_bytes)


def nearest_card(facts: CardFacts, cards: Mapping[str, Card]) -> Card:
    """The listed card whose name is a part of the driver's, such as L40S of "NVIDIA L40S-24Q", or
    else of the nearest capability, then memory, then name.
    """
    words = set(words_of(facts.name))
    generation = _number(facts.capability)

    def unlikeness(card: Card) -> tuple[float, ...]:
        names = [words_of(name) for name in (card.name, *card.also)]
        part = max((len(name) for name in names if set(name) <= words), default=0)
        # Sizes of memory that differ by less than a tenth are one.
        memory = round(abs(math.log(card.memory_bytes / max(1, facts.total_bytes))), 1)
        alike = max(difflib.SequenceMatcher(None, sorted(words), name).ratio() for name in names)
        return (-part, abs(_number(card.capability) - generation), memory, -alike)

    return min(cards.values(), key=unlikeness)


def _number(capability: tuple[int, int]) -> int:
    major, minor = capability
    return 10 * major + minor
