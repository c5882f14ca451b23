"""`qwen-l40s bench`: measures this card for estimates, or calls the repository's benchmarks."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from ..errors import SettingError, UnavailableError, plain_write_errors
from ..families.qwen_image import FULL_SIZE, SMALL
from ..files import check_target, check_writable, write_whole
from ..machine.store import CALIBRATION, Calibration, cache_folder, known_cards, with_calibration
from ..planning.cards import Card, find_card
from ..planning.rates import Rates, rates_of
from ..spec.transformer import PIXELS_PER_TOKEN_SIDE as SIZE_STEP
from .output import parse_size, require_packages

# Not by its import name: an editable install beside a wheel would find its own.
BENCHMARKS = Path(__file__).resolve().parents[1] / "bench" / "__init__.py"
MOST_REFERENCES = 3  # of Edit-2511
WHAT = {
    "ops": "each operation of a block, through everything that computes it",
    "forward": "one forward pass of the transformer",
    "image": "from prompt to file in ComfyUI servers, with the GPU's memory",
}
# Options of WHAT, whose sizes --calibrate fixes.
FOREIGN = ("size", "references", "layers", "only", "repeats", "models", "family", "free_gib")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Times this package, ComfyUI and diffusers in one process with the same random weights; "
        "needs no model, and leaves out packages that are not installed. Runs from a clone; "
        "--calibrate runs everywhere. Exit code 1 if a row failed."
    )
    parser.add_argument(
        "what",
        nargs="?",
        choices=tuple(WHAT),
        metavar="WHAT",
        help="; ".join(f"{name}: {text}" for name, text in WHAT.items()),
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure this GPU for `qwen-l40s estimate` instead, in under a minute",
    )
    parser.add_argument(
        "--size",
        type=_size,
        action="append",
        metavar="WxH",
        help="pixels; repeat it for more; default: 1024x1024",
    )
    parser.add_argument(
        "--batch",
        type=_positive,
        default=1,
        metavar="N",
        help="images in one forward pass; default: 1",
    )
    parser.add_argument(
        "--text", type=_positive, default=200, metavar="N", help="text tokens; default: 200"
    )
    parser.add_argument(
        "--references",
        type=int,
        choices=range(MOST_REFERENCES + 1),
        default=0,
        metavar="N",
        help="reference images of 1024x1024, as in edits; default: 0",
    )
    parser.add_argument("--family", choices=("1.x", "2.1"), help="of `image`; default: 1.x")
    parser.add_argument("--layers", type=_positive, metavar="N", help="blocks; default: 60")
    parser.add_argument(
        "--width",
        choices=("full", "small"),
        default="full",
        help="full (3072) or small (128, for a CPU)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="only these rows, by name or pattern, such as 'ours bf16' 'comfyui *'",
    )
    parser.add_argument("--repeats", type=_positive, metavar="N", help="number of measured calls")
    parser.add_argument(
        "--steps", type=_positive, default=20, metavar="N", help="steps of `image`; default: 20"
    )
    parser.add_argument(
        "--models",
        metavar="FOLDER",
        help="of `image`: for random models of 33 to 78 GB that are written here once",
    )
    parser.add_argument(
        "--free-gib",
        type=float,
        metavar="N",
        help="of `image`: leave only N GiB of VRAM free; 44.4 imitates an L40S",
    )
    parser.add_argument(
        "--device", default="auto", metavar="NAME", help="auto (default), cpu, cuda or cuda:N"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results as JSON")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def _size(text: str) -> tuple[int, int]:
    sides = parse_size(text)
    nearest = [max(SIZE_STEP, SIZE_STEP * round(side / SIZE_STEP)) for side in sides]
    if nearest != [*sides]:
        raise argparse.ArgumentTypeError(
            f"{text}: both sides must be divisible by {SIZE_STEP}: use "
            f"{'x'.join(map(str, nearest))}"
        )
    return sides


def run(args: argparse.Namespace) -> int:
    if args.calibrate:
        return calibrate_card(args)
    if args.what is None:
        raise SettingError(
            f"bench measures nothing: name one of {', '.join(WHAT)}, or --calibrate."
        )
    if not BENCHMARKS.is_file():
        raise UnavailableError(
            f"bench {args.what} is not in the installed package: run `python FOLDER bench "
            f"{args.what}` with the FOLDER of a clone of the repository."
        )
    require_packages("bench", ["torch", *(["psutil"] if args.device == "cpu" else [])])
    from ..bench.command import run as run_benchmark

    return run_benchmark(args)


def _check_alone(args: argparse.Namespace) -> None:
    if args.what:
        raise SettingError(
            f"bench {args.what} and --calibrate are two measurements: leave one of them out."
        )
    given = next((name for name in FOREIGN if getattr(args, name)), None)
    if given:
        option = f"--{given.replace('_', '-')}"
        raise SettingError(
            f"{option} cannot be used with --calibrate, whose sizes are fixed: leave it out."
        )


def calibrate_card(args: argparse.Namespace) -> int:
    """Measures the card's rates, prints and keeps them; a CPU's are printed only."""
    _check_alone(args)
    if args.json:
        check_target("--json", args.json)
    require_packages("bench", ["torch"])
    from ..machine.device import card_to_measure

    device = card_to_measure(args.device, "--calibrate --device cpu --width small")
    from ..measure.calibrate import calibrate, full_sizes, small_sizes

    on_card, small = device.type == "cuda", args.width == "small"
    if not on_card and not small:
        raise UnavailableError(
            "bench --calibrate at full width takes hours on a CPU: add --width small, which only "
            "shows that the command works."
        )
    file = cache_folder() / CALIBRATION
    if on_card and not small:
        with plain_write_errors(file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
        check_writable(file.parent)  # before minutes of measuring
    sizes = small_sizes(SMALL) if small else full_sizes(FULL_SIZE)
    begin = time.perf_counter()
    found, left_out = calibrate(device, sizes, lambda what: print(f"measuring: {what}", flush=True))
    print(f"{found.card}, torch {found.torch}, {time.perf_counter() - begin:.0f} s")
    print("\n".join(table(found, _known(found.card))))
    for precision, reason in left_out.items():
        print(f"{precision} left out: {reason}")
    if on_card and not small:
        write_whole(file, with_calibration(file.parent, found).encode())
        print(f"saved in {file}: estimates for this GPU use it")
    else:
        print("This only shows that the command works: nothing is saved.")
    if args.json:
        write_whole(Path(args.json), json.dumps(found.as_dict(), indent=1).encode() + b"\n")
    print(json.dumps(found.as_dict()))
    return 0


def table(found: Calibration, card: Card | None) -> list[str]:
    """Makes a Markdown table of measured and, of a card that is listed, predicted rates."""
    slow, fast = map(_figures, rates_of(card)[:2]) if card else ({}, {})
    about = f"{found.card}, driver {found.driver}, torch {found.torch}, {found.date[:10]}"
    lines = [
        "To paste into an issue:",
        f"| {about} | measured | predicted | off |",
        "|---|---|---|---|",
    ]
    for name, own in _figures(found.rates).items():
        span = off = ""
        if name in slow:
            low, high = (f"{each[name]:.4g}" for each in (slow, fast))
            span = low if low == high else f"{low} to {high}"
            off = f"{2 * own / (slow[name] + fast[name]) - 1:+.0%}"
        lines.append(f"| {name} | {own:.4g} | {span} | {off} |")
    return lines


def _figures(rates: Rates) -> dict[str, float]:
    found = {f"{name} products": rate for name, rate in rates.gemm.items()}
    found |= {"attention": rates.attention, "VAE": rates.convolution, "text encoder": rates.encoder}
    figures = {f"{name}, TFLOP/s": rate / 1e12 for name, rate in found.items()}
    figures |= {"memory, GB/s": rates.bandwidth / 1e9, "link, GB/s": rates.pcie / 1e9}
    seconds = {f"{name} block": rates.launches.block[name] for name in rates.gemm}
    seconds["CUDA graph"] = rates.launches.graph
    return figures | {f"CPU, {name}, ms": 1e3 * each for name, each in seconds.items()}


def _known(name: str) -> Card | None:
    try:
        return find_card(name, known_cards())
    except SettingError:  # a card that nobody has listed, or a damaged list of the user's own
        return None
