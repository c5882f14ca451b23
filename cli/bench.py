"""`qwen-l40s bench`: this package beside its peers, on the machine at hand."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench.rows import BLOCK, FORWARD, IMAGE, Row, select, select_names
from ..errors import SettingError, UnavailableError, plain_write_errors
from ..hosts.diffusers.settings import SIZE_STEP
from ..machine.card_list import known_cards
from ..machine.store import CALIBRATION, Calibration, cache_folder, with_calibration
from ..planning.cards import Card, find_card
from ..planning.rates import PRECISIONS
from ..planning.work import Inputs
from ..spec import FULL_SIZE, SMALL
from .output import check_target, require_packages, write_whole

if TYPE_CHECKING:
    from ..bench.rows import Setup

SHAPES = {"full": FULL_SIZE, "small": SMALL}
ROWS = {"forward": FORWARD, "block": BLOCK, "image": IMAGE, "ops": ()}
WHAT = {
    "ops": "each operation of a block: ours, torch's and comfy-kitchen's",
    "block": "what one block costs",
    "forward": "one forward pass of the transformer",
    "image": "a whole image: sampling and VAE",
}
# Of the published models; and so many that a block's share shows beside what is not in blocks.
MOST_LAYERS, LAYERS_OF_BLOCK = 60, 9
REPEATS = {"ops": 20, "block": 8, "forward": 8, "image": 2}
WARM_UP = {"ops": 3, "block": 2, "forward": 2, "image": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Times ours and the peers in one process, with the same random weights and "
        "inputs: no model is needed. What is not installed is left out. Exit code 1 when a row "
        "failed."
    )
    parser.add_argument(
        "what",
        nargs="?",
        choices=WHAT,
        metavar="WHAT",
        help="; ".join(f"{name}: {text}" for name, text in WHAT.items()),
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure this card for `qwen-l40s estimate` instead, in under a minute",
    )
    parser.add_argument(
        "--size",
        action="append",
        metavar="WxH",
        help="pixels, may stand several times; default 1024x1024",
    )
    parser.add_argument("--batch", type=int, default=1, help="images in one pass, default 1")
    parser.add_argument("--text", type=int, default=200, help="text tokens, default 200")
    parser.add_argument(
        "--references",
        type=int,
        default=0,
        metavar="N",
        help="reference images of 1024x1024, at timestep zero as in Edit-2511; default 0",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="blocks, default 60, for `block` 9")
    parser.add_argument(
        "--width", default="full", help="full (3072) or small (128, to try it on a CPU)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="rows to measure, by name or pattern, such as 'ours bf16' 'comfyui *'",
    )
    parser.add_argument("--repeats", type=int, metavar="N", help="calls that count")
    parser.add_argument("--warm-up", type=int, metavar="N", help="calls before them")
    parser.add_argument("--steps", type=int, default=20, help="of an image, default 20")
    parser.add_argument(
        "--profile", action="store_true", help="list the longest kernels; not of images"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    parser.add_argument("--plot", metavar="FILE", help="draw them, as .png")


def run(args: argparse.Namespace) -> int:
    """Measures and prints.

    Returns:
        0, or 1 when a row failed.
    """
    if args.calibrate:
        return _calibrate(args)
    if args.what is None:
        raise SettingError(f"bench needs WHAT, {', '.join(WHAT)}, or --calibrate.")
    setup = _setup(args)
    from ..bench.report import Report, by_reason, conditions, runnable
    from ..bench.rows import run_block, run_forward, run_image, run_ops

    names = _op_names(setup, args.only) if args.what == "ops" else ()
    rows, left_out, comfyui = runnable(setup.rows, setup.shape, setup.inputs, setup.device)
    if left_out:
        if not rows:
            raise UnavailableError(f"nothing can be measured here: {by_reason(left_out)}")
        print(f"Left out: {by_reason(left_out)}.")
    about = {"what": args.what, **conditions(setup.device, comfyui)}
    about |= _asked(args, setup)
    about["ceilings"], about["no_ceilings"] = _ceilings(setup)
    about["left_out"] = left_out
    _print_conditions(about, setup)
    report = Report(about, Path(args.json) if args.json else None, args.profile)
    setup = replace(setup, rows=rows)
    if args.what == "ops":
        run_ops(setup, names, report.take)
    else:
        {"forward": run_forward, "block": run_block, "image": run_image}[args.what](
            setup, report.take
        )
    report.finish(Path(args.plot) if args.plot else None)
    return 1 if report.failed else 0


def _calibrate(args: argparse.Namespace) -> int:

    check(args)
    _check_width(args.width)
    if args.json:
        check_target("--json", args.json)
    require_packages("bench", ["torch"])
    return bench_calibrate_run(args, _device(args.device, "--calibrate --device cpu --width small"))


def _setup(args: argparse.Namespace) -> Setup:
    """Everything that can be wrong is found here, before anything is built.

    Raises:
        SettingError: an argument breaks its rule.
        UnavailableError: a package or a card is missing, or a file cannot be written.
    """
    _check_width(args.width)
    least = 2 if args.what == "block" else 1
    layers = args.layers
    if layers is None:
        layers = LAYERS_OF_BLOCK if args.what == "block" else MOST_LAYERS
    if not least <= layers <= MOST_LAYERS:
        raise SettingError(
            f"--layers must be {least} to {MOST_LAYERS}, which the published models have, got "
            f"{layers}."
        )
    for name, value, lowest in (
        ("batch", args.batch, 1),
        ("text", args.text, 1),
        ("references", args.references, 0),
        ("repeats", args.repeats, 1),
        ("warm-up", args.warm_up, 1),
        ("steps", args.steps, 1),
    ):
        if value is not None and value < lowest:
            raise SettingError(f"--{name} must be at least {lowest}, got {value}.")
    sizes = [_size(text) for text in args.size or ["1024x1024"]]
    inputs = tuple(
        Inputs(width, height, args.batch, args.text, args.references)
        for width, height in dict.fromkeys(sizes)
    )
    rows: tuple[Row, ...] = ()
    if args.what != "ops":
        rows = select(ROWS[args.what], args.only)
    for name in ("json", "plot"):
        if getattr(args, name):
            check_target(f"--{name}", getattr(args, name))
    if args.plot and not args.plot.lower().endswith(".png"):
        raise SettingError(f"--plot {args.plot!r} must end in .png.")
    more = {"psutil": args.device == "cpu", "PIL": bool(args.plot)}
    require_packages("bench", ["torch", *(name for name, wanted in more.items() if wanted)])
    from ..bench.forward import Repeats
    from ..bench.rows import Setup

    return Setup(
        device=_device(args.device, "--device cpu --width small --layers 1"),
        shape=replace(SHAPES[args.width], blocks=layers),
        rows=rows,
        inputs=inputs,
        repeats=Repeats(
            args.warm_up or WARM_UP[args.what], args.repeats or REPEATS[args.what], args.profile
        ),
        steps=args.steps,
        debug=args.debug,
    )


def _size(text: str) -> tuple[int, int]:
    width, cross, height = text.lower().partition("x")
    if cross and width.isdecimal() and height.isdecimal():
        sides = int(width), int(height)
        if all(side >= SIZE_STEP and side % SIZE_STEP == 0 for side in sides):
            return sides
        nearest = (max(SIZE_STEP, SIZE_STEP * round(side / SIZE_STEP)) for side in sides)
        raise SettingError(
            f"--size {text}: both sides must be divisible by {SIZE_STEP}: use "
            f"{'x'.join(map(str, nearest))}."
        )
    raise SettingError(f"--size {text!r} must be WIDTHxHEIGHT in pixels, such as 1024x1024.")


def _check_width(name: str) -> None:
    if name not in SHAPES:
        raise SettingError(f"--width {name!r} is unknown: choose {' or '.join(SHAPES)}.")


def _device(name: str, small: str) -> Any:
    """A torch.device; `small` are the arguments by which it can be tried on a CPU."""
    import torch

    from ..machine.device import choose_device

    chosen = choose_device(name)
    if chosen == "cpu" and name == "auto":
        raise UnavailableError(
            "bench measures a CUDA card and torch sees none: see `qwen-l40s doctor`, or try it "
            f"with {small}."
        )
    device = torch.device(chosen)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # which is the one that ComfyUI takes
    return device


def _op_names(setup: Setup, only: list[str]) -> tuple[str, ...]:
    from ..bench.ops import op_cases

    cases = op_cases(setup.shape, setup.inputs[0], setup.device)
    return select_names([case.name for case in cases], only)


def _ceilings(setup: Setup) -> tuple[dict[str, float], dict[str, str]]:
    import torch

    from ..bench.ops import measure_ceilings

    with torch.inference_mode():
        return measure_ceilings(setup.device)


def _asked(args: argparse.Namespace, setup: Setup) -> dict[str, Any]:
    """What the command line settled."""
    first, shape = setup.inputs[0], setup.shape
    return {
        "layers": None if args.what == "ops" else shape.blocks,
        "dim": shape.dim,
        "text_tokens": first.text,
        "references": first.references,
        "warm_up": setup.repeats.warmup,
        "repeats": setup.repeats.repeats,
        "weights": "random",
    }


def _print_conditions(about: dict[str, Any], setup: Setup) -> None:
    software = ", ".join(f"{name} {found}" for name, found in about["software"].items())
    print(f"{about['card']}; {software}")
    if setup.device.type == "cpu":
        print("These are CPU figures: they show that the command works, not what a card does.")
    figures = ", ".join(f"{name} {value:.3g}" for name, value in about["ceilings"].items())
    print(f"ceilings measured here: {figures}")


# `qwen-l40s bench --calibrate`: measures this card, and keeps what estimates for it then use.

# Options of the other measurements, which mean nothing here.
FOREIGN = ("size", "references", "layers", "only", "repeats", "warm_up", "profile", "plot")


def check(args: argparse.Namespace) -> None:
    """Raises SettingError: `--calibrate` stands beside what it does not go with."""
    if args.what:
        raise SettingError(
            f"bench {args.what} and --calibrate are two measurements: leave one of them out."
        )
    given = next((name for name in FOREIGN if getattr(args, name)), None)
    if given:
        option = f"--{given.replace('_', '-')}"
        raise SettingError(f"{option} and --calibrate, whose sizes are fixed: leave {option} out.")


def bench_calibrate_run(args: argparse.Namespace, device: Any) -> int:
    """Measures, prints and keeps the result.

    Args:
        device: a torch.device; the CPU's figures are printed only.

    Returns:
        0.

    Raises:
        UnavailableError: the fused blocks do not run on the card, it is full, or a file cannot be
            written.
    """
    from ..measure.calibrate import calibrate, full_sizes, small_sizes
    from ..spec import FULL_SIZE, SMALL

    on_card, small = device.type == "cuda", args.width == "small"
    if not on_card and not small:
        raise UnavailableError(
            "bench --calibrate at full width takes hours on a CPU: add --width small, which only "
            "shows that it runs."
        )
    sizes = small_sizes(SMALL) if small else full_sizes(FULL_SIZE)
    begin = time.perf_counter()
    found, left_out = calibrate(device, sizes, lambda what: print(f"measuring: {what}", flush=True))
    print(f"{found.card}, torch {found.torch}, {time.perf_counter() - begin:.0f} s")
    print("\n".join(table(found, _known(found.card))))
    for precision, reason in left_out.items():
        print(f"{precision} left out: {reason}")
    if on_card and not small:
        print(f"kept in {_keep(found)}: estimates for this card use it")
    else:
        print("These only show that the command works: nothing was kept.")
    if args.json:
        write_whole(Path(args.json), json.dumps(found.as_dict(), indent=1).encode() + b"\n")
    print(json.dumps(found.as_dict()))
    return 0


def table(found: Calibration, card: Card | None) -> list[str]:
    """One line for each rate, with its share of the card's dense peak where that is known."""
    rates = found.rates
    peaks = card.dense_flops if card else {}
    rows = [
        (f"{name} products", rates.gemm[name], peaks.get(name))
        for name in PRECISIONS
        if name in rates.gemm
    ]
    rows += [
        ("attention, bf16", rates.attention, peaks.get("bf16")),
        ("VAE convolutions, bf16", rates.convolution, peaks.get("bf16")),
        ("text encoder, fp32", rates.encoder, peaks.get("fp32")),
    ]
    lines = [f"{'':24}{'TFLOP/s':>9}{'of peak':>9}"]
    lines += [_line(name, rate / 1e12, rate, peak) for name, rate, peak in rows]
    lines.append(f"{'':24}{'GB/s':>9}{'of peak':>9}")
    for name, rate, peak in (
        ("memory, fused norm", rates.bandwidth, card and card.bandwidth),
        ("host to card, pinned", rates.pcie, card and card.pcie_bytes_per_second),
    ):
        lines.append(_line(name, rate / 1e9, rate, peak))
    return lines


def _line(name: str, shown: float, rate: float, peak: float | None) -> str:
    return f"{name:24}{shown:9.4g}" + (f"{rate / peak:9.0%}" if peak else "")


def _known(name: str) -> Card | None:
    try:
        return find_card(name, known_cards())
    except SettingError:  # a card that nobody has listed, or a damaged list of the user's own
        return None


def _keep(found: Calibration) -> Path:
    folder = cache_folder()
    with plain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / CALIBRATION, with_calibration(folder, found).encode())
    return folder / CALIBRATION
