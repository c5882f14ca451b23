"""What every node does before it works: make sure that the host is one we know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from comfy_api.latest import io, ui

from ..errors import UnavailableError
from ..hosts.comfyui.contract import what_is_off
from ..hosts.comfyui.messages import show_text

if TYPE_CHECKING:
    from PIL import Image

CATEGORY = "Qwen-Image/L40S"


def require_host() -> None:
    """Raises UnavailableError with one sentence when ComfyUI is too old or has changed."""
    sentence = what_is_off()
    if sentence:
        raise UnavailableError(sentence)


def with_report(*outputs: object, report: str) -> io.NodeOutput:
    """Returns the outputs and the report, which the page and the history show as text."""
    return io.NodeOutput(*outputs, report, ui=ui.PreviewText(report))


# What a node gives that shows a picture and its report in the page.


def with_picture(
    node: type[io.ComfyNode], picture: Image.Image, summary: str, report: str, *outputs: object
) -> io.NodeOutput:
    """Returns the picture as an IMAGE, the report and the outputs; the history has the first two,
    and the page shows the picture and the summary in the node.
    """
    show_text(node, summary)
    image = torch.from_numpy(np.asarray(picture.convert("RGB"), np.float32) / 255).unsqueeze(0)
    shown = (ui.PreviewImage(image, cls=node), ui.PreviewText(report))
    entries = {name: value for part in shown for name, value in part.as_dict().items()}
    return io.NodeOutput(image, report, *outputs, ui=entries)
