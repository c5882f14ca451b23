"""What a benchmark was measured under, and what it leaves out because it cannot run here."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import UnavailableError
from ..optimizations import software
from ..optimizations.hardware import read_cards
from ..planning.memory import (
    TransformerShape,
    format_gib,
    step_activation_bytes,
    weight_bytes,
)
from ..planning.work import REFERENCE_SIDE, Inputs
from .bench_rows import COMFYUI, DIFFUSERS, Row

if TYPE_CHECKING:
    import torch

PACKAGES = ("triton", "comfy-kitchen", "diffusers")


def runnable(
    rows: Sequence[Row], shape: TransformerShape, inputs: Sequence[Inputs], device: torch.device
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
    from ..hosts.diffusers.device import available_bytes

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


def needed_bytes(row: Row, shape: TransformerShape, inputs: Sequence[Inputs]) -> int:
    """Weights, and what the largest forward pass takes beside them."""
    beside = (
        step_activation_bytes(
            shape,
            width=each.width,
            height=each.height,
            batch=each.batch,
            text_tokens=each.text,
            reference_pixels=[(REFERENCE_SIDE, REFERENCE_SIDE)] * each.references,
        )
        for each in inputs
    )
    return weight_bytes(shape, row.precision).total + max(beside)


def by_reason(left_out: dict[str, str]) -> str:
    """One line: what is left out and why."""
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(each)} ({reason})" for reason, each in names.items())


def conditions(device: torch.device, comfyui: str) -> dict[str, Any]:
    """Card and software."""
    import torch

    cards = read_cards(torch) if device.type == "cuda" else None
    card = cards.usable[device.index or 0] if cards else None
    found = {"torch": torch.__version__, "CUDA": torch.version.cuda}
    found["cuDNN"] = torch.backends.cudnn.version()
    found |= _versions()
    if comfyui:
        found["ComfyUI"] = comfyui
    return {
        "card": card.name if card else "CPU",
        "sm": list(card.sm) if card else None,
        "driver": cards.driver if cards else "",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "qwen_l40s": __version__,
        "software": found,
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _import_host(host: str, device: torch.device) -> str:
    # Packages greet on stdout when imported; the last line there has to be ours.
    with contextlib.redirect_stdout(sys.stderr):
        if host == COMFYUI:
            from ..hosts.comfyui.library import import_comfyui

            return import_comfyui(cpu=device.type == "cpu")
        package = next(each for each in software.STANDALONE if each.distribution == DIFFUSERS)
        # Not its pipelines, which import transformers too.
        needed = replace(package, needs="QwenImageTransformer2DModel")
        capability, _ = software.check_package(needed)
        if not capability.usable:
            raise UnavailableError(f"{capability.name} {capability.reason}")
        return ""
