"""`qwen-l40s estimate --list-cards`: the known cards, their peaks and prices, with sources."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..charts.figures import folded, table
from ..planning.cards import card_notes
from ..planning.memory import GIB
from ..planning.offers import price_source

if TYPE_CHECKING:
    from ..planning.cards import Card

PRECISIONS = ("bf16", "fp8", "int8")


def cards_table(cards: Mapping[str, Card], *, as_json: bool) -> str:
    """A line for each card, with notes and sources below, or one JSON object with everything."""
    if as_json:
        return json.dumps({"cards": [_fields(card) for card in cards.values()]})
    rows = [["card", "GiB", "GB/s", *(f"{name} TFLOPS" for name in PRECISIONS), "W", "price"]]
    for card in cards.values():
        price = card.price()
        rows.append(
            [
                card.name,
                f"{card.memory_bytes / GIB:.1f}",
                f"{card.bandwidth / 1e9:.0f}",
                *(_tera(card.dense_flops.get(name)) for name in PRECISIONS),
                f"{card.tdp_watts}",
                f"${price.usd_per_hour:.2f}/h, {price_source(price)}" if price else "none",
            ]
        )
    lines = table(rows, right=range(1, 7))
    for topic, text in card_notes().items():
        lines += ["", *folded(f"{topic}: {text}", "")]
    lines += ["", "sources"]
    for card in cards.values():
        lines += folded(f"{card.name}: {card.source}", "")
    return "\n".join(lines)


def _fields(card: Card) -> dict[str, Any]:
    prices = [asdict(price) for price in card.prices]
    listed = {name: getattr(card, name) for name in type(card).__dataclass_fields__}
    return {
        **listed,
        "also": list(card.also),
        "capability": list(card.capability),
        "dense_flops": dict(card.dense_flops),
        "prices": prices,
    }


def _tera(flops: float | None) -> str:
    return "-" if flops is None else f"{flops / 1e12:.0f}"
