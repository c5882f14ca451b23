"""Describes the cards that estimates are made for: what each has and costs, and their lists."""

from __future__ import annotations

import codecs
import difflib
import math
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import SettingError
from ..files import parse_object, read_bytes
from ..spec.formats import GIB, MIB, MULTIPLIED, CardFacts

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
        limit_watts: the power limit that is set on this machine's card; 0 for its own.
        no_int8: as of `CardFacts`.
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
    limit_watts: int = field(default=0, kw_only=True)
    no_int8: str = field(default="", kw_only=True)

    def facts(self) -> CardFacts:
        return CardFacts(self.name, self.memory_bytes, self.capability, no_int8=self.no_int8)

    def price(self) -> Price | None:
        """Finds the lowest price on demand, starting prices among them, or None."""
        offers = [price for price in self.prices if price.kind in ("on demand", STARTING)]
        return min(offers, key=lambda price: price.usd_per_hour, default=None)


def find_card(name: str, cards: Mapping[str, Card], own_list: object = "cards.json") -> Card:
    """Finds the card of a name, whatever case, spaces, order and vendor stand there.

    A name may leave out what tells no model from another: "A6000", "4090". An RTX 5070 is no
    RTX 5070 Ti. The driver's names are known.

    Args:
        own_list: where the user may describe a card, for the message.

    Raises:
        SettingError: no card is named so, or several are; the message suggests the nearest.
    """
    wanted = _words_of(name)
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


def _words_of(name: str) -> Words:
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
    return [_words_of(name) for name in (card.name, *card.also)]


def is_named(card: Card, name: str) -> bool:
    """Tells whether a card is one of a driver's name, whatever case and vendor stand there."""
    return _words_of(name) in _names(card)


def _names_of(cards: Mapping[str, Card]) -> dict[Words, list[str]]:
    return _all_names((card.name, card.also) for card in cards.values())


def _all_names(
    cards: Iterable[tuple[str, Iterable[str]]], where: str = ""
) -> dict[Words, list[str]]:
    # {each name: the cards of it} of pairs of a card's name and the other names. Cards that differ
    # in the size of their memory alone may have a driver's name in common.
    found: dict[Words, list[str]] = {}
    for name, also in cards:
        for other in (name, *also):
            known = found.setdefault(_words_of(other), [])
            own = _without_size(_words_of(name))
            if any(_without_size(_words_of(it)) != own for it in known):
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
    """Name, memory and capability as the driver tells them; peaks, bandwidths and L2 are 0.

    Attributes:
        nearest: name of the listed card whose times are likely nearest.
    """

    nearest: str


