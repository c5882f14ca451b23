"""`qwen-l40s estimate`: memory, time, disk and cost before a run, and the list of known cards."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..charts.figures import folded, table
from ..errors import DoesNotFitError, SettingError
from ..families.qwen_image import TEXT_TO_IMAGE
from ..families.registry import find_member, likely_member
from ..files import print_text
from ..planning.card_list import read_cards
from ..planning.cards import DEFAULT_CARD, Card, card_by_driver, find_card
from ..planning.options import OLDER, OPTIONS, Option, request_settings, todays
from ..planning.request import AUTO, CFG_MODES, OtherModel, Parts, RunRequest
from ..planning.split_cost import check_link
from ..spec.formats import GIB, MULTIPLIED, CardFacts
from .output import check_plot, parse_size, write_plot

CARDS_HELP = (
    "your own GPUs, as JSON; default: cards.json in the settings' cache folder, else in "
    "~/.cache/qwen-l40s"
)


def cards_table(cards: Mapping[str, Card], *, as_json: bool, sources: bool) -> str:
    from ..charts.text import price_source

    if as_json:
        return json.dumps({"cards": [asdict(card) for card in cards.values()]})
    rows = [["card", "GiB", "GB/s", *(f"{name} TFLOPS" for name in MULTIPLIED), "W", "price"]]
    for card in cards.values():
        price, peaks = card.price(), {n: f"{it / 1e12:.0f}" for n, it in card.dense_flops.items()}
        rows.append(
            [
                card.name,
                f"{card.memory_bytes / GIB:.1f}",
                f"{card.bandwidth / 1e9:.0f}",
                *(peaks.get(name, "-") for name in MULTIPLIED),
                f"{card.tdp_watts}",
                f"${price.usd_per_hour:.2f}/h, {price_source(price)}" if price else "none",
            ]
        )
    lines = table(rows, right=range(1, 7))
    if not sources:
        return "\n".join([*lines, "", "--sources says where each figure is from."])
    for topic, text in read_cards()[0].items():
        lines += ["", *folded([f"{topic}: {text}"])]
    lines += ["", "sources"]
    lines += folded(f"{card.name}: {card.source}" for card in cards.values())
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Predicts memory, time, disk and cost of a run on a GPU, and names the settings to choose."
        " Loads no model. Exit code 4 if it fits with offloading, 1 if it does not fit."
    )
    parser.add_argument(
        "--card",
        metavar="NAME",
        help=f"a GPU of --list-cards; default: this machine's GPU, else {DEFAULT_CARD}",
    )
    parser.add_argument(
        "--vram", type=float, metavar="GIB", help="use only this much of the GPU's memory"
    )
    parser.add_argument(
        "--ram",
        type=float,
        metavar="GIB",
        help="system RAM of the machine; default: this machine's, where the GPU is this machine's",
    )
    parser.add_argument(
        "--price", type=float, metavar="USD", help="your price an hour, instead of the listed one"
    )
    parser.add_argument(
        "--cards",
        action="append",
        default=[],
        metavar="N|FILE",
        help=f"a number: generate one image on so many such GPUs; a file: {CARDS_HELP}",
    )
    parser.add_argument(
        "--link",
        type=float,
        metavar="GBPS",
        help="GB/s from GPU to GPU, each way; default: what PCIe is likely to reach",
    )
    parser.add_argument(
        "--with",
        dest="others",
        action="append",
        default=[],
        metavar="FAMILY:PRECISION",
        help="a model that stays in VRAM beside this one, with its text encoder and VAE, such "
        "as qwen-image-2.1:int8; may be repeated",
    )
    parser.add_argument("--list-cards", action="store_true", help="print all known GPUs")
    parser.add_argument(
        "--sources", action="store_true", help="with --list-cards: where each figure is from"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the memory of each phase into a .png")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_request_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from ..charts.text import Refusal, cards_answer, estimate_json, estimate_text
    from ..machine.store import known_cards, load_calibration
    from ..planning.estimate import FITS, RUNS_SLOWLY, estimate

    count, file = _count_and_file(args.cards)
    link = _link(args.link, count)
    cards = known_cards(file)
    if args.list_cards:
        print_text(cards_table(cards, as_json=args.json, sources=args.sources))
        return 0
    if args.plot:
        check_plot(args.plot)
    request = replace(request_of(args), others=_others(args.others))
    card = _card(args.card, cards)
    card = replace(card, memory_bytes=_usable_bytes(args.vram, card))
    calibration = load_calibration(card)
    try:
        found = estimate(
            request,
            card,
            calibration=calibration,
            usd_per_hour=args.price,
            ram_bytes=_ram_bytes(args.ram, args.card),
        )
    except DoesNotFitError as error:
        refusal = Refusal(card, request, str(error))
        if args.plot:
            from ..charts.picture import refusal_chart

            write_plot(refusal_chart(refusal), args.plot)
        print_text(json.dumps(refusal.as_dict()) if args.json else refusal.text)
        return 1
    if args.model is not None:
        found = replace(found, notes=(*found.notes, f"Sizes are those of {args.model}."))
    if args.plot:
        from ..charts.picture import memory_chart

        write_plot(memory_chart(found), args.plot)
    lines: Iterable[str] = ()
    answer: dict[str, Any] = {}
    if count > 1:
        lines, answer = cards_answer(found, count, link)
    if args.json:
        print_text(json.dumps({**estimate_json(found), **answer}))
    else:
        print_text(estimate_text(found, lines))
    return {FITS: 0, RUNS_SLOWLY: 4}.get(found.verdict, 1)


def _count_and_file(given: Sequence[str]) -> tuple[int, Path | None]:
    """Returns (how many cards, the file of the user's own) of --cards, of each the last."""
    count, file = 1, None
    for text in given:
        try:
            number = float(text)
        except ValueError:
            file = Path(text)
            continue
        if not number.is_integer():
            raise SettingError(f"--cards {text} must be a whole number of GPUs, or a file.")
        count = int(number)
    if count < 1:
        raise SettingError(f"--cards must be at least 1, got {count}.")
    return count, file


def _others(given: Sequence[str]) -> tuple[OtherModel, ...]:
    found = [OtherModel(*text.rpartition(":")[::2]) for text in given]
    for text, other in zip(given, found, strict=True):
        if not other.family or not other.precision:
            raise SettingError(
                f"--with {text} must be FAMILY:PRECISION, such as qwen-image-2.1:int8."
            )
    return tuple(found)


def _link(gbps: float | None, cards: int) -> float | None:
    if gbps is None:
        return None
    check_link(1e9 * gbps)
    if cards == 1:
        raise SettingError("--link is for several GPUs: give their number too, as --cards 2.")
    return 1e9 * gbps


def _card(name: str | None, cards: Mapping[str, Card]) -> Card:
    from ..machine.store import own_cards_path

    if name is not None:
        return find_card(name, cards, own_cards_path())
    here, why = _card_of_this_machine()
    if here is None:
        print(
            f"qwen-l40s: {why}: estimating for an {DEFAULT_CARD}; --card names another",
            file=sys.stderr,
        )
        return find_card(DEFAULT_CARD, cards)
    return card_by_driver(here, cards)


def _card_of_this_machine() -> tuple[CardFacts | None, str]:
    if find_spec("torch") is None:
        return None, "torch, which finds this machine's GPU, is not installed"
    from ..machine.card import read_cards
    from ..machine.packages import check_torch

    torch: Any = check_torch()[1]
    cards = read_cards(torch)
    if not cards.usable:
        return None, f"no GPU here can be used ({cards.why.fact})"
    from ..optimizations.linear import why_not_int8

    return cards.usable[0].facts(why_not_int8(torch.device("cuda", 0))), ""


def _ram_bytes(gib: float | None, card: str | None) -> int | None:
    if gib is not None:
        from ..planning.estimate import check_positive

        check_positive("--ram", gib)
        return round(gib * GIB)
    if card is not None:
        return None
    from ..machine.memory import total_memory

    return total_memory()


def _usable_bytes(gib: float | None, card: Card) -> int:
    if gib is None:
        return card.memory_bytes
    if not math.isfinite(gib) or gib <= 0 or gib * GIB > card.memory_bytes:
        raise SettingError(
            f"--vram {gib:g} must be above 0 and at most {card.memory_bytes / GIB:.2f}, the GiB of "
            f"{card.name} that programs see: describe another GPU in a file for --cards."
        )
    return round(gib * GIB)


# The options that say what is to run, which `advise` shares.


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the run")
    group.add_argument(
        "--model",
        metavar="PATH",
        help="take the sizes from your checkpoint: a transformer, a full checkpoint or a diffusers "
        "folder; only headers are read",
    )
    newest = find_member("qwen-image-2.1")
    group.add_argument(
        "--size",
        type=parse_size,
        metavar="WxH",
        help=f"pixels; default: the template's, {TEXT_TO_IMAGE.default_side} square, of "
        f"{newest.name} {newest.default_side}",
    )
    for option in OPTIONS:
        if option.flag is not None:
            _add(group, option)
            if (older := OLDER.get(option.name)) and older.flag:
                group.add_argument(
                    older.flag,
                    dest=older.name,
                    type=type(option.default),
                    default=argparse.SUPPRESS,
                    help=argparse.SUPPRESS,
                )


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    choices = f" One of: {', '.join(option.choices)}." if option.choices else ""
    scale = " Or a scale: 1 is off." if option.name == "cfg" else ""
    group.add_argument(
        option.flag or f"--{option.name.replace('_', '-')}",
        dest=option.name,
        type=type(option.default),
        default=option.default,
        metavar="NAME" if option.choices else "N",
        help=f"{option.help}{choices}{scale} Default: {option.default}.",
    )


def request_of(args: argparse.Namespace) -> RunRequest:
    settings = request_settings(**_values(args))
    family, parts = settings["family"], Parts()
    if args.model is not None:
        from ..loaders.sizes import read_sizes

        sizes = read_sizes(args.model)
        family = sizes.family_for(None if family == AUTO else family)
        settings["precision"], settings["text_encoder"], parts = sizes.settled(
            settings["precision"], settings["text_encoder"]
        )
        settings["steps"] = settings["steps"] or sizes.steps or None
    elif family == AUTO:
        family = likely_member(settings["references"], settings["layers"]).name
    if args.size is not None:
        settings["width"], settings["height"] = args.size
    return RunRequest(**{**settings, "family": family}, parts=parts)


def _values(args: argparse.Namespace) -> dict[str, Any]:
    values = {"cfg": _cfg(args.cfg)}
    for option in OPTIONS:
        if option.name != "cfg" and option.flag is not None:
            value = getattr(args, option.name)
            values[option.name] = _choice(option, value) if option.choices else value
        older = OLDER.get(option.name)
        if older and hasattr(args, older.name):
            value = getattr(args, older.name)
            values[older.name] = value.replace("-", " ") if isinstance(value, str) else value
    return todays(values)


def _choice(option: Option, text: str) -> str:
    """Returns the choice of that name, whose words hyphens may join, or of an older name."""
    older = OLDER.get(option.name)
    kept = older.values if older and older.flag is None else {}
    for choice in (*option.choices, *kept):
        if text in (choice, choice.replace(" ", "-")):
            return choice
    raise SettingError(f"{option.name} {text!r} is unknown: choose {', '.join(option.choices)}.")


def _cfg(text: str) -> str:
    """Reads a mode by name, or a scale: 1 switches guidance off, any other takes two passes."""
    name = text.replace("-", " ")
    if name in (AUTO, *CFG_MODES):
        return name
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not math.isfinite(scale) or scale < 0:
        raise SettingError(
            f"--cfg {text!r} must be a scale such as 4, where 1 switches guidance off, or one of "
            f"{', '.join(CFG_MODES)}."
        )
    return "off" if scale == 1 else "two passes"
