"""Where the model runs and how much memory there is."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import torch

from ...errors import SettingError, UnavailableError


def choose_device(requested: str) -> str:
    """Returns `cpu` or `cuda:N`; `auto` is the current CUDA card, or the CPU where there is none.

    Raises:
        SettingError: the name is not `auto`, `cpu`, `cuda` or `cuda:N`.
        UnavailableError: the card that was asked for is not there.
    """
    match = re.fullmatch(r"auto|cpu|cuda(?::(\d+))?", requested)
    if not match:
        raise SettingError(f"device {requested!r} is unknown: choose auto, cpu, cuda or cuda:N.")
    cards = torch.cuda.device_count()
    if requested == "cpu" or (requested == "auto" and not cards):
        return "cpu"
    if not cards:
        raise UnavailableError(
            f"device {requested!r} needs a CUDA card and torch {torch.__version__} sees none: use "
            "--device cpu, or see `qwen-l40s doctor`."
        )
    index = int(match[1]) if match[1] else torch.cuda.current_device()
    if index >= cards:
        raise UnavailableError(
            f"device {requested!r} is not there: this machine has cuda:0 to cuda:{cards - 1}."
        )
    return f"cuda:{index}"


def available_bytes(device: str) -> int:
    """Memory that can be had on the device now, in bytes."""
    if device != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    available = psutil.virtual_memory().available
    left = cgroup_available_bytes(Path("/sys/fs/cgroup"))
    return available if left is None else min(available, left)


def cgroup_available_bytes(group: Path) -> int | None:
    """What a container's limit (cgroup version 2) leaves; None where there is no limit.

    psutil reports the memory of the host, inside a container too.
    """
    try:
        limit = int((group / "memory.max").read_text())
    except (OSError, ValueError):  # no such file, or the word "max"
        return None
    used = int((group / "memory.current").read_text())
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    # Page cache counts as used, and the kernel gives it back on demand.
    return limit - used + int(stat["inactive_file"])
