"""`qwen-l40s doctor`: what of this machine can be used, and why not."""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from ..errors import SettingError
from ..machine import memory as resources
from ..machine import packages as software
from ..machine.card import (
    Capability,
    InstalledCards,
    State,
    driver_capability,
    read_cards,
    tensor_cores,
)


@dataclass(frozen=True)
class Diagnosis:
    """Every check, and whether `qwen-l40s generate` and the ComfyUI nodes can run.

    Attributes:
        checks: One capability a line, in the order they are shown.
        device: "cuda" or "cpu"; None when generation cannot run.
        remedy: What makes generation possible; empty when it is.
        nodes: Whether the nodes can run: ComfyUI is there, new enough, and this is its Python.
    """

    checks: tuple[Capability, ...]
    device: str | None
    remedy: str
    nodes: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Says what of this machine can be used, and why not. Exit code 1 when nothing can run."
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument(
        "--models", type=Path, metavar="DIR", help="the folder whose disk is to hold the models"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the diagnosis.

    Returns:
        0 when generation or the nodes can run on this machine, on the CPU at least; 1 when neither
        can.
    """
    if args.models is not None and not args.models.is_dir():
        raise SettingError(
            f"--models {args.models} is not a folder; create it or name the one with the models"
        )
    # Some packages greet on stdout when imported, which would spoil --json.
    with contextlib.redirect_stdout(sys.stderr):
        diagnosis = diagnose(args.models)
    print(_as_json(diagnosis) if args.json else _as_table(diagnosis))
    return 0 if diagnosis.device or diagnosis.nodes else 1


def diagnose(models: Path | None = None) -> Diagnosis:
    """Looks at the machine; imports torch, diffusers and transformers where they are installed.

    Args:
        models: The folder whose disk is to hold the models; None for ComfyUI's and the HF cache.
    """
    torch_check, torch = software.check_torch()
    cards = read_cards(torch)
    load = torch is not None
    others = [software.check_package(package, load=load)[0] for package in software.STANDALONE]
    needed = [torch_check, *others]
    comfyui = software.find_comfyui()
    comfyui_check = software.check_comfyui(comfyui)
    if models is not None:
        folders = [models]
    else:
        folders = [comfyui / "models"] if comfyui_check.usable else []
        folders.append(resources.hugging_face_cache())
    python = f"{platform.python_version()}, {platform.platform(terse=True)}"
    checks = (
        Capability("Python", State.USABLE, python),
        *_card_checks(cards),
        driver_capability(cards, torch.version.cuda if torch else None),
        *tensor_cores(cards.usable[0] if cards.usable else None),
        *needed,
        software.check_triton(cards),
        *_attention_checks(cards, torch_check),
        software.check_kitchen(torch),
        comfyui_check,
        resources.check_memory(),
        resources.check_system_disk(),
        *map(resources.check_model_disk, folders),
    )
    remedies = [check.remedy for check in needed if not check.usable]
    device = None if remedies else "cuda" if cards.usable else "cpu"
    kitchen = find_spec(software.KITCHEN.module) is not None  # ComfyUI's Python has it
    nodes = comfyui_check.usable and torch_check.usable and kitchen
    return Diagnosis(checks, device, _one_remedy(remedies), nodes)


def _card_checks(cards: InstalledCards) -> tuple[Capability, ...]:
    if not cards.usable:
        return (Capability("card", State.NOT_USABLE, cards.reason, cards.remedy),)
    state, warned = (State.LIMITED, f"; {cards.reason}") if cards.reason else (State.USABLE, "")
    return tuple(
        Capability(f"card {index}", state, f"{card}{warned}", cards.remedy)
        for index, card in enumerate(cards.usable)
    )


def _attention_checks(cards: InstalledCards, torch_check: Capability) -> tuple[Capability, ...]:
    """One line for each attention backend; on a card each runs once, on a small input."""
    if not torch_check.usable:
        return (Capability("attention", State.NOT_USABLE, "it needs torch"),)
    from ..optimizations.attention import check_backends

    return check_backends(cards)


def _one_remedy(remedies: list[str]) -> str:
    """The remedies in one line, with one `pip install` for everything that is plainly missing."""
    plain = [
        text.removeprefix("pip install ") for text in remedies if text.startswith('pip install "')
    ]
    others = [text for text in remedies if not text.startswith('pip install "')]
    return "; ".join(([f"pip install {' '.join(plain)}"] if plain else []) + others)


def _as_table(diagnosis: Diagnosis) -> str:
    width = max(len(state.value) for state in State)
    rows = []
    for check in diagnosis.checks:
        rows.append(f"{check.state.value:{width}}  {check.name}: {check.reason}")
        if check.remedy:
            rows.append(f"{'':{width}}  -> {check.remedy}")
    verdict = {
        "cuda": "Generation can run here, on the card.",
        "cpu": "Generation can run here, on the CPU: the bundled micro model in seconds, "
        "the full model very slowly.",
        None: f"Generation cannot run here. Remedy: {diagnosis.remedy}",
    }
    nodes = ["The ComfyUI nodes can run here."] if diagnosis.nodes else []
    return "\n".join([*rows, "", *nodes, verdict[diagnosis.device]])


def _as_json(diagnosis: Diagnosis) -> str:
    found = {
        "can_generate": diagnosis.device is not None,
        "device": diagnosis.device,
        "remedy": diagnosis.remedy,
        "can_run_nodes": diagnosis.nodes,
    }
    return json.dumps({**found, "checks": [asdict(check) for check in diagnosis.checks]}, indent=2)
