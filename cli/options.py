"""The options of `estimate` and `advise` that say what is to run."""

from __future__ import annotations

import argparse
import math
from typing import Any

from ..errors import SettingError
from ..options import OLDER, OPTIONS, Option, likely_family, request_settings, todays
from ..planning.request import AUTO, CFG_MODES, Parts, RunRequest

CARDS_HELP = (
    "your own cards, as JSON; default: cards.json in $QWEN_L40S_CACHE, else in ~/.cache/qwen-l40s"
)


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything that a `RunRequest` is made of."""
    group = parser.add_argument_group("the run")
    group.add_argument(
        "--model",
        metavar="PATH",
        help="take the sizes from your checkpoint: a transformer, a full checkpoint or a diffusers "
        "folder; only headers are read",
    )
    group.add_argument(
        "--size", default="1328x1328", metavar="WxH", help="pixels; default: 1328x1328"
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
    """What the options ask for.

    Raises:
        SettingError: an option breaks its rule or contradicts another.
        CheckpointError: `--model` is no Qwen-Image that this package runs.
    """
    width, height = _size(args.size)
    settings = request_settings(width=width, height=height, **_values(args))
    family, parts = settings["family"], Parts()
    if args.model is not None:
        from ..loaders.sizes import read_sizes

        sizes = read_sizes(args.model)
        family = sizes.family_for(None if family == AUTO else family)
        settings["precision"], settings["text_encoder"], parts = sizes.settled(
            settings["precision"], settings["text_encoder"]
        )
    elif family == AUTO:
        family = likely_family(settings["references"], settings["layers"])
    return RunRequest(**{**settings, "family": family}, parts=parts)


def _values(args: argparse.Namespace) -> dict[str, Any]:
    """The options by their names, whichever flags gave them."""
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
    """The choice of that name, whose words may be joined by hyphens.

    A flag that kept its name takes the older names of its choices too.
    """
    older = OLDER.get(option.name)
    kept = older.values if older and older.flag is None else {}
    for choice in (*option.choices, *kept):
        if text in (choice, choice.replace(" ", "-")):
            return choice
    raise SettingError(f"{option.name} {text!r} is unknown: choose {', '.join(option.choices)}.")


def _size(text: str) -> tuple[int, int]:
    width, cross, height = text.lower().partition("x")
    if cross and all(side.isdecimal() and len(side) < 7 for side in (width, height)):
        return int(width), int(height)
    raise SettingError(f"--size {text!r} must be WIDTHxHEIGHT in pixels, such as 1328x1328.")


def _cfg(text: str) -> str:
    """A mode by name, or of a scale: 1 switches guidance off, any other takes two passes."""
    name = text.replace("-", " ")
    if name in CFG_MODES:
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
