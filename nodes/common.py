"""What nodes share: the check of the host, reports and pictures, and inputs of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from comfy_api.latest import io, ui

from ..errors import UnavailableError
from ..hosts.comfyui.contract import unsupported_host
from ..hosts.comfyui.messages import show_text
from ..options import Option, options

if TYPE_CHECKING:
    from PIL import Image

CATEGORY = "Qwen-Image/L40S"
SUMMARY_LINES = 6


def require_host() -> None:
    """Raises UnavailableError with one sentence when ComfyUI is too old or has changed."""
    if fallback := unsupported_host():
        raise UnavailableError(fallback.reason)


def with_report(*outputs: object, report: str, summary: str | None = None) -> io.NodeOutput:
    """Returns the outputs and the report, with what the page shows on the node."""
    return io.NodeOutput(*outputs, report, ui=said(report, summary))


def said(report: str, summary: str | None = None) -> dict[str, list[str]]:
    """What a node says after a run, for the history and for web/qwen_l40s.js.

    Args:
        report: the whole text.
        summary: at most `SUMMARY_LINES` short lines, the answer first; else the report's first.
    """
    lines = (report if summary is None else summary).splitlines()[:SUMMARY_LINES]
    return {"text": [report], "qwen_l40s": ["\n".join(lines)]}


def with_picture(
    node: type[io.ComfyNode], picture: Image.Image, summary: str, report: str, *outputs: object
) -> io.NodeOutput:
    """Returns the picture as an IMAGE, the report and the outputs; the history has the first two,
    and the page shows the picture and the summary in the node.
    """
    show_text(node, summary)
    image = torch.from_numpy(np.asarray(picture.convert("RGB"), np.float32) / 255).unsqueeze(0)
    shown = ui.PreviewImage(image, cls=node).as_dict()
    return io.NodeOutput(image, report, *outputs, ui=shown | said(report, summary))


def request_inputs(*, rare: bool) -> list[io.Input]:
    """The inputs of the estimator's nodes that say what is to run."""
    return [_input(option) for option in options(rare=rare)]


def _input(option: Option) -> io.Input:
    about = {"default": option.default, "tooltip": f"{option.help} {option.wired}".strip()}
    if option.rare:
        about |= {"optional": True, "advanced": True}
    if option.choices:
        return io.Combo.Input(option.name, options=list(option.choices), **about)
    kind = io.Float.Input if isinstance(option.default, float) else io.Int.Input
    return kind(option.name, min=option.least, max=option.most, step=option.step, **about)