def card_by_driver(facts: CardFacts, cards: Mapping[str, Card]) -> Card:
    """Finds the listed card of a driver's name with the memory it shows, or an `UnlistedCard`.

    Only a whole name counts: "NVIDIA A40" is a part of an A100 40GB's. Of several cards with that
    name it is the one whose memory is nearest.
    """

    def difference(name: str) -> float:
        return abs(math.log(cards[name].memory_bytes / max(1, facts.total_bytes)))

    if listed := _names_of(cards).get(_words_of(facts.name)):
        card = cards[min(listed, key=difference)]
        here = {"limit_watts": facts.limit_watts, "no_int8": facts.no_int8}
        return replace(card, memory_bytes=facts.total_bytes, **here)
    figures = "bandwidth", "l2_bytes", "pcie_bytes_per_second", "tdp_watts"
    return UnlistedCard(
        **dict.fromkeys(figures, 0),
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
    words = set(_words_of(facts.name))

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


# The lists.

BUNDLED = Path(__file__).resolve().with_name("gpus.json")
PEAKS = (*MULTIPLIED, "fp32")
KINDS = ("on demand", "from", "spot", "serverless", "community")
MOST_BYTES = 2**20
LONGEST_TEXT = 2000
LARGEST = 1e9  # above every figure in its unit, and below what overflows a product of two
LEAST_TFLOPS = 0.1
DATE = re.compile(r"20\d\d-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?|undated")
# Gigatransfers a second and lane, one bit each, by PCIe generation.
PCIE_GT_PER_SECOND = {3: 8, 4: 16, 5: 32, 6: 64}
# What the times of a card follow from.
TIMED = ("dense_tflops", "bandwidth_gb_per_second", "pcie_generation", "pcie_lanes", "capability")
# What a price of the user's own may leave out.
OWN_PRICE = {"provider": "your own", "kind": "on demand", "date": "undated", "source": "your list"}


def read_cards(path: Path | None = None) -> tuple[dict[str, str], dict[str, Card]]:
    """Reads the bundled list, with the user's own over it.

    Both are strict JSON of the form {"notes": {topic: text}, "cards": {name: {field: value}}}, with
    the fields of `FIELDS`. Of a card that is known, by any of its names, the user's own list gives
    only what differs, such as its prices: {"cards": {"L40S": {"prices": [...]}}}.

    Args:
        path: of the user's own list; None for the bundled one alone.

    Returns:
        ({topic: what the bundled list says of its figures}, the cards by name).

    Raises:
        SettingError: the file cannot be read, or a field is missing, unknown or of no use; the
            message names file, card and field.
    """
    notes, bundled = _listed(BUNDLED, {}, {})
    listed = bundled
    if path is not None:
        known = _all_names((name, entry["also"]) for name, entry in bundled.items())
        _, listed = _listed(path, bundled, known)
    cards = {name: _card(name, entry, bundled.get(name, {})) for name, entry in listed.items()}
    _all_names(((card.name, card.also) for card in cards.values()), where=f"{path}: ")
    return notes, cards


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < LARGEST


def _at_least(low: float) -> Callable[[Any], bool]:
    return lambda value: _is_number(value) and value >= low


def _whole(value: Any) -> bool:
    return _is_number(value) and isinstance(value, int)


def _text(value: Any) -> bool:
    plain = isinstance(value, str) and value.isprintable()  # no half of a surrogate pair either
    return plain and bool(value.strip()) and len(value) <= LONGEST_TEXT


def _capability(value: Any) -> bool:
    pair = isinstance(value, list) and len(value) == 2
    return pair and _whole(value[0]) and (_whole(value[1]) or value[1] == 0)


def _peaks(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and {"bf16", "fp32"} <= set(value) <= set(PEAKS)
        and all(map(_at_least(LEAST_TFLOPS), value.values()))
        and value.get("fp8", value["bf16"]) >= value["bf16"] >= value["fp32"]
    )


def _one_of(known: Collection[Any]) -> Callable[[Any], bool]:
    return lambda value: (_whole(value) or _text(value)) and value in known


# {field: (whether a value may stand there, the rule)}
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "also": (
        lambda value: isinstance(value, list) and all(map(_text, value)),
        "a list of the driver's and other names, which may be empty",
    ),
    "architecture": (_text, "a text such as 'Ada Lovelace'"),
    "capability": (_capability, "the compute capability as two whole numbers, such as [8, 9]"),
    "memory_mib": (_whole, "the MiB that torch's total_memory shows, a whole number above 0"),
    "bandwidth_gb_per_second": (_at_least(1), "the memory's GB/s, at least 1"),
    "l2_mib": (_whole, "the L2 cache's MiB, a whole number above 0"),
    "dense_tflops": (
        _peaks,
        "peaks without sparsity, at least 0.1, for bf16 and fp32, and for fp8 and int8 where it "
        "has them; fp8's no lower than bf16's, and bf16's no lower than fp32's",
    ),
    "pcie_generation": (_one_of(PCIE_GT_PER_SECOND), "a whole number from 3 to 6"),
    "pcie_lanes": (_one_of((1, 2, 4, 8, 16)), "1, 2, 4, 8 or 16"),
    "tdp_watts": (_whole, "a whole number of watts above 0"),
    "source": (_text, "a text that says where the figures are from"),
    "prices": (lambda value: isinstance(value, list), "a list of prices, which may be empty"),
}
PRICE_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "usd_per_hour": (_is_number, "US dollars for an hour of one GPU, a number above 0"),
    "provider": (_text, "a text"),
    "kind": (_one_of(KINDS), f"one of {', '.join(KINDS)}"),
    "date": (
        lambda value: isinstance(value, str) and DATE.fullmatch(value) is not None,
        "a date such as 2026-03-15, or 'undated'",
    ),
    "source": (_text, "a text that says where it was published"),
}


Fields = Mapping[str, Mapping[str, Any]]  # of each card by name


