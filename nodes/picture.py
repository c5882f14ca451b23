"""What a node gives that shows a picture and its report in the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from comfy_api.latest import io, ui

if TYPE_CHECKING:
    from PIL import Image


def with_picture(
    node: type[io.ComfyNode], picture: Image.Image, report: str, *outputs: object
) -> io.NodeOutput:
    """Returns the picture as an IMAGE, the report and the outputs; page and history show the first
    two.
    """
    image = torch.from_numpy(np.asarray(picture.convert("RGB"), np.float32) / 255).unsqueeze(0)
    shown = (ui.PreviewImage(image, cls=node), ui.PreviewText(report))
    entries = {name: value for part in shown for name, value in part.as_dict().items()}
    return io.NodeOutput(image, report, *outputs, ui=entries)
