"""`qwen-l40s doctor`: what of this machine can be used, and why not."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from ..charts.text import precision_reason
from ..errors import CheckpointError, SettingError
from ..files import print_text
from ..loaders.gguf import GGUF_SUFFIX, SPLIT
from ..loaders.shards import NUMBERED
from ..loaders.source import PIPELINE_INDEX, PLACES, open_source
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
from ..machine.settings import NAME, read_settings, settings_file
from ..planning.plan import auto_precision
from ..planning.request import AUTO
from ..spec.formats import format_gib

# {part: the kinds of folders that ComfyUI's nodes look for it in}
PARTS = {
    "transformer": ("diffusion_models", "checkpoints", "diffusers"),
    "text_encoder": ("text_encoders", "checkpoints", "diffusers"),
    "vae": ("vae", "checkpoints", "diffusers"),
}
LISTED = 3  # files of a part


@dataclass(frozen=True)
class Diagnosis:
    checks: tuple[Capability, ...]  # in the order they are shown
    device: str | None  # "cuda" or "cpu"; None when generation cannot run
    remedy: str  # what makes generation possible; empty when it is
    nodes: bool  # whether ComfyUI is there, new enough, and this is its Python
    nodes_remedy: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Checks this machine: GPU, links between GPUs, driver, packages, ComfyUI, its model "
        "files, memory and disks. Each line says whether a part is usable, and what to do if not. "
        "Run it with ComfyUI's Python. Exit code 1 if neither the nodes nor `generate` can run."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument(
        "--comfyui", type=Path, metavar="DIR", help="ComfyUI's folder; default: around this pack"
    )
    parser.add_argument(
        "--models",
        type=Path,
        metavar="DIR",
        help="the models folder to check; default: ComfyUI's",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the diagnosis; returns 1 when neither generation nor the nodes can run here."""
    if args.models is not None and not args.models.is_dir():
        raise SettingError(
            "--models is not a folder: create it, or name the one with the models.", args.models
        )
    # Some packages greet on stdout when imported, which would spoil --json.
    with contextlib.redirect_stdout(sys.stderr):
        diagnosis = diagnose(args.models, args.comfyui)
    print_text(_as_json(diagnosis) if args.json else _as_table(diagnosis))
    return 0 if diagnosis.device or diagnosis.nodes else 1


def diagnose(models: Path | None = None, comfyui: Path | None = None) -> Diagnosis:
    """Looks at the machine, by default with the ComfyUI around this package and its models."""
    torch_check, torch = software.check_torch()
    cards = read_cards(torch)
    load = torch is not None
    others = [software.check_package(package, load=load)[0] for package in software.STANDALONE]
    needed = [torch_check, *others]
    code = comfyui or software.find_comfyui()
    comfyui_check = software.check_comfyui(code)
    models = models or (comfyui / "models" if comfyui else software.models_folder(code))
    settings = check_settings(comfyui / "user" / NAME if comfyui else settings_file())
    folders = software.model_folders(models, code) if models else {}
    elsewhere = [path for paths in folders.values() for path in paths if models not in path.parents]
    python = f"{platform.python_version()}, {platform.platform(terse=True)}"
    checks = (
        State.USABLE.of("Python", python),
        *_card_checks(cards),
        *_link_checks(cards),
        driver_capability(cards, torch.version.cuda if torch else None),
        *tensor_cores(cards.usable[0] if cards.usable else None),
        *needed,
        software.check_triton(cards),
        *_attention_checks(cards, torch_check),
        software.check_kitchen(torch),
        _check_auto(torch, cards),
        software.check_isal(),
        comfyui_check,
        *software.check_folder(),
        settings,
        *(_model_checks(folders) if models else ()),
        resources.check_memory(),
        resources.check_system_disk(),
        resources.check_model_disk(models or resources.hugging_face_cache(), elsewhere),
    )
    remedies = [check.why.remedy for check in needed if not check.usable]
    device = None if remedies else "cuda" if cards.usable else "cpu"
    kitchen = find_spec(software.KITCHEN.module) is not None  # ComfyUI's Python has it
    nodes = comfyui_check.usable and torch_check.usable and kitchen
    nodes_remedy = comfyui_check.why.remedy or "run this with ComfyUI's Python"
    return Diagnosis(checks, device, _one_remedy(remedies), nodes, "" if nodes else nodes_remedy)


def check_settings(path: Path) -> Capability:
    try:
        found = read_settings(path)
    except SettingError as error:
        remedy = "fix the file: until then, every setting has its default"
        return State.LIMITED.of("settings", str(error), remedy)
    where = str(path) if path.exists() else f"no {path}"
    said = ", ".join(f"{name} {text}" for name, text in asdict(found).items() if text)
    return State.USABLE.of("settings", f"{said or 'all default'} ({where})")


def _card_checks(cards: InstalledCards) -> tuple[Capability, ...]:
    if not cards.usable:
        return (Capability("card", State.NOT_USABLE, cards.why),)
    warned = cards.why.fact
    state, warned = (State.LIMITED, f"; {warned}") if warned else (State.USABLE, "")
    return tuple(
        Capability(f"GPU {index}", state, replace(cards.why, fact=f"{card}{warned}"))
        for index, card in enumerate(cards.usable)
    )


