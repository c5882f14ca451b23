"""The cards that estimates are made for: what each has and costs, and where that is from."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import SettingError
from ..spec.formats import CardFacts

STARTING = "from"  # the kind of a price that is published as "from $0.72"
# Words of a driver's name that tell no card from another.
EMPTY_WORDS = {"nvidia", "geforce", "tesla", "generation", "gpu"}


@dataclass(frozen=True)
class Price:
    """The price of an hour of one card.

    Attributes:
        kind: "on demand", "from" (the lowest that a provider announces for it on demand), "spot",
            "serverless" or "community" (somebody else's machine).
        date: of the offer, year-month-day, or "undated".
        source: where it was published.
    """

    usd_per_hour: float
    provider: str
    kind: str
    date: str
    source: str


@dataclass(frozen=True)
class Card:
    """One kind of card.

    Attributes:
        also: other names, the driver's among them.
        capability: compute capability, (8, 9) on an L40S.
        memory_bytes: what CUDA shows (torch's `total_memory`), less than nvidia-smi's figure.
        bandwidth: of its memory, bytes/s.
        dense_flops: peak FLOP/s by precision: bf16 and fp8 with fp32 accumulation, int8, and fp32
            outside the tensor cores; without structured sparsity. Absent where there is none.
        pcie_bytes_per_second: what its lanes carry one way. Copies reach less: 86 % on an H200.
        prices: of the list or of the user's own; may be empty.
        source: where the figures are from.
        changed: whether the user's own list has other figures, on which times depend, than the
            bundled list.
    """

    name: str
    also: tuple[str, ...]
    architecture: str
    capability: tuple[int, int]
    memory_bytes: int
    bandwidth: float
    l2_bytes: int
    dense_flops: Mapping[str, float]
    pcie_bytes_per_second: float
    tdp_watts: int
    prices: tuple[Price, ...]
    source: str
    changed: bool = field(default=False, kw_only=True)

    def facts(self) -> CardFacts:
        """Gives the figures that the choice of a precision needs."""
        return CardFacts(self.name, self.memory_bytes, self.capability)

    def price(self) -> Price | None:
        """Finds the lowest price on demand, starting prices among them, or None."""
        offers = [price for price in self.prices if price.kind in ("on demand", STARTING)]
        return min(offers, key=lambda price: price.usd_per_hour, default=None)


def find_card(name: str, cards: Mapping[str, Card], own_list: object = "cards.json") -> Card:
    """Finds the card of a name, whatever case, spaces, order and vendor stand there.

    The driver's names are known, and parts that one card alone has, or that are all of its name
    but what further cards add: "A6000", and "4090" where there is a 4090 Laptop too.

    Args:
        own_list: where the user may describe a card, for the message.

    Raises:
        SettingError: no card is named so, or several are; the message suggests the nearest.
    """
    exact = card_named(name, cards)
    if exact is not None:
        return exact
    wanted = words_of(name)
    parts = [card for card in cards.values() if _has_part(card, wanted)]
    plain = [card for card in parts if all(_is_variant(other, card) for other in parts)]
    if plain:
        return plain[0]
    if parts:
        several = ", ".join(card.name for card in parts)
        raise SettingError(f"{name!r} matches several cards: choose {several}.")
    raise SettingError(
        f"no card is named {name!r}{_nearest(name, cards)}: choose one of the {len(cards)} that "
        f"`qwen-l40s estimate --list-cards` prints, or describe yours in {own_list}."
    )


def card_named(name: str, cards: Mapping[str, Card]) -> Card | None:
    """Finds the card whose whole name differs in case, spaces, order and vendor alone, or None."""
    known = card_names((card.name, card.also) for card in cards.values()).get(name_key(name))
    return None if known is None else cards[known]


def with_memory(card: Card, memory_bytes: int) -> Card:
    """Gives the card another size of memory, where others use a part of it."""
    return replace(card, memory_bytes=memory_bytes)


def words_of(name: str) -> tuple[str, ...]:
    """Finds runs of letters and of digits: spaces and hyphens between them do not count."""
    parts = re.findall(r"[^\W\d_]+|\d+", name.casefold())
    return tuple(sorted(part for part in parts if part not in EMPTY_WORDS))


def name_key(name: str) -> str:
    """Makes the same of all spellings of a name."""
    return " ".join(words_of(name))


def is_named(card: Card, name: str) -> bool:
    """Tells whether a card is the one of a driver's name, whatever case and vendor stand there."""
    return name_key(name) in map(name_key, (card.name, *card.also))


def _has_part(card: Card, wanted: tuple[str, ...]) -> bool:
    numbered = any(word.isdigit() for word in wanted)
    return numbered and any(set(wanted) <= set(words_of(name)) for name in (card.name, *card.also))


def _is_variant(card: Card, other: Card) -> bool:
    return set(words_of(other.name)) <= set(words_of(card.name))


def card_names(cards: Iterable[tuple[str, Iterable[str]]], where: str = "") -> dict[str, str]:
    """Maps {key of each name: the card's name} of pairs of a name and the other names.

    Raises:
        SettingError: two cards have one name; the message begins with `where`.
    """
    found: dict[str, str] = {}
    for name, also in cards:
        for other in (name, *also):
            if found.setdefault(name_key(other), name) != name:
                raise SettingError(
                    f"{where}the cards {found[name_key(other)]!r} and {name!r} are both named "
                    f"{other!r}: a name must mean one card, so change it or 'also' in your list."
                )
    return found


def _nearest(name: str, cards: Mapping[str, Card]) -> str:
    names = {
        name_key(other): card.name for card in cards.values() for other in (card.name, *card.also)
    }
    near = difflib.get_close_matches(name_key(name), names, n=1, cutoff=0.5)
    return f", the nearest is {names[near[0]]!r}" if near else ""


# A card that no list has: what the driver tells of it, and the card of the list most like it.


@dataclass(frozen=True)
class UnlistedCard(Card):
    """Name, memory and capability as the driver tells them; peaks, bandwidths and L2 are 0.

    Attributes:
        nearest: name of the listed card whose times are likely nearest.
    """

    nearest: str


def card_by_driver(facts: CardFacts, cards: Mapping[str, Card]) -> Card:
    """Finds the listed card of a driver's name with the memory it shows, or an `UnlistedCard`.

    Only a whole name counts: "NVIDIA A40" is a part of an A100 40GB's.
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
    """Finds the listed card whose name is a part of the driver's, such as L40S of "NVIDIA
    L40S-24Q", or else of the nearest capability, then memory, then name.
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


# What an image costs on a rented card, and prices that somebody types in.

SECONDS_PER_HOUR = 3600
DEFAULT_CARD = "L40S"
EXAMPLE = "L40S = 0.79"  # a line of prices that somebody types in
COMMENT = "#"


def check_price(usd_per_hour: Any) -> None:
    """Refuses what is no price.

    Raises:
        SettingError: it is negative, infinite or no number.
    """
    if not _is_finite(usd_per_hour) or usd_per_hour < 0:
        raise SettingError(
            f"usd_per_hour is {usd_per_hour!r}: give the price of one card in USD per hour, 0 or "
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
    """Reads {card's name in the list: USD an hour}; empty lines say nothing.

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
        try:
            name, price = _split(line)
            card = find_card(name, cards).name
            if card in prices:
                raise SettingError(f"{card} already has a price above: keep one.")
        except SettingError as error:
            raise SettingError(f"prices, line {number}: {error}") from error
        prices[card] = price
    return prices


def _split(line: str) -> tuple[str, float]:
    name, _, amount = line.partition("=")
    try:
        price = float(amount.strip().removeprefix("$"))
    except ValueError:
        price = math.nan
    if not name.strip() or math.isnan(price):
        raise SettingError(
            f"{line!r} is not a card and its price in USD per hour: write {EXAMPLE!r}."
        )
    if not 0 <= price < math.inf:
        raise SettingError(f"a price must be at least 0 USD per hour, got {price:g}.")
    return name.strip(), price
