"""Chooses the device of a run, and reads how much memory it has."""

from __future__ import annotations

import re

import torch

from ..errors import SettingError, UnavailableError
from .memory import available_memory


def choose_device(requested: str) -> str:
    """Returns `cpu` or `cuda:N`; `auto` is the current CUDA card, or the CPU where there is none.
    Raises SettingError for another name, UnavailableError without that card.
    """
    match = re.fullmatch(r"auto|cpu|cuda(?::(\d+))?", requested)
    if not match:
        raise SettingError(f"device {requested!r} is unknown: choose auto, cpu, cuda or cuda:N.")
    cards = torch.cuda.device_count()
    if requested == "cpu" or (requested == "auto" and not cards):
        return "cpu"
    if not cards:
        raise UnavailableError(
            f"device {requested!r} needs a CUDA GPU, but torch {torch.__version__} sees none: use "
            "--device cpu, or see `qwen-l40s doctor`."
        )
    index = int(match[1]) if match[1] else torch.cuda.current_device()
    if index >= cards:
        raise UnavailableError(
            f"device {requested!r} does not exist: this machine has cuda:0 to cuda:{cards - 1}."
        )
    return f"cuda:{index}"


def card_to_measure(name: str, small: str) -> torch.device:
    """Makes the device of `bench` the current one; raises UnavailableError without a card."""
    chosen = choose_device(name)
    if chosen == "cpu" and name == "auto":
        raise UnavailableError(
            "bench measures a CUDA GPU, but torch sees none: see `qwen-l40s doctor`, or try bench "
            f"with {small}."
        )
    device = torch.device(chosen)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # ComfyUI takes the current one
    return device


def available_bytes(device: str) -> int:
    """Returns the memory that can be had on the device now, in bytes."""
    return available_memory() if device == "cpu" else torch.cuda.mem_get_info(device)[0]
