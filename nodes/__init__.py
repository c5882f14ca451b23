"""Lists the nodes of this pack, and registers them through ComfyUI's V3 interface."""

from __future__ import annotations

import logging

from comfy_api.latest import ComfyExtension, io

from ..hosts.comfyui.contract import news_of_host, unsupported_host
from .advise import QwenL40SAdviseGPU
from .encoder_cache import QwenL40SEncoderCache
from .estimate import QwenL40SEstimateVRAM, QwenL40SReport
from .loaders import QwenL40SLoad, QwenL40SLoadModel, QwenL40SLoadTextEncoder, QwenL40SLoadVAE
from .lora import QwenL40SLoadLora
from .nag import QwenL40SNAG
from .optimize import QwenL40SCFGNorm, QwenL40SOptimize, QwenL40SSplitCards
from .save import QwenL40SSaveImage, QwenL40SSaveQuantized
from .sigmas import QwenL40SSigmas
from .step_cache import QwenL40SStepCache
from .vae import QwenL40SVAEDecode, QwenL40SVAEEncode

logger = logging.getLogger(__name__)

NODES: list[type[io.ComfyNode]] = [
    QwenL40SLoad,
    QwenL40SLoadModel,
    QwenL40SLoadTextEncoder,
    QwenL40SLoadVAE,
    QwenL40SLoadLora,
    QwenL40SEncoderCache,
    QwenL40SOptimize,
    QwenL40SSplitCards,
    QwenL40SCFGNorm,
    QwenL40SStepCache,
    QwenL40SNAG,
    QwenL40SSigmas,
    QwenL40SVAEDecode,
    QwenL40SVAEEncode,
    QwenL40SSaveImage,
    QwenL40SSaveQuantized,
    QwenL40SEstimateVRAM,
    QwenL40SAdviseGPU,
    QwenL40SReport,
]


class QwenL40SExtension(ComfyExtension):
    """Registers every node, whatever the host's version: a node that cannot run says why."""

    async def on_load(self) -> None:
        if fallback := unsupported_host():
            logger.warning(str(fallback))
            return
        for sentence in news_of_host():
            logger.warning(sentence)

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES


async def comfy_entrypoint() -> ComfyExtension:
    """Gives ComfyUI the nodes; it looks for this name."""
    return QwenL40SExtension()
