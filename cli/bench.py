"""`qwen-l40s bench`: this package beside its peers, on the machine at hand."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingError, UnavailableError
from ..hosts.diffusers.settings import SIZE_STEP
from ..planning.work import FULL_SIZE, SMALL, Inputs
from .bench_rows import BLOCK, FORWARD, IMAGE, Row, select, select_names
from .images import check_target
from .packages import require_packages

if TYPE_CHECKING:
    from .bench_run import Setup

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


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    parser = subparsers.add_parser(
        "bench",
        parents=[common],
        help="time this package beside ComfyUI, diffusers and comfy-kitchen",
        description="Times ours and the peers in one process, with the same random weights and "
        "inputs: no model is needed. What is not installed is left out. Exit code 1 when a row "
        "failed.",
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
    parser.set_defaults(run=run)


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
    from .bench_conditions import by_reason, conditions, runnable
    from .bench_report import Report
    from .bench_run import run_block, run_forward, run_image, run_ops

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
    from . import bench_calibrate

    bench_calibrate.check(args)
    _check_width(args.width)
    if args.json:
        check_target("--json", args.json)
    require_packages("bench", ["torch"])
    return bench_calibrate.run(args, _device(args.device, "--calibrate --device cpu --width small"))


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
    from ..optimizations.measure_forward import Repeats
    from .bench_run import Setup

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

    from ..hosts.diffusers.device import choose_device

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
    from ..optimizations.op_cases import op_cases

    cases = op_cases(setup.shape, setup.inputs[0], setup.device)
    return select_names([case.name for case in cases], only)


def _ceilings(setup: Setup) -> tuple[dict[str, float], dict[str, str]]:
    import torch

    from ..optimizations.ceilings import measure_ceilings

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
