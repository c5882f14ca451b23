"""The options of `estimate` and `advise` that say what is to run."""

from __future__ import annotations

import argparse
import math

from ..errors import SettingError
from ..planning.request import (
    CFG_MODES,
    LORA_MODES,
    PRECISIONS,
    TEXT_ENCODER_PLACES,
    TEXT_ENCODER_PRECISIONS,
    Loras,
    Parts,
    RunRequest,
)
from ..spec import FAMILIES, GIB

CARDS_HELP = (
    "cards of your own, as JSON; default: cards.json in QWEN_L40S_CACHE, else ~/.cache/qwen-l40s"
)
# The table stands in for the modulation's weights, which then wait in host memory.
TABLES = {"auto": "auto", "on": "off card", "off": "on card"}


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything that a `RunRequest` is made of."""
    group = parser.add_argument_group("what is to run")
    group.add_argument("--family", metavar="NAME", help=f"{', '.join(FAMILIES)}; default the first")
    group.add_argument(
        "--model",
        metavar="PATH",
        help="a checkpoint of your own, for the true sizes: a transformer, a full checkpoint or a "
        "diffusers folder; only headers are read",
    )
    group.add_argument("--precision", default="auto", metavar="NAME", help=", ".join(PRECISIONS))
    group.add_argument(
        "--size", default="1328x1328", metavar="WxH", help="pixels, default 1328x1328"
    )
    group.add_argument(
        "--batch", type=int, default=1, metavar="N", help="images at once, default 1"
    )
    group.add_argument("--steps", type=int, default=20, metavar="N", help="default 20")
    group.add_argument(
        "--cfg",
        default="4",
        metavar="SCALE",
        help="guidance: 1 switches it off, any other doubles the forward passes; or by name: "
        f"{', '.join(CFG_MODES)}; default 4",
    )
    group.add_argument(
        "--references", type=int, default=0, metavar="N", help="reference images of an edit"
    )
    group.add_argument("--layers", type=int, default=0, metavar="N", help="of qwen-image-layered")
    group.add_argument(
        "--text", type=int, default=200, metavar="TOKENS", help="of the prompt, default 200"
    )
    group.add_argument(
        "--tables",
        default="auto",
        metavar="on|off|auto",
        help="on: a table stands in for the modulation's weights, which wait in host memory; off: "
        "they stay on the card; default auto",
    )
    group.add_argument(
        "--text-encoder",
        default="auto",
        metavar="NAME",
        help=f"its precision: {', '.join(TEXT_ENCODER_PRECISIONS)}",
    )
    group.add_argument(
        "--text-encoder-place",
        default="auto",
        metavar="PLACE",
        help=", ".join(TEXT_ENCODER_PLACES),
    )
    group.add_argument("--loras", type=int, default=0, metavar="N", help="LoRAs, default none")
    group.add_argument("--lora-rank", type=int, default=32, metavar="N", help="default 32")
    group.add_argument(
        "--lora-mode", default="merged", metavar="MODE", help=f"{' or '.join(LORA_MODES)} weights"
    )
    group.add_argument(
        "--controlnet",
        type=float,
        default=0.0,
        metavar="GB",
        help="the size of a ControlNet's file",
    )
    group.add_argument(
        "--tiles", type=int, default=0, metavar="N", help="of the VAE: 1 is whole; default auto"
    )


def request_of(args: argparse.Namespace) -> RunRequest:
    """What the options ask for.

    Raises:
        SettingError: an option breaks its rule or contradicts another.
        CheckpointError: `--model` is no Qwen-Image that this package runs.
    """
    width, height = _size(args.size)
    family, precision, encoder, parts = args.family, args.precision, args.text_encoder, Parts()
    if args.model is not None:
        from ..loaders.sizes import read_sizes

        sizes = read_sizes(args.model)
        family = sizes.family_for(family)
        precision, encoder, parts = sizes.settled(precision, encoder)
    if args.tables not in TABLES:
        raise SettingError(f"--tables {args.tables!r} is unknown: choose {', '.join(TABLES)}.")
    return RunRequest(
        family=next(iter(FAMILIES)) if family is None else family,
        precision=precision,
        width=width,
        height=height,
        batch=args.batch,
        steps=args.steps,
        cfg=_cfg(args.cfg),
        references=args.references,
        layers=args.layers,
        text_tokens=args.text,
        modulation=TABLES[args.tables],
        text_encoder=encoder,
        text_encoder_place=args.text_encoder_place.replace("-", " "),
        loras=Loras(args.loras, args.lora_rank, args.lora_mode),
        controlnet_bytes=round(min(_finite("--controlnet", args.controlnet, "GB"), 1e6) * 10**9),
        tiles=args.tiles,
        parts=parts,
    )


def check_price(option: str, usd_per_hour: float) -> float:
    """A price as it may be: 0 for a card of one's own.

    Raises:
        SettingError: it is negative or no number.
    """
    return _finite(option, usd_per_hour, "USD an hour")


def bytes_of_vram(gib: float | None, name: str, memory_bytes: int) -> int:
    """The part of a card that an estimate may take; all of it where none is named.

    Raises:
        SettingError: it is not positive, or more than the card has.
    """
    if gib is None:
        return memory_bytes
    if not math.isfinite(gib) or gib <= 0 or gib * GIB > memory_bytes:
        raise SettingError(
            f"--vram {gib:g}: {name} shows {memory_bytes / GIB:.2f} GiB to programs, so give more "
            "than 0 and at most that, or describe another card in a file for --cards."
        )
    return round(gib * GIB)


def _finite(option: str, value: float, unit: str) -> float:
    if not math.isfinite(value) or value < 0:
        raise SettingError(f"{option} must be at least 0 {unit}, got {value:g}.")
    return value


def _size(text: str) -> tuple[int, int]:
    width, cross, height = text.lower().partition("x")
    if cross and all(side.isdecimal() and len(side) < 7 for side in (width, height)):
        return int(width), int(height)
    raise SettingError(f"--size {text!r} must be WIDTHxHEIGHT in pixels, such as 1328x1328.")


def _cfg(text: str) -> str:
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
