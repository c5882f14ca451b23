"""The lists of cards: the bundled one, the user's own over it, and what each field may be."""

from __future__ import annotations

import codecs
import difflib
import re
import reprlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ..errors import SettingError
from ..files import parse_object, read_bytes
from ..spec.formats import MIB, MULTIPLIED
from .cards import Card, Price, Words, cards_by_name, words_of

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
    """Reads (notes on the bundled list, the cards by name), with the user's own list over it. That
    is strict JSON with the fields of `FIELDS`, and gives only what differs: {"cards": {"L40S":
    {"prices": [...]}}}. Raises SettingError, which names file, card and field.
    """
    notes, bundled = _listed(BUNDLED, {}, {})
    listed = bundled
    if path is not None:
        known = cards_by_name((name, entry["also"]) for name, entry in bundled.items())
        _, listed = _listed(path, bundled, known)
    cards = {name: _card(name, entry, bundled.get(name, {})) for name, entry in listed.items()}
    cards_by_name(((card.name, card.also) for card in cards.values()), where=f"{path}: ")
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
                f"{reprlib.repr(given)} is not the name of a GPU: give one, such as L40S."
            )
        names = known.get(words_of(given), [given])
        if len(names) > 1:
            raise SettingError(f"{given!r} names several GPUs: name one of {', '.join(names)}.")
        name = names[0]
        if name in seen:
            raise SettingError(f"{seen[name]!r} and {given!r} are the same GPU: name it once.")
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
