"""The cards that estimates are made for: what each has, what it costs and where that is from."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import SettingError
from .cache import cache_folder
from .card_file import CardList, read_cards
from .formats import OLDEST_CAPABILITY
from .memory import MIB, CardFacts

BUNDLED = Path(__file__).with_name("gpus.json")
OWN = "cards.json"  # in the cache folder
# Gigatransfers a second and lane, one bit each, by PCIe generation.
PCIE_GT_PER_SECOND = {3: 8, 4: 16, 5: 32, 6: 64}
STARTING = "from"  # the kind of a price that is published as "from $0.72"
# Words of a driver's name that tell no card from another.
EMPTY_WORDS = {"nvidia", "geforce", "tesla", "generation", "gpu"}


@dataclass(frozen=True)
class Price:
    """What an hour of one card costs.

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

    def facts(self) -> CardFacts:
        """What the choice of a precision needs."""
        return CardFacts(self.name, self.memory_bytes, self.capability)

    def multiplies(self, precision: str) -> bool:
        """Whether this package multiplies in bf16, fp8 or int8 on such a card, as plans say it."""
        oldest = OLDEST_CAPABILITY.get(precision)
        return precision == "bf16" or (oldest is not None and self.capability >= oldest)

    def price(self) -> Price | None:
        """The lowest price on demand, starting prices among them; None where there is none."""
        offers = [price for price in self.prices if price.kind in ("on demand", STARTING)]
        return min(offers, key=lambda price: price.usd_per_hour, default=None)


def known_cards(path: Path | None = None) -> dict[str, Card]:
    """The bundled list by name, with the user's own over it.

    Args:
        path: a JSON file of the same form; `own_list()` where there is one by default. Of a card
            that is known, by any of its names, it gives only what differs, such as its prices:
            {"cards": {"L40S": {"prices": [...]}}}.

    Raises:
        SettingError: the file cannot be read, or a field is missing, unknown or of no use; the
            message names file, card and field.
    """
    listed = read_cards(BUNDLED, CardList())
    if path is None and os.path.lexists(own_list()):
        path = own_list()
    if path is not None:
        known = _names((name, entry["also"]) for name, entry in listed.cards.items())
        listed = read_cards(Path(path), listed, lambda name: known.get(_key(name), name))
    cards = {name: _card(name, entry) for name, entry in listed.cards.items()}
    _names(((card.name, card.also) for card in cards.values()), where=f"{path}: ")
    return cards


def own_list() -> Path:
    """The user's own list of cards, which need not exist."""
    return cache_folder() / OWN


def card_notes() -> dict[str, str]:
    """What the bundled list says of its figures: peaks, memory, PCIe and prices."""
    return dict(read_cards(BUNDLED, CardList()).notes)


def find_card(name: str, cards: Mapping[str, Card]) -> Card:
    """The card of a name, whatever case, spaces, order and vendor stand there.

    The driver's names are known, and parts that only one card has: "4090", "A6000".

    Raises:
        SettingError: no card is named so, or several are; the message suggests the nearest.
    """
    exact = card_named(name, cards)
    if exact is not None:
        return exact
    wanted = words_of(name)
    parts = [card for card in cards.values() if _has_part(card, wanted)]
    if len(parts) == 1:
        return parts[0]
    if parts:
        several = ", ".join(card.name for card in parts)
        raise SettingError(f"{name!r} may be several cards: choose {several}.")
    raise SettingError(
        f"no card is known as {name!r}{_nearest(name, cards)}: choose {', '.join(cards)}, or "
        f"describe yours in {own_list()}."
    )


def card_named(name: str, cards: Mapping[str, Card]) -> Card | None:
    """The card with a whole name that differs in case, spaces, order and vendor alone, or None."""
    known = _names((card.name, card.also) for card in cards.values()).get(_key(name))
    return None if known is None else cards[known]


def with_memory(card: Card, memory_bytes: int) -> Card:
    """The same card with another size of memory, where others use a part of it.

    Raises:
        SettingError: it is no whole number of bytes of at least 1 MiB.
    """
    whole = isinstance(memory_bytes, int) and not isinstance(memory_bytes, bool)
    if not whole or memory_bytes < MIB:
        raise SettingError(
            f"{memory_bytes!r} bytes are no card's memory: give a whole number, at least {MIB} "
            "(1 MiB)."
        )
    return replace(card, memory_bytes=memory_bytes)


def words_of(name: str) -> tuple[str, ...]:
    """Runs of letters and of digits, so that spaces and hyphens between them do not count."""
    parts = re.findall(r"[^\W\d_]+|\d+", name.casefold())
    return tuple(sorted(part for part in parts if part not in EMPTY_WORDS))


def _card(name: str, entry: Mapping) -> Card:
    gigatransfers = PCIE_GT_PER_SECOND[entry["pcie_generation"]]
    return Card(
        name=name,
        also=tuple(entry["also"]),
        architecture=entry["architecture"],
        capability=tuple(entry["capability"]),
        memory_bytes=entry["memory_mib"] * MIB,
        bandwidth=entry["bandwidth_gb_per_second"] * 1e9,
        l2_bytes=entry["l2_mib"] * MIB,
        dense_flops={kind: peak * 1e12 for kind, peak in entry["dense_tflops"].items()},
        pcie_bytes_per_second=entry["pcie_lanes"] * gigatransfers * 1e9 / 8,
        tdp_watts=entry["tdp_watts"],
        prices=tuple(Price(**price) for price in entry["prices"]),
        source=entry["source"],
    )


def _key(name: str) -> str:
    return " ".join(words_of(name))


def _has_part(card: Card, wanted: tuple[str, ...]) -> bool:
    numbered = any(word.isdigit() for word in wanted)
    return numbered and any(set(wanted) <= set(words_of(name)) for name in (card.name, *card.also))


def _names(cards: Iterable[tuple[str, Iterable[str]]], where: str = "") -> dict[str, str]:
    """{key of each name: the card's name}."""
    found: dict[str, str] = {}
    for name, also in cards:
        for other in (name, *also):
            if found.setdefault(_key(other), name) != name:
                raise SettingError(
                    f"{where}the cards {found[_key(other)]!r} and {name!r} are both named "
                    f"{other!r}: a name must be one card's, so change it or 'also' in your list."
                )
    return found


def _nearest(name: str, cards: Mapping[str, Card]) -> str:
    names = {_key(other): card.name for card in cards.values() for other in (card.name, *card.also)}
    near = difflib.get_close_matches(_key(name), names, n=1, cutoff=0.5)
    return f", the nearest is {names[near[0]]!r}" if near else ""
