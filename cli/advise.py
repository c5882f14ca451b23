"""`qwen-l40s advise`: which card paints a load of images for the least."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingError
from .estimate import CARDS_HELP, add_request_arguments, request_of
from .output import check_plot, print_text, write_plot

if TYPE_CHECKING:
    from ..planning.advise import Advice, Comparison, Market
    from ..planning.cards import Card
    from ..planning.request import RunRequest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Ranks cards by the cost of an image at your load, each with its best settings, and names "
        "the load above which an A100 or H100 is cheaper than an L40S. Exit code 1 if the run fits "
        "no card with a price."
    )
    parser.add_argument(
        "--images-per-hour",
        type=float,
        required=True,
        metavar="N",
        help="the load: images an hour, day and night",
    )
    parser.add_argument(
        "--price",
        nargs="+",
        action="extend",
        default=[],
        metavar="CARD=USD",
        help="your price an hour, instead of the listed on-demand price",
    )
    parser.add_argument("--cards", type=Path, metavar="FILE", help=CARDS_HELP)
    parser.add_argument(
        "--only",
        nargs="+",
        action="extend",
        metavar="CARD",
        help="rank only these cards and compare the first with the others; default: rank all, "
        "compare the L40S with the A100 and the H100",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the cost at each load into a .png")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_request_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the advice.

    Returns:
        0, or 1 when no card with a price holds what is to run.
    """
    from ..charts.advice import advise_text
    from ..machine.card_list import known_cards
    from ..machine.store import load_calibration
    from ..planning.advise import advise, market
    from ..planning.cards import check_positive, read_prices

    check_positive("--images-per-hour", args.images_per_hour)
    if args.plot:
        check_plot(args.plot)
    cards = known_cards(args.cards)
    prices = read_prices("\n".join(args.price), cards)
    chosen = _chosen(args.only, cards)
    request = request_of(args)
    found = market(request, chosen, prices, load_calibration)
    advices = advise(args.images_per_hour, found.offers)
    comparisons = found.comparisons(*[[card.name for card in chosen]] if args.only else [])
    fits = any(advice.offer.fits for advice in advices)
    if args.plot:
        _plot(args.plot, advices, request)
    if args.json:
        print(json.dumps(_as_dict(args.images_per_hour, found, advices, comparisons)))
    else:
        print_text(advise_text(found, advices, comparisons))
    return 0 if fits else 1


def _chosen(only: Sequence[str] | None, cards: Mapping[str, Card]) -> list[Card]:
    from ..machine.store import own_cards_path
    from ..planning.cards import find_card

    if only is None:
        return list(cards.values())
    return list(
        {(card := find_card(name, cards, own_cards_path())).name: card for name in only}.values()
    )


def _plot(path: str, advices: Sequence[Advice], request: RunRequest) -> None:
    from ..charts.cost_chart import cost_chart

    if not any(advice.offer.fits and advice.offer.usd_per_hour for advice in advices):
        raise SettingError(
            "--plot draws cards that it fits on at a price above 0, and there is none here: give "
            "prices with --price, or leave --plot out."
        )
    write_plot(cost_chart(advices, request), path)


def _as_dict(
    load: float, found: Market, advices: Sequence[Advice], comparisons: Sequence[Comparison]
) -> dict[str, Any]:
    """For JSON."""
    from ..charts.advice import comparison_text, price_source, setting_text, table_loads

    loads = table_loads(load)
    return {
        "images_per_hour": load,
        "loads": list(loads),
        "advices": [
            {
                **advice.as_dict(),
                "usd_at_loads": [advice.offer.usd_for(each) for each in loads],
                "note": setting_text(found, advice.offer.card.name),
                "price_source": price_source(found.prices[advice.offer.card.name]),
                "basis": found.estimates[advice.offer.card.name].basis.kind,
            }
            for advice in advices
        ],
        "comparisons": [
            {
                "cards": [comparison.first.card.name, comparison.second.card.name],
                "sentence": comparison_text(comparison),
                "certain": comparison.certain,
                "cheaper": comparison.cheaper and comparison.cheaper.card.name,
                "break_even_images_per_hour": comparison.break_even,
            }
            for comparison in comparisons
        ],
        "unpriced": list(found.unpriced),
        "refused": dict(found.refused),
    }
