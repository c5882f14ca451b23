"""Maps the tensors of a part into memory the way ComfyUI does it itself.

`comfy.utils.load_torch_file` maps files and copies nothing. Under dynamic VRAM its tensors also
carry the place in the file that they come from, from which the host reads straight to the card.
"""

from __future__ import annotations

import comfy.utils
import torch

from ...loaders.source import Source


def map_tensors(source: Source) -> dict[str, torch.Tensor]:
    """Returns {name without the part's prefix: tensor on the CPU}; file pages are read on use."""
    tensors: dict[str, torch.Tensor] = {}
    prefix = source.part.prefix
    for path in source.files:
        for name, tensor in comfy.utils.load_torch_file(str(path)).items():
            if name.startswith(prefix):
                tensors[name.removeprefix(prefix)] = tensor
    return tensors
