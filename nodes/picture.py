"""What a node gives that shows a picture and its report in the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from comfy_api.latest import io, ui

from ..hosts.comfyui.page import show_text

if TYPE_CHECKING:
    from PIL import Image


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
