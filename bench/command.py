"""`qwen-l40s bench WHAT`: checks what was asked, finds out what can run here, and runs it."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import SettingError, UnavailableError
from ..families.qwen_image import FULL_SIZE, SMALL
from ..files import check_target
from ..hosts.comfyui.contract import unsupported_host
from ..machine.card import read_cards
from ..machine.packages import STANDALONE, check_comfyui, check_package
from ..planning.bytes import weight_bytes
from ..spec.formats import format_gib
from ..verdict import first_line
from ..version import __version__
from .rows import COMFYUI, DIFFUSERS, FORWARD, IMAGE, BenchSetup, Inputs, Row, published, select
from .server import comfyui_folder

ROWS = {"forward": FORWARD, "image": IMAGE, "ops": ()}
MOST_LAYERS = 60  # of the published models
REPEATS = {"ops": 20, "forward": 8, "image": 10}
PACKAGES = ("triton", "comfy-kitchen", "diffusers")
ROOT = Path(__file__).resolve().parent.parent


def run(args: argparse.Namespace) -> int:
    """Measures and prints what cli/bench.py's parser took; 0, or 1 when a row failed."""
    setup = _setup(args)
    from .measure import RowWriter

    left_out: dict[str, Any] = {}
    comfyui = ""
    if args.what != "ops":
        rows, left_out, comfyui = runnable(setup)
        if not rows:
            raise UnavailableError(f"nothing can be measured here: {_listed(left_out)}")
        setup = replace(setup, rows=rows)
    about = {
        "what": args.what,
        **conditions(setup.device, comfyui),
        "layers": None if args.what == "ops" else setup.shape.blocks,
        "dim": setup.shape.dim,
        "text_tokens": args.text,
        "references": args.references,
        "steps": args.steps if args.what == "image" else None,
        "free_gib": args.free_gib,
        "repeats": setup.repeats,
        "weights": "random",
        "left_out": left_out,
    }
    if left_out:
        print(f"Left out: {_listed(left_out)}.")
    software = ", ".join(f"{name} {found}" for name, found in about["software"].items())
    print(f"{about['card']}; {software}")
    if setup.device.type == "cpu":
        print("These are CPU figures: they show that the command works, not what a card does.")
    writer = RowWriter(about, Path(args.json) if args.json else None)
    if args.what == "image":
        from .prompt import run_prompts as measure
    elif args.what == "ops":
        from .ops import run_ops as measure
    else:
        from .forward import run_forward as measure
    measure(setup, writer.add)
    print(json.dumps(writer.results()), flush=True)
    return 1 if any("error" in row for row in writer.rows) else 0


def _setup(args: argparse.Namespace) -> BenchSetup:
    image = args.what == "image"
    for option in ("models", "free_gib", "family") if not image else ():
        if getattr(args, option):
            raise SettingError(f"--{option.replace('_', '-')} is only for `image`: leave it out.")
    layers = MOST_LAYERS if args.layers is None else args.layers
    if layers > MOST_LAYERS:
        raise SettingError(
            f"--layers is {layers}, but the published models have {MOST_LAYERS}: use "
            f"{MOST_LAYERS} or fewer."
        )
    sizes = dict.fromkeys(args.size or [(1024, 1024)])
    rows = ROWS[args.what]
    names = select([row.name for row in rows], args.only) if rows else ()
    if args.json:
        check_target("--json", args.json)
    from ..machine.device import card_to_measure

    device = card_to_measure(args.device, "--device cpu --width small --layers 1")
    if image and device.type == "cuda" and not args.models:
        raise SettingError(
            "bench image times prompts in ComfyUI servers: name a folder for random models "
            "of up to 78 GB with --models."
        )
    if image and device.type == "cpu" and (args.references or args.family):
        raise SettingError(
            "--references and --family need a GPU, because the bundled model for the CPU takes no "
            "images: leave them out."
        )
    if args.free_gib is not None and (device.type == "cpu" or not args.free_gib >= 1):
        raise SettingError("--free-gib needs a GPU and a value of at least 1.")
    shape = replace(SMALL if args.width == "small" else FULL_SIZE, blocks=layers)
    inputs = tuple(
        Inputs(width, height, args.batch, args.text, args.references) for width, height in sizes
    )
    if not rows:
        from .ops import op_cases

        names = select([case.name for case in op_cases(shape, inputs[0], device)], args.only)
    return BenchSetup(
        device=device,
        shape=shape,
        rows=tuple(row for row in rows if row.name in names),
        names=names,
        files=published(args.family),
        inputs=inputs,
        repeats=args.repeats or REPEATS[args.what],
        steps=args.steps,
        debug=args.debug,
        models=Path(args.models) if args.models else None,
        free_gib=args.free_gib,
    )


