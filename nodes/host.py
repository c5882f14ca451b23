"""What every node does before it works: make sure that the host is one we know."""

from __future__ import annotations

from comfy_api.latest import io, ui

from ..errors import UnavailableError
from ..hosts.comfyui.compatibility import what_is_off

CATEGORY = "Qwen-Image/L40S"


def require_host() -> None:
    """Raises UnavailableError with one sentence when ComfyUI is too old or has changed."""
    sentence = what_is_off()
    if sentence:
        raise UnavailableError(sentence)


def with_report(*outputs: object, report: str) -> io.NodeOutput:
    """Returns the outputs and the report, which the page and the history show as text."""
    return io.NodeOutput(*outputs, report, ui=ui.PreviewText(report))
