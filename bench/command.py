"""`qwen-l40s bench WHAT`: checks what was asked, finds out what can run here, and runs it."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .. import __version__
from ..cli.bench import SHAPES, check_width, torch_device
from ..cli.output import check_target, require_packages
from ..errors import SettingError, UnavailableError
from ..hosts.comfyui.contract import unsupported_host
from ..hosts.diffusers.settings import SIZE_STEP
from ..machine import packages
from ..machine.card import first_line, read_cards
from ..machine.comfyui import check_comfyui, find_comfyui
from ..planning.bytes import step_bytes, weight_bytes
from ..planning.request import NEWEST_EDIT, Parts, RunRequest, Setting
from ..spec.formats import format_gib
from ..spec.transformer import TransformerShape
from .inputs import Inputs
from .rows import BLOCK, COMFYUI, DIFFUSERS, FORWARD, IMAGE, BenchSetup, Row, select, select_names

ROWS = {"forward": FORWARD, "block": BLOCK, "image": IMAGE, "ops": ()}
# Of the published models; and enough that a block's share shows next to what is not in blocks.
MOST_LAYERS, LAYERS_OF_BLOCK = 60, 9
REPEATS = {"ops": 20, "block": 8, "forward": 8, "image": 2, "prompt": 10}
WARM_UP = {"ops": 3, "block": 2, "forward": 2, "image": 1}
PACKAGES = ("triton", "comfy-kitchen", "diffusers")


def run(args: argparse.Namespace) -> int:
    """Measures and prints.

    Args:
        args: of cli/bench.py's parser, with `what`.

    Returns:
        0, or 1 when a row failed.
    """
    setup = _setup(args)
    import torch

    from .ops import measure_ceilings, op_cases
    from .prompt import run_prompts
    from .report import Report
    from .rows import run_block, run_forward, run_image, run_ops

    if args.what == "ops":
        cases = op_cases(setup.shape, setup.inputs[0], setup.device)
        names = select_names([case.name for case in cases], args.only)
    rows, left_out, comfyui = runnable(setup.rows, setup.shape, setup.inputs, setup.device)
    if left_out:
        if not rows:
            raise UnavailableError(f"nothing can be measured here: {by_reason(left_out)}")
        print(f"Left out: {by_reason(left_out)}.")
    what = "prompt" if args.models else args.what
    about = {"what": what, **conditions(setup.device, comfyui), **_asked(args, setup)}
    with torch.inference_mode():
        about["ceilings"], about["no_ceilings"] = measure_ceilings(setup.device)
    about["left_out"] = left_out
    _print_conditions(about, setup)
    report = Report(about, Path(args.json) if args.json else None, args.profile)
    setup = replace(setup, rows=rows)
    if args.what == "ops":
        run_ops(setup, names, report.take)
    else:
        measure = {"forward": run_forward, "block": run_block, "image": run_image}
        measure |= {"prompt": partial(run_prompts, models=Path(args.models or ""))}
        measure[what](setup, take=report.take)
    report.finish(Path(args.plot) if args.plot else None)
    return 1 if report.failed else 0


def _setup(args: argparse.Namespace) -> BenchSetup:
    """Finds everything that can be wrong before anything is built.

    Raises:
        SettingError: an argument breaks its rule.
        UnavailableError: a package or a card is missing, or a file cannot be written.
    """
    check_width(args.width)
    least = 2 if args.what == "block" else 1
    if args.models and (args.what != "image" or args.references):
        raise SettingError("--models goes with `image` alone, and without --references.")
    layers = args.layers
    if layers is None:
        layers = LAYERS_OF_BLOCK if args.what == "block" else MOST_LAYERS
    if not least <= layers <= MOST_LAYERS:
        raise SettingError(
            f"--layers must be {least} to {MOST_LAYERS}, which the published models have, got "
            f"{layers}."
        )
    for name, lowest in (
        *(("batch", 1), ("text", 1), ("references", 0)),
        *(("repeats", 1), ("warm_up", 1), ("steps", 1)),
    ):
        value = getattr(args, name)
        if value is not None and value < lowest:
            option = name.replace("_", "-")
            raise SettingError(f"--{option} must be at least {lowest}, got {value}.")
    sizes = [_size(text) for text in args.size or ["1024x1024"]]
    inputs = tuple(
        Inputs(width, height, args.batch, args.text, args.references)
        for width, height in dict.fromkeys(sizes)
    )
    rows = select(ROWS[args.what], args.only) if args.what != "ops" else ()
    for name in ("json", "plot"):
        if getattr(args, name):
            check_target(f"--{name}", getattr(args, name))
    if args.plot and not args.plot.lower().endswith(".png"):
        raise SettingError(f"--plot {args.plot!r} must end in .png.")
    more = {"psutil": args.device == "cpu", "PIL": bool(args.plot), "numpy": bool(args.plot)}
    require_packages("bench", ["torch", *(name for name, wanted in more.items() if wanted)])
    from .forward import Repeats

    return BenchSetup(
        device=torch_device(args.device, "--device cpu --width small --layers 1"),
        shape=replace(SHAPES[args.width], blocks=layers),
        rows=rows,
        inputs=inputs,
        repeats=Repeats(
            args.warm_up or WARM_UP[args.what],
            args.repeats or REPEATS["prompt" if args.models else args.what],
            args.profile,
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


def runnable(
    rows: Sequence[Row], shape: TransformerShape, inputs: Sequence[Inputs], device: Any
) -> tuple[tuple[Row, ...], dict[str, str], str]:
    """Sorts out what can run.

    Returns:
        The rows that can.
        {name: reason} of the others.
        ComfyUI's version, empty where it is not needed or not there.
    """
    left_out: dict[str, str] = {}
    comfyui = ""
    reasons = {}
    for host in {row.host for row in rows}:
        try:
            found = _import_host(host, device)
            comfyui = found if host == COMFYUI else comfyui
        except UnavailableError as error:
            reasons[host] = str(error)
    from ..machine.device import available_bytes

    free = available_bytes(str(device))
    for row in rows:
        needed = needed_bytes(row, shape, inputs)
        if row.host in reasons:
            left_out[row.name] = reasons[row.host]
        elif row.needs_card and device.type != "cuda":
            left_out[row.name] = "needs an NVIDIA card"
        elif needed > free:
            left_out[row.name] = f"needs {format_gib(needed)} and {format_gib(free)} are free"
    return tuple(row for row in rows if row.name not in left_out), left_out, comfyui


# How many times our blocks' activations other programs take: 1.1 GiB of ComfyUI's fp8 at 1024x1024
# against 0.23 (H200).
OTHERS = 5


def needed_bytes(row: Row, shape: TransformerShape, inputs: Sequence[Inputs]) -> int:
    """Weights and the activations of the largest forward pass."""
    activations = (
        step_bytes(
            RunRequest(
                family=NEWEST_EDIT,
                width=each.width,
                height=each.height,
                batch=each.batch,
                text_tokens=each.text,
                references=each.references,
                parts=Parts(transformer=shape),
            ),
            Setting(),
        ).most
        for each in inputs
    )
    return weight_bytes(shape, row.precision).total + OTHERS * max(activations)


def by_reason(left_out: dict[str, str]) -> str:
    """One line: the rows that are left out, by reason."""
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(each)} ({reason})" for reason, each in names.items())


def conditions(device: Any, comfyui: str) -> dict[str, Any]:
    """Card and software."""
    import torch

    cards = read_cards(torch) if device.type == "cuda" else None
    card = cards.usable[device.index or 0] if cards else None
    software = {
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
    }
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            software[name] = version(name)
    if comfyui:
        software["ComfyUI"] = comfyui
    return {
        "card": card.name if card else "CPU",
        "sm": list(card.sm) if card else None,
        "driver": cards.driver if cards else "",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "qwen_l40s": __version__,
        "software": software,
    }


def _import_host(host: str, device: Any) -> str:
    """Imports a host; ComfyUI's version, else an empty text.

    Raises:
        UnavailableError: it cannot be imported.
    """
    # Packages greet on stdout when imported; the last line there has to be ours.
    with contextlib.redirect_stdout(sys.stderr):
        if host == COMFYUI:
            return import_comfyui(cpu=device.type == "cpu")
        package = next(each for each in packages.STANDALONE if each.distribution == DIFFUSERS)
        # Not its pipelines, which import transformers too.
        needed = replace(package, needs="QwenImageTransformer2DModel")
        capability, _ = packages.check_package(needed)
        if not capability.usable:
            raise UnavailableError(f"{capability.name} {capability.reason}")
        return ""


def import_comfyui(*, cpu: bool, keep_on_card: bool = True) -> str:
    """Imports ComfyUI as a library: one that is importable already, else the one `doctor` finds.

    As a library it has no dynamic VRAM and reads no command line.

    Args:
        cpu: Whether it runs on the processor.
        keep_on_card: Whether models stay where they are (its `--highvram`), which changes no
            computation.

    Returns:
        Its version.

    Raises:
        UnavailableError: There is none, it is too old, or a package is missing that it imports.
    """
    started = "comfy.model_management" in sys.modules
    added = None
    if not started and not _importable("comfy.model_management"):
        folder = find_comfyui()
        found = check_comfyui(folder)
        if not found.usable:
            raise UnavailableError(f"ComfyUI: {found.reason}; {found.remedy}")
        added = str(Path(folder).resolve())
        sys.path.insert(0, added)
    try:
        if not started:
            arguments = importlib.import_module("comfy.cli_args").args
            arguments.cpu, arguments.highvram = cpu, keep_on_card and not cpu
        importlib.import_module("comfy.sample")  # imports all that a run needs
        found_version = str(importlib.import_module("comfyui_version").__version__)
    except (ImportError, RuntimeError) as error:
        if added:
            sys.path.remove(added)
        raise UnavailableError(
            f"ComfyUI cannot be imported here ({first_line(error)}): use its own Python"
        ) from error
    if fallback := unsupported_host():
        raise UnavailableError(fallback.reason)
    return found_version


def _importable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:
        return False


def _asked(args: argparse.Namespace, setup: BenchSetup) -> dict[str, Any]:
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


def _print_conditions(about: dict[str, Any], setup: BenchSetup) -> None:
    software = ", ".join(f"{name} {found}" for name, found in about["software"].items())
    print(f"{about['card']}; {software}")
    if setup.device.type == "cpu":
        print("These are CPU figures: they show that the command works, not what a card does.")
    figures = ", ".join(f"{name} {value:.3g}" for name, value in about["ceilings"].items())
    print(f"ceilings measured here: {figures}")
