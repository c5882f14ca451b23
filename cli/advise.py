"""`qwen-l40s advise`: finds the card that generates a load of images for the least money."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingError
from ..files import print_text
from ..planning.cards import Card, find_card
from ..planning.phases import figure
from .estimate import CARDS_HELP, add_request_arguments, request_of
from .output import check_plot, write_plot

if TYPE_CHECKING:
    from ..planning.advise import Advice, Offer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Ranks GPUs by the cost of an image at your load, each with its best settings. Exit code "
        "1 if the run fits no GPU with a price."
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
        help="rank only these GPUs; default: all of them",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the cost at three loads into a .png")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_request_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from ..charts.text import advise_text
    from ..machine.store import known_cards, load_calibration
    from ..planning.advise import advise, read_prices
    from ..planning.estimate import check_positive

    check_positive("--images-per-hour", args.images_per_hour)
    if args.plot:
        check_plot(args.plot)
    cards = known_cards(args.cards)
    prices = read_prices("\n".join(args.price), cards)
    chosen = _chosen(args.only, cards)
    found = advise(args.images_per_hour, request_of(args), chosen, prices, load_calibration)
    if args.plot:
        _plot(args.plot, found)
    if args.json:
        print(json.dumps(_as_dict(found)))
    else:
        print_text(advise_text(found))
    return 0 if found.fitting else 1


def _chosen(only: Sequence[str] | None, cards: Mapping[str, Card]) -> list[Card]:
    from ..machine.store import own_cards_path

    if only is None:
        return list(cards.values())
    return list(
        {(card := find_card(name, cards, own_cards_path())).name: card for name in only}.values()
    )


def _plot(path: str, found: Advice) -> None:
    from ..charts.picture import cost_chart

    if not found.paid:
        raise SettingError(
            "--plot shows GPUs that fit at a price above 0, and there are none: give prices with "
            "--price, or leave --plot out."
        )
    write_plot(cost_chart(found), path)


def _as_dict(found: Advice) -> dict[str, Any]:
    return {
        "images_per_hour": found.images_per_hour,
        "loads": list(found.loads),
        "advices": [_offer(offer, found) for offer in found.ranked],
        "unpriced": list(found.unpriced),
        "refused": dict(found.refused),
    }


def _offer(offer: Offer, advice: Advice) -> dict[str, Any]:
    from ..charts.text import price_source, setting_text

    load, seconds = advice.images_per_hour, offer.found.image_seconds
    return {
        "card": offer.name,
        "usd_per_hour": offer.usd_per_hour,
        "seconds_per_image": figure(seconds.middle),
        "cards": offer.cards_for(load),
        "usd_per_image": figure(offer.usd_for(load)),
        "full_usd_per_image": figure(offer.busy_usd.middle),
        "utilisation": figure(offer.utilisation(load)),
        "fits": offer.found.fits,
        "tight": offer.found.tight,
        "ranges": {
            "seconds_per_image": [figure(end) for end in seconds],
            "cards": [offer.cards_for(load, end) for end in seconds],
            "usd_per_image": [figure(offer.usd_for(load, end)) for end in seconds],
            "full_usd_per_image": [figure(end) for end in offer.busy_usd],
        },
        "usd_at_loads": [offer.usd_for(each) for each in advice.loads],
        "note": setting_text(offer),
        "price_source": price_source(offer.price),
        "basis": offer.found.basis.kind,
    }