def _listed(
    path: Path, below: Fields, known: Mapping[Words, list[str]]
) -> tuple[dict[str, str], Fields]:
    # (notes, the cards of `below` with what the file says); `known` has the names of `below`.
    content = _parse(path)
    try:
        return _merged(content, below, known)
    except SettingError as error:
        raise SettingError(error, path) from error


def _merged(
    content: Mapping, below: Fields, known: Mapping[Words, list[str]]
) -> tuple[dict[str, str], Fields]:
    _refuse_unknown(content, ("notes", "cards"), "the list of GPUs")
    notes, listed = content.get("notes", {}), content.get("cards")
    if not isinstance(notes, dict) or not all(map(_text, notes.values())):
        raise SettingError("'notes' must be an object of texts: correct or remove it.")
    if not isinstance(listed, dict):
        raise SettingError(
            "the list of GPUs has no object 'cards': give the GPUs by name, as in "
            '{"cards": {"L40S": {"prices": [{"usd_per_hour": 0.9}]}}}.'
        )
    cards = dict(below)
    seen: dict[str, str] = {}
    for given, entry in listed.items():
        if not _text(given):
            raise SettingError(
                f"{reprlib.repr(given)} is not the name of a card: give one, such as L40S."
            )
        names = known.get(_words_of(given), [given])
        if len(names) > 1:
            raise SettingError(f"{given!r} names several GPUs: name one of {', '.join(names)}.")
        name = names[0]
        if name in seen:
            raise SettingError(f"{seen[name]!r} and {given!r} are the same card: name it once.")
        seen[name] = given
        cards[name] = {**cards.get(name, {}), **_checked(entry, f"GPU {given!r}")}
        _refuse_missing(cards[name], FIELDS, f"GPU {given!r}")
    return notes, cards


def _checked(entry: Any, where: str) -> dict[str, Any]:
    _check(entry, FIELDS, where)
    if "prices" not in entry:
        return entry
    offers: dict[tuple[str, ...], dict[str, Any]] = {}
    for number, price in enumerate(entry["prices"], 1):
        place = f"{where}, prices, entry {number}"
        _check(price, PRICE_FIELDS, place)
        price = {**OWN_PRICE, **price}
        _refuse_missing(price, PRICE_FIELDS, place)
        offer = (price["provider"], price["kind"], price["date"])
        if offers.setdefault(offer, price)["usd_per_hour"] != price["usd_per_hour"]:
            raise SettingError(f"{place} gives another price of {', '.join(offer)}: keep one.")
    return {**entry, "prices": [*offers.values()]}


def _check(entry: Any, fields: Mapping, where: str) -> None:
    if not isinstance(entry, dict):
        raise SettingError(f"{where} is {reprlib.repr(entry)}: give an object with its fields.")
    _refuse_unknown(entry, fields, where)
    for name, value in entry.items():
        allows, rule = fields[name]
        if not allows(value):
            raise SettingError(
                f"{where}: {name!r} is {reprlib.repr(value)}, but must be {rule}: correct it."
            )


def _refuse_unknown(entry: Mapping, known: Collection[str], where: str) -> None:
    for name in entry:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"write {near[0]!r}" if near else f"choose from {', '.join(known)}"
            raise SettingError(f"{where}: {reprlib.repr(name)} is not a field: {hint}.")


def _refuse_missing(entry: Mapping, fields: Mapping, where: str) -> None:
    for name, (_, rule) in fields.items():
        if name not in entry:
            needs = "a GPU of your own needs" if fields is FIELDS else "every price needs"
            raise SettingError(f"{where}: {name!r} is missing, which {needs}: give {rule}.")


def _card(name: str, entry: Mapping[str, Any], bundled: Mapping[str, Any]) -> Card:
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
        changed=any(entry[field] != bundled.get(field, entry[field]) for field in TIMED),
    )


def _parse(path: Path) -> dict[str, Any]:
    try:
        return parse_object(read_bytes(path, MOST_BYTES).removeprefix(codecs.BOM_UTF8))
    except OSError as error:
        raise SettingError(
            f"cannot read the list of GPUs ({error.strerror}): give a JSON file.", path
        ) from error
    except ValueError as error:
        raise SettingError(
            f"the list of GPUs must be one JSON object ({error}): correct the file.", path
        ) from error
