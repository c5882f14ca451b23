"""Describes the cards that estimates are made for, and finds the one that a name means."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ..errors import SettingError
from ..spec.formats import GIB, CardFacts

DEFAULT_CARD = "L40S"
STARTING = "from"  # the kind of a price that is published as "from $0.72"
# Words of a driver's name that tell no card from another.
EMPTY_WORDS = {"nvidia", "geforce", "tesla", "generation", "gpu"}
# Words of a name, besides the size of a memory, that may be left out where one card alone has what
# stands there; each other word, such as Ti, SUPER, Laptop or Ada, is another model's.
LEFT_OUT = {"rtx", "sxm", "pcie", "hbm", "blackwell", "workstation", "edition"}
# Of the size that is in a card's name, CUDA shows as much at least: an L40S has 44.3 of 48 GB.
LEAST_SHOWN = 0.9


@dataclass(frozen=True)
class Price:
    usd_per_hour: float
    provider: str
    # "on demand", "from" (the lowest that a provider announces for it on demand), "spot",
    # "serverless" or "community" (somebody else's machine).
    kind: str
    date: str
    source: str


@dataclass(frozen=True)
class Card:
    name: str
    also: tuple[str, ...]
    architecture: str
    capability: tuple[int, int]  # compute capability, (8, 9) on an L40S
    memory_bytes: int  # what CUDA shows (torch's `total_memory`), less than nvidia-smi's figure
    bandwidth: float  # of its memory, bytes/s
    l2_bytes: int
    # Peak FLOP/s by precision: bf16 and fp8 with fp32 accumulation, int8, and fp32 outside the
    # tensor cores; without structured sparsity. Absent where there is none.
    dense_flops: Mapping[str, float]
    pcie_bytes_per_second: float  # of its lanes, one way; 86 % of it on an H200
    tdp_watts: int
    prices: tuple[Price, ...]
    source: str
    changed: bool = field(default=False, kw_only=True)  # by the user's list, so that times differ
    limit_watts: int = field(default=0, kw_only=True)  # the one that is set; 0 for its own
    no_int8: str = field(default="", kw_only=True)

    def facts(self) -> CardFacts:
        return CardFacts(self.name, self.memory_bytes, self.capability, no_int8=self.no_int8)

    def price(self) -> Price | None:
        """Finds the lowest price on demand, starting prices among them, or None."""
        offers = [price for price in self.prices if price.kind in ("on demand", STARTING)]
        return min(offers, key=lambda price: price.usd_per_hour, default=None)


def find_card(name: str, cards: Mapping[str, Card], own_list: object = "cards.json") -> Card:
    """Finds the card of a name, whatever case, spaces, order and vendor stand there, or raises
    SettingError. What tells no model from another may be left out: "A6000", "4090", but no Ti.
    """
    wanted = words_of(name)
    short = (card.name for card in cards.values() if _is_short(wanted, card))
    found = _names_of(cards).get(wanted) or [*short]
    if len(found) == 1:
        return cards[found[0]]
    if found:
        several = ", ".join(found)
        raise SettingError(f"{name!r} matches several GPUs: choose {several}.")
    raise SettingError(
        f"no GPU is named {name!r}{_nearest(wanted, cards)}: choose one of the {len(cards)} that "
        f"`qwen-l40s estimate --list-cards` prints, or describe yours in {own_list}."
    )


# Of a name, in order: the same of all spellings, as spaces and hyphens do not count.
Words = tuple[str, ...]


def words_of(name: str) -> Words:
    """Takes a name apart: spellings of one name give the same words."""
    text = re.sub(r"(\d+) ?gi?b?\b", r" \1gb ", name.casefold())
    parts = re.findall(r"\d+gb|[^\W\d_]+|\d+", text)
    return tuple(sorted(part for part in parts if part not in EMPTY_WORDS))


def _is_size(word: str) -> bool:
    return word[0].isdigit() and word.endswith("gb")


def _without_size(words: Iterable[str]) -> Words:
    return tuple(word for word in words if not _is_size(word))


def _is_short(wanted: Words, card: Card) -> bool:
    sizes = (int(word[:-2]) * GIB for word in wanted if _is_size(word))
    words = {*_without_size(wanted)}
    names = ({*_without_size(name)} for name in _names(card))
    named = any(words <= name and name - words <= LEFT_OUT for name in names)
    return named and all(LEAST_SHOWN * size <= card.memory_bytes <= size for size in sizes)


def _names(card: Card) -> list[Words]:
    return [words_of(name) for name in (card.name, *card.also)]


def is_named(card: Card, name: str) -> bool:
    """Tells whether a card is one of a driver's name, whatever case and vendor stand there."""
    return words_of(name) in _names(card)


