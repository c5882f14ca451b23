"""What a benchmark was measured under, and what it leaves out because it cannot run here."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..cli.output import png_bytes, write_whole
from ..errors import UnavailableError
from ..machine import packages as software
from ..machine.card import read_cards
from ..planning.bytes import step_activation_bytes, weight_bytes
from ..planning.work import Inputs
from ..spec import REFERENCE_SIDE, TransformerShape, format_gib
from .chart import draw_chart
from .rows import COMFYUI, DIFFUSERS, Row
from .table import baseline_of, heading, kernel_lines, line, waterfall

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
            from .comfyui import import_comfyui

            return import_comfyui(cpu=device.type == "cpu")
        package = next(each for each in software.STANDALONE if each.distribution == DIFFUSERS)
        # Not its pipelines, which import transformers too.
        needed = replace(package, needs="QwenImageTransformer2DModel")
        capability, _ = software.check_package(needed)
        if not capability.usable:
            raise UnavailableError(f"{capability.name} {capability.reason}")
        return ""


# Collects benchmark rows: each is printed and written as soon as it is there.

Fields = dict[str, Any]
SIGNIFICANT = 5


class Report:
    """The results of one run.

    Args:
        conditions: what they were measured under.
        path: a JSON file that holds the rows so far; None for none.
        kernels: whether each row's kernels are printed.
    """

    def __init__(self, conditions: Fields, path: Path | None, kernels: bool) -> None:
        self.rows: list[Fields] = []
        self._conditions, self._path, self._kernels = conditions, path, kernels
        print(heading(conditions["what"]), flush=True)

    @property
    def failed(self) -> int:
        """How many rows failed."""
        return sum("error" in row for row in self.rows)

    def take(self, name: str, inputs: Inputs, fields: Fields) -> None:
        """Adds a row."""
        row = {"name": name, "size": inputs.size, "batch": inputs.batch, **fields}
        self.rows.append(row)
        print(line(self._conditions["what"], row, baseline_of(self.rows, row)), flush=True)
        if self._kernels and (lines := kernel_lines(row)):
            print("\n".join(lines), flush=True)
        self._write()

    def finish(self, chart: Path | None) -> None:
        """Prints the waterfall and, as the last line, everything as JSON; draws the chart."""
        if lines := waterfall(self.rows):
            print("\n".join(lines))
        if paths := _paths(self.rows):
            print(f"\n{paths}")
        if chart is not None:
            write_whole(chart, png_bytes(draw_chart(self.rows, self._conditions)))
        print(json.dumps(self._results()), flush=True)

    def _write(self) -> None:
        if self._path is not None:
            write_whole(self._path, json.dumps(self._results(), indent=1).encode() + b"\n")

    def _results(self) -> Fields:
        return _rounded({"conditions": self._conditions, "rows": self.rows})


def _paths(rows: list[Fields]) -> str:
    """What ran in our rows, of the first size."""
    told = {row["name"]: row["paths"] for row in reversed(rows) if "paths" in row}
    return "\n".join(f"{name}:\n{_indented(text)}" for name, text in reversed(told.items()))


def _indented(text: str) -> str:
    return "\n".join(f"  {part}" for part in text.splitlines())


def _rounded(value: Any) -> Any:
    """Floats to five digits, wherever they stand."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT}g}")
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, (list, tuple)) else value
