"""`qwen-l40s estimate`: memory, time, disk and cost before a run."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .cards_table import cards_table
from .picture import check_plot, write_plot
from .printed import print_text
from .wish_options import CARDS_HELP, add_wish_arguments, bytes_of_vram, check_price, wish_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..planning.cards import Card
    from ..planning.memory import CardFacts

DEFAULT_CARD = "L40S"


def add_parser(subparsers: argparse._SubParsersAction, common: argparse.ArgumentParser) -> None:
    parser = subparsers.add_parser(
        "estimate",
        parents=[common],
        help="say what a run takes and costs, before it: memory, time, disk, USD",
        description="Counts memory of each phase, time and cost of a run on any card, and names "
        "the setting that suits it. Nothing is loaded. Exit code 1 when it does not fit.",
    )
    parser.add_argument(
        "--card",
        metavar="NAME",
        help=f"as --list-cards names it; default: the card of this machine, else {DEFAULT_CARD}",
    )
    parser.add_argument("--vram", type=float, metavar="GIB", help="a part of the card's memory")
    parser.add_argument(
        "--price", type=float, metavar="USD", help="of the card for an hour, instead of the list's"
    )
    parser.add_argument("--cards", type=Path, metavar="FILE", help=CARDS_HELP)
    parser.add_argument("--list-cards", action="store_true", help="print the known cards")
    parser.add_argument("--plot", metavar="FILE", help="draw the phases, as .png")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_wish_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the estimate.

    Returns:
        0 when it fits, 1 when it does not.
    """
    from ..charts.words import estimate_text
    from ..planning.calibration import load_calibration
    from ..planning.cards import known_cards, with_memory
    from ..planning.estimator import estimate

    cards = known_cards(args.cards)
    if args.list_cards:
        print_text(cards_table(cards, as_json=args.json))
        return 0
    if args.plot:
        check_plot(args.plot)
    price = None if args.price is None else check_price("--price", args.price)
    wish = wish_of(args)
    card = _card(args.card, cards)
    card = with_memory(card, bytes_of_vram(args.vram, card.name, card.memory_bytes))
    calibration = load_calibration(card.name)
    found = estimate(wish, card, calibration=calibration, usd_per_hour=price)
    if args.model is not None:
        found = replace(found, notes=(*found.notes, f"Sizes are those of {args.model}."))
    if args.plot:
        from ..charts.memory_chart import memory_chart

        write_plot(memory_chart(found), args.plot)
    print_text(json.dumps(found.as_dict()) if args.json else estimate_text(found))
    return 0 if found.fits else 1


def _card(name: str | None, cards: Mapping[str, Card]) -> Card:
    """The named card, or this machine's with the memory that it really shows."""
    from ..planning.cards import find_card
    from ..planning.unlisted import card_by_driver

    if name is not None:
        return find_card(name, cards)
    here, why = _card_of_this_machine()
    if here is None:
        print(
            f"qwen-l40s: {why}: this is about one {DEFAULT_CARD}; --card names another",
            file=sys.stderr,
        )
        return find_card(DEFAULT_CARD, cards)
    return card_by_driver(here, cards)


def _card_of_this_machine() -> tuple[CardFacts | None, str]:
    """(the first card that torch can use, or None; why there is none)."""
    if find_spec("torch") is None:
        return None, "torch, which tells this machine's card, is not installed"
    from ..optimizations.hardware import read_cards
    from ..optimizations.software import check_torch
    from ..planning.memory import CardFacts

    cards = read_cards(check_torch()[1])
    if not cards.usable:
        return None, f"no card of this machine can be used ({cards.reason})"
    first = cards.usable[0]
    return CardFacts(first.name, first.memory_bytes, first.sm), ""