def _names_of(cards: Mapping[str, Card]) -> dict[Words, list[str]]:
    return cards_by_name((card.name, card.also) for card in cards.values())


def cards_by_name(
    cards: Iterable[tuple[str, Iterable[str]]], where: str = ""
) -> dict[Words, list[str]]:
    """Returns {words of each name: the cards of it} of pairs of a card's name and its other names.
    Of several cards of a name only the memory may differ; else it raises SettingError.
    """
    found: dict[Words, list[str]] = {}
    for name, also in cards:
        for other in (name, *also):
            known = found.setdefault(words_of(other), [])
            own = _without_size(words_of(name))
            if any(_without_size(words_of(it)) != own for it in known):
                raise SettingError(
                    f"{where}the GPUs {known[0]!r} and {name!r} are both named {other!r}: a name "
                    "must mean one GPU, so change it or 'also' in your list."
                )
            if name not in known:
                known.append(name)
    return found


def _nearest(wanted: Words, cards: Mapping[str, Card]) -> str:
    names = {" ".join(words): card.name for card in cards.values() for words in _names(card)}
    near = difflib.get_close_matches(" ".join(wanted), names, n=len(cards), cutoff=0.5)
    near.sort(key=lambda words: -len({*wanted}.intersection(words.split())))
    found = [*dict.fromkeys(names[each] for each in near)][:3]
    return f" (the nearest: {', '.join(found)})" if found else ""


# A card that no list has: what the driver tells of it, and the card of the list most like it.


@dataclass(frozen=True)
class UnlistedCard(Card):
    """Name, memory and capability as the driver tells them; peaks, bandwidths and L2 are 0."""

    nearest: str  # name of the listed card whose times are likely nearest


def card_by_driver(facts: CardFacts, cards: Mapping[str, Card]) -> Card:
    """Finds the listed card of a driver's whole name, or an `UnlistedCard`: "NVIDIA A40" is a part
    of an A100 40GB's. Of several cards the nearest memory counts.
    """

    def difference(name: str) -> float:
        return abs(math.log(cards[name].memory_bytes / max(1, facts.total_bytes)))

    if listed := _names_of(cards).get(words_of(facts.name)):
        card = cards[min(listed, key=difference)]
        card = replace(card, limit_watts=facts.limit_watts, no_int8=facts.no_int8)
        return replace(card, memory_bytes=facts.total_bytes)
    return UnlistedCard(
        bandwidth=0,
        l2_bytes=0,
        pcie_bytes_per_second=0,
        tdp_watts=0,
        name=facts.name,
        also=(),
        architecture="",
        capability=facts.capability,
        memory_bytes=facts.total_bytes,
        dense_flops={},
        prices=(),
        source="the driver",
        no_int8=facts.no_int8,
        nearest=_nearest_card(facts, cards).name,
    )


def _nearest_card(facts: CardFacts, cards: Mapping[str, Card]) -> Card:
    # Whose name is a part of the driver's, such as L40S of "NVIDIA L40S-24Q", or else of the
    # nearest capability, then memory, then name.
    words = set(words_of(facts.name))

    def generation(of: Card | CardFacts) -> int:
        return 10 * of.capability[0] + of.capability[1]

    def unlikeness(card: Card) -> tuple[float, ...]:
        names = _names(card)
        part = max((len(name) for name in names if set(name) <= words), default=0)
        # Sizes of memory that differ by less than a tenth are one.
        memory = round(abs(math.log(card.memory_bytes / max(1, facts.total_bytes))), 1)
        alike = max(difflib.SequenceMatcher(None, sorted(words), name).ratio() for name in names)
        return (-part, abs(generation(card) - generation(facts)), memory, -alike)

    return min(cards.values(), key=unlikeness)
