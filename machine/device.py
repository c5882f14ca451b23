"""The device of a run: which one, how much memory it has, and torch's process-wide switches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import SettingError, UnavailableError
from ..patches import switched
from .memory import available_memory


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
            f"device {requested!r} needs a CUDA card, and torch {torch.__version__} sees none: use "
            "--device cpu, or see `qwen-l40s doctor`."
        )
    index = int(match[1]) if match[1] else torch.cuda.current_device()
    if index >= cards:
        raise UnavailableError(
            f"device {requested!r} is not there: this machine has cuda:0 to cuda:{cards - 1}."
        )
    return f"cuda:{index}"


def card_to_measure(name: str, small: str) -> torch.device:
    """Makes the device of `bench --device` the current one.

    Raises:
        UnavailableError: `auto` finds no card; the arguments `small` try it on a CPU.
    """
    chosen = choose_device(name)
    if chosen == "cpu" and name == "auto":
        raise UnavailableError(
            "bench measures a CUDA card and torch sees none: see `qwen-l40s doctor`, or try it "
            f"with {small}."
        )
    device = torch.device(chosen)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # ComfyUI takes the current one
    return device


def available_bytes(device: str) -> int:
    """Returns the memory that can be had on the device now, in bytes."""
    return available_memory() if device == "cpu" else torch.cuda.mem_get_info(device)[0]


@contextmanager
def flags_for_a_run(tf32: bool, cudnn_benchmark: bool) -> Iterator[None]:
    """Sets what is asked for and puts back what was there; False leaves a switch alone."""
    switches = _tf32() if tf32 else []
    if cudnn_benchmark:
        switches.append((torch.backends.cudnn, "benchmark", True))
    with switched("switches", switches):
        yield


def _tf32() -> list[tuple[object, str, object]]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    older = [(matmul, "allow_tf32", True), (cudnn, "allow_tf32", True)]
    try:
        for switch, name, _ in older:
            getattr(switch, name)
    except RuntimeError:  # somebody uses torch's newer switches, and torch takes one kind only
        return [(matmul, "fp32_precision", "tf32"), (cudnn.conv, "fp32_precision", "tf32")]
    return older


class Later:
    """Reads numbers that the card is still computing, copied to the host without waiting.

    Args:
        step: After whose beginning the card computes them.
        numbers: 0-dimensional tensors.
    """

    def __init__(self, step: int, *numbers: torch.Tensor) -> None:
        self.step = step
        values = torch.stack([number.float() for number in numbers])
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.current_stream(values.device).record_event()
        else:
            self._values = values.cpu()

    @property
    def ready(self) -> bool:
        """Says whether reading them takes no wait."""
        return self._event is None or self._event.query()

    def read(self) -> list[float]:
        """Waits until the card has come that far, and gives them."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()