def _check_auto(torch: ModuleType | None, cards: InstalledCards) -> Capability:
    """Says what `auto` makes of weights in full precision."""
    if torch is None or not cards.usable:
        return State.LIMITED.of(
            "precision auto", precision_reason("bf16", None, AUTO, "bf16").clause
        )
    from ..optimizations.linear import why_not_int8

    card = cards.usable[0].facts(why_not_int8(torch.device("cuda", 0)))
    name = auto_precision(card)
    state = State.LIMITED if name == "bf16" else State.USABLE
    return state.of("precision auto", precision_reason(name, card, AUTO, None).clause)


def _link_checks(cards: InstalledCards) -> Iterable[Capability]:
    """Takes a fraction of a second for each pair of cards."""
    if len(cards.usable) < 2:
        return ()
    from ..machine.links import check_links

    return check_links(cards)


def _attention_checks(cards: InstalledCards, torch_check: Capability) -> tuple[Capability, ...]:
    if not torch_check.usable:
        return (State.NOT_USABLE.of("attention", "it needs torch"),)
    from ..optimizations.attention import check_backends

    return check_backends(cards)


def _model_checks(folders: Mapping[str, list[Path]]) -> Iterator[Capability]:
    for part, kinds in PARTS.items():
        own = folders[kinds[0]]
        found, refused = [], []
        for path in _model_files([folder for kind in kinds for folder in folders[kind]]):
            try:
                size = sum(file.stat().st_size for file in open_source(path, part).files)
                found.append(f"{path.name} ({format_gib(size)})")
            except (CheckpointError, OSError):
                # Other models lie there too: only what is named like one is refused.
                if "qwen" in path.name.lower() and path.parent in own:
                    refused.append(path)
        reason = ", ".join(found[:LISTED]) if found else f"no file in {own[0]}"
        if len(found) > LISTED:
            reason += f", {len(found) - LISTED} more"
        state = State.USABLE if found else State.NOT_USABLE
        named, place = PLACES[part]
        remedy = "" if found else f"download one to {place}: docs/models.md lists the files"
        if refused:
            state = State.LIMITED if found else state
            reason += f"; refused: {', '.join(path.name for path in refused)}"
            remedy = f"`qwen-l40s inspect {shlex.quote(str(refused[0]))}` shows the reason"
        yield state.of(named.removeprefix("the "), reason, remedy)


def _model_files(folders: list[Path]) -> Iterator[Path]:
    """Finds files and diffusers folders, sorted, also behind links; of parts the first."""
    for folder in dict.fromkeys(folders):
        for base, inside, names in os.walk(folder, followlinks=True):
            inside.sort()
            if PIPELINE_INDEX in names:
                inside.clear()
                yield Path(base)
            else:
                yield from (Path(base, name) for name in sorted(names) if _is_model(name))


def _is_model(name: str) -> bool:
    if name.lower().endswith(GGUF_SUFFIX):
        part = SPLIT.search(name)
        return part is None or int(part[1]) == 1
    return name.endswith(".safetensors") and not NUMBERED.search(name)


def _one_remedy(remedies: list[str]) -> str:
    """Joins remedies, with one `pip install` for everything that is plainly missing."""
    plain = [
        text.removeprefix("pip install ") for text in remedies if text.startswith('pip install "')
    ]
    others = [text for text in remedies if not text.startswith('pip install "')]
    return "; ".join(([f"pip install {' '.join(plain)}"] if plain else []) + others)


def _as_table(diagnosis: Diagnosis) -> str:
    width = max(len(state.value) for state in State)
    rows = []
    for check in diagnosis.checks:
        rows.append(f"{check.state.value:{width}}  {check.name}: {check.why.fact}")
        if check.why.remedy:
            rows.append(f"{'':{width}}  -> {check.why.remedy}")
    verdict = {
        "cuda": "`generate` and `demo` can run here, on the GPU.",
        "cpu": "`generate` and `demo` can run here, on the CPU: the micro model in seconds, a full "
        "model very slowly.",
        None: f"`generate` and `demo` cannot run here: {diagnosis.remedy}",
    }
    nodes = "can run here." if diagnosis.nodes else f"cannot run here: {diagnosis.nodes_remedy}."
    return "\n".join([*rows, "", f"The ComfyUI nodes {nodes}", verdict[diagnosis.device]])


def _as_json(diagnosis: Diagnosis) -> str:
    found = {
        "can_generate": diagnosis.device is not None,
        "device": diagnosis.device,
        "remedy": diagnosis.remedy,
        "can_run_nodes": diagnosis.nodes,
    }
    fields = ("name", "state", "reason", "remedy")
    checks = [
        dict(zip(fields, (it.name, it.state, it.why.fact, it.why.remedy), strict=True))
        for it in diagnosis.checks
    ]
    return json.dumps({**found, "checks": checks}, indent=2)
