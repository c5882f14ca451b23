"""Computes guidance as diffusers does for Qwen-Image.

After `uncond + scale * (cond - uncond)`, diffusers gives every token of the result the norm that
it has in `cond` (`QwenImagePipeline.__call__`). A token is a patch of 2 x 2 latent pixels with
all their channels. ComfyUI's CFGNorm takes the norms of single pixels, which leaves a difference
of 2 % in the final latent of the micro model at scale 4.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from ....families.comfyui import kind_of

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

logger = logging.getLogger(__name__)

PATCH = 2


def token_norms(latent: torch.Tensor) -> torch.Tensor:
    """Returns the norm of each pixel's token: [B, C, ..., H, W] gives [B, 1, ..., H, W].

    Sides may be odd: ComfyUI pads them to whole tokens, and what it pads counts nothing here.
    """
    height, width = latent.shape[-2:]
    squares = latent.float().square().sum(dim=1, keepdim=True)
    padded = F.pad(squares, (0, width % PATCH, 0, height % PATCH))
    rows, columns = padded.shape[-2:]
    tokens = padded.unflatten(-2, (rows // PATCH, PATCH)).unflatten(-1, (columns // PATCH, PATCH))
    sums = tokens.sum(dim=(-3, -1), keepdim=True).expand_as(tokens)
    return sums.flatten(-2).flatten(-3, -2)[..., :height, :width].sqrt()


def rescale_by_token(model: ModelPatcher) -> ModelPatcher:
    """Returns a clone whose guided predictions have the token norms of the positive one.

    It takes the one place that ComfyUI has for a guidance function, as CFGNorm does. A MODEL that
    diffusers guides without norms, Qwen-Image-2.1, stays as it is.
    """
    kind = kind_of(model.model)
    if kind and not kind.family.norm_guided:
        logger.warning(
            "Qwen-Image CFG Rescale: no effect on %s, because diffusers does not rescale CFG "
            "there.",
            kind.family.title,
        )
        return model

    def guide(arguments: dict[str, Any]) -> torch.Tensor:
        cond, uncond = arguments["cond"], arguments["uncond"]
        guided = uncond + arguments["cond_scale"] * (cond - uncond)
        # A token that guidance made zero stays zero.
        return guided * (token_norms(cond) / token_norms(guided).clamp_min(1e-12)).to(guided.dtype)

    clone = model.clone()
    clone.set_model_sampler_cfg_function(guide)
    return clone