def runnable(setup: BenchSetup) -> tuple[tuple[Row, ...], dict[str, str], str]:
    """Returns the rows that can run, {name: reason} of the others, and ComfyUI's version."""
    from ..machine.device import available_bytes

    left_out: dict[str, str] = {}
    reasons: dict[str, str] = {}
    comfyui, hosts = "", {row.host for row in setup.rows}
    # Packages greet on stdout when imported; the last line there has to be ours.
    with contextlib.redirect_stdout(sys.stderr):
        if COMFYUI in hosts:
            try:
                comfyui = import_comfyui(cpu=setup.device.type == "cpu")
            except UnavailableError as error:
                reasons[COMFYUI] = str(error)
        if DIFFUSERS in hosts:
            # Not its pipelines, which import transformers too.
            found, _ = check_package(replace(STANDALONE[0], needs="QwenImageTransformer2DModel"))
            if not found.usable:
                reasons[DIFFUSERS] = f"{found.name} {found.why.fact}"
    free = available_bytes(str(setup.device))
    for row in setup.rows:
        needed = weight_bytes(setup.shape, row.precision).total
        if row.host in reasons:
            left_out[row.name] = reasons[row.host]
        elif needed > free:
            left_out[row.name] = f"needs {format_gib(needed)} and {format_gib(free)} are free"
    return tuple(row for row in setup.rows if row.name not in left_out), left_out, comfyui


def _listed(left_out: dict[str, str]) -> str:
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(each)} ({reason})" for reason, each in names.items())


def conditions(device: Any, comfyui: str = "") -> dict[str, Any]:
    """Names card, software, and the commit of this clone."""
    import torch

    cards = read_cards(torch) if device.type == "cuda" else None
    card = cards.usable[device.index or 0] if cards else None
    software: dict[str, Any] = {"torch": torch.__version__, "CUDA": torch.version.cuda}
    software["cuDNN"] = torch.backends.cudnn.version()
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            software[name] = version(name)
    if comfyui:
        software["ComfyUI"] = comfyui
    commit = ""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        commit = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    return {
        "card": card.name if card else "CPU",
        "driver": cards.driver if cards else "",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "qwen_l40s": __version__,
        "commit": commit,
        "software": software,
    }


def import_comfyui(*, cpu: bool, keep_on_card: bool = True) -> str:
    """Imports ComfyUI, one that is importable already, else the one `doctor` finds, without dynamic
    VRAM. `keep_on_card` is its --highvram. Returns its version, or raises UnavailableError.
    """
    started = "comfy.model_management" in sys.modules
    if not started and find_spec("comfy") is None:
        folder = comfyui_folder()
        found = check_comfyui(folder)
        if not found.usable:
            raise UnavailableError(f"ComfyUI: {found.why.fact}; set COMFYUI_PATH to its folder")
        sys.path.insert(0, str(Path(folder).resolve()))
    try:
        if not started:
            arguments = importlib.import_module("comfy.cli_args").args
            arguments.cpu, arguments.highvram = cpu, keep_on_card and not cpu
        importlib.import_module("comfy.sample")  # imports all that a run needs
        found_version = str(importlib.import_module("comfyui_version").__version__)
    except (ImportError, RuntimeError) as error:
        raise UnavailableError(
            f"ComfyUI cannot be imported here ({first_line(error)}): use ComfyUI's Python"
        ) from error
    if fallback := unsupported_host():
        raise UnavailableError(str(fallback))
    return found_version
